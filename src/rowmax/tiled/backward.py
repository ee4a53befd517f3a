"""The backward: the weights of each tile, recomputed from lse, and the gradients' formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Gradients, Tensors, Wanted, parameters_of
from ..call.problem import FAR, Problem
from ..rules import row_stats
from ..rules.over_tensors import head_gradient, product_gradient, score_gradient
from ..rules.score import ScoreTerms
from .scores import (
    bias_tile,
    factor,
    head_terms,
    kept,
    placed_terms,
    power_,
    product,
    scale_of_factor,
    seen_scores,
    sink_of,
    tame,
)
from .strips import Strip, dense_parts, strips


class _Rows(NamedTuple):
    """The rows of a strip, ``[heads, group * rows, ...]``."""

    q: Tensor  # q times factor
    do: Tensor  # divided by the sum of the weights, as is delta (``sum_of_weights``)
    lse: Tensor  # in the units of the scores; +inf where weights are 0
    delta: Tensor  # Delta - dLSE


class Tile(NamedTuple):
    """One tile of a strip, ``[heads, group * rows, cols]``."""

    k: Tensor  # [heads, cols, D]
    P: Tensor
    y: Tensor  # tanh under a softcap
    apart: Tensor | None  # True where a pair must be excluded by index, not by arithmetic


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Return the gradients that are wanted."""
    sums = zeros(problem, tensors, wanted)
    with torch.autocast(dout.device.type, enabled=False):
        for part in dense_parts(problem, tensors):
            rows = part.rows(out, lse, dout, dlse)
            _add(part.problem, part.tensors, part.each(sums), *rows)
    return rounded(problem, tensors, sums)


def rounded(problem: Problem, tensors: Tensors, sums: Gradients) -> Gradients:
    """Return the gradients in their dtypes."""
    return Gradients(
        **{
            name: g.to(problem.gradient_dtype(name, getattr(tensors, name)))
            for name, g in sums._asdict().items()
            if g is not None
        }
    )


def zeros(problem: Problem, tensors: Tensors, wanted: Wanted) -> Gradients:
    """Return zeros for the wanted gradients."""
    inputs = {name: getattr(tensors, name) for name, want in wanted._asdict().items() if want}
    return Gradients(
        **{
            name: torch.zeros(t.shape, dtype=_sum_dtype(problem, name, t), device=t.device)
            for name, t in inputs.items()
        }
    )


def _sum_dtype(problem: Problem, name: str, t: Tensor) -> torch.dtype:
    """Return the accumulator's dtype; t's own where each element is written once (dq, dbias)."""
    pairs = (problem.batch, problem.hq, problem.nq, problem.nk)
    once = name == "q" or (name == "bias" and t.shape == pairs)
    return t.dtype if once else problem.accumulator


def _add(
    problem: Problem,
    tensors: Tensors,
    sums: Gradients,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> None:
    """Add the gradients of one dense call."""
    exact = problem.masked and not tame(problem, tensors, dout, dlse, lse=lse)
    delta = row_stats.delta(out, dout, lse, dlse)
    shift = row_stats.score_lse(lse, problem.natural)
    rest = torch.zeros_like(lse) if problem.natural else None
    for strip in strips(problem, tensors, exact):
        rows = _rows(strip, dout, shift, delta)
        total = sum_of_weights(strip, rows.q, rows.lse, rest)
        if total is not None:  # all gradients are linear in do and delta
            rows = rows._replace(do=rows.do / total, delta=rows.delta / total)
        dQ = torch.zeros_like(rows.q)
        for cols, full in strip.tiles:
            tile = weights(strip, cols, full, rows.q, rows.lse)
            _add_tile(strip, cols, rows, tile, dQ, sums)
        if sums.q is not None:
            strip.store(sums.q, dQ.mul_(problem.scale))
    if sums.sink is not None:
        assert tensors.sink is not None
        sums.sink.add_(row_stats.dsink(tensors.sink, lse, delta, rest))


def _rows(strip: Strip, dout: Tensor, lse: Tensor, delta: Tensor) -> _Rows:
    lse = strip.numbers(lse)
    do = strip.queries(dout).masked_fill(lse == torch.inf, 0.0)
    q = strip.queries(strip.tensors.q) * factor(strip.problem)
    return _Rows(q, do, lse, strip.numbers(delta))


def sum_of_weights(strip: Strip, q: Tensor, lse: Tensor, rest: Tensor | None) -> Tensor | None:
    """Return the sum of the weights ``exp(s - lse)`` of each row, or None where all are 1.

    It differs from 1 where lse is so far from 0 (``FAR``) that rounding lost its fraction. The log
    of the sum goes into ``rest``, which is None for scores in base 2: they are not far.
    """
    if rest is None:
        return None
    far = (lse.abs() >= FAR) & (lse < torch.inf)
    if not bool(far.any()):
        return None
    total = torch.zeros_like(lse)
    for cols, full in strip.tiles:
        total += weights(strip, cols, full, q, lse).P.sum(-1, True)
    if strip.tensors.sink is not None:
        total += torch.exp(sink_of(strip, strip.tensors.sink, total) - lse)
    total = total.masked_fill(~far | (total == 0), 1.0)
    strip.store(rest, total.log())
    return total


def weights(strip: Strip, cols: slice, full: bool, q: Tensor, lse: Tensor) -> Tile:
    """Return a tile of the rows: q with ``factor``, lse in the units of the scores."""
    k = strip.keys(strip.tensors.k, cols)
    S, y, apart = seen_scores(strip, cols, full, q, k)
    P = power_(strip.problem, S.sub_(lse))
    if apart is not None:
        P.masked_fill_(apart, 0.0)
    return Tile(k, P, y, apart)


def _add_tile(
    strip: Strip, cols: slice, rows: _Rows, tile: Tile, dQ: Tensor, sums: Gradients
) -> None:
    """Add one tile's part to dQ and to the other gradients."""
    k, P, y, apart = tile
    apart_t = None if apart is None else apart.transpose(1, 2)
    R = kept(strip, cols)

    if any(x is not None for x in (sums.q, sums.k, sums.bias, sums.heads)):
        dP = torch.bmm(rows.do, strip.keys(strip.tensors.v, cols).transpose(1, 2))
        if R is not None:
            dP.mul_(R)
        dS = score_gradient(P, dP, rows.delta)
        if apart is not None:
            dS.masked_fill_(apart, 0.0)
        add_bias(strip, cols, sums, dS)
        if apart is not None:
            y = y.masked_fill_(apart, 0.0)
        if sums.heads is not None:
            x = torch.bmm(rows.q, k.transpose(1, 2)).mul_(scale_of_factor(strip.problem))
            if apart is not None:
                x.masked_fill_(apart, 0.0)
            terms = placed_terms(strip, cols, dS)._replace(scale=1.0)
            add_heads(strip, sums, dS, terms, (x, y))
        dX = _product_gradient(strip, dS, y)
        if sums.q is not None:
            dQ += product(dX, k, apart)
        if sums.k is not None:
            # rows.q includes factor; dk needs only the scale in it
            dK = product(dX.transpose(1, 2), rows.q, apart_t) * scale_of_factor(strip.problem)
            add_keys(strip, sums.k, cols, dK)
    if sums.v is not None:
        PR = P if R is None else P.mul_(R)
        add_keys(strip, sums.v, cols, product(PR.transpose(1, 2), rows.do, apart_t))


def _product_gradient(strip: Strip, dS: Tensor, y: Tensor) -> Tensor:
    """Return dX of a tile, without scale."""
    terms = head_terms(strip)
    if strip.problem.softcap > 0:
        terms = terms._replace(inner=1)
    return product_gradient(strip.unfolded(dS), strip.unfolded(y), terms).view(dS.shape)


def add_bias(strip: Strip, cols: slice, sums: Gradients, dS: Tensor) -> None:
    """Add a tile's part to the gradient of the bias, if it is wanted."""
    if sums.bias is not None:
        part = bias_tile(sums.bias, strip, cols)
        part += strip.unfolded(dS).flatten(1, 2).sum_to_size(part.shape)


def add_heads(
    strip: Strip, sums: Gradients, dS: Tensor, terms: ScoreTerms, xy: tuple[Tensor, Tensor] | None
) -> None:
    """Add a tile's part to the gradient of heads' parameters, if it is wanted.

    ``xy`` is x and y of ``rules.score``; None where all terms are added, which read neither.
    """
    if sums.heads is not None:
        dS = strip.unfolded(dS)
        x, y = map(strip.unfolded, xy) if xy else (None, None)
        for n, name in enumerate(parameters_of(strip.problem.heads)):
            part = head_gradient(dS, x, y, terms, name)
            sums.heads[n, strip.q_heads] += part.sum((0, 3, 4)).flatten()


def add_keys(strip: Strip, sums: Tensor, cols: slice, part: Tensor) -> None:
    """Add a tile's part ``[heads, cols, D]`` to a gradient of keys or values."""
    view = sums[strip.batch, cols, strip.heads].transpose(1, 2)
    view += part.view(view.shape)
