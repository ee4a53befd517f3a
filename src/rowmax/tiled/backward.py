"""The backward: the weights of each tile, recomputed from lse, and the gradients' formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Gradients, Tensors, Wanted, parameters_of
from ..call.problem import FAR, Problem, each_sequence
from ..rules import row_stats
from ..rules.over_tensors import head_gradient, product_gradient, score_gradient
from ..rules.score import ScoreTerms
from .scores import (
    bias_tile,
    distances,
    factor,
    folded,
    head_terms,
    hidden,
    hide,
    kept,
    power_,
    product,
    scale_of_factor,
    scores,
    sink_of,
    tame,
    unfolded,
)
from .strips import Strip, of_sequence, strips


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
        if not problem.varlen:
            _add(problem, tensors, out, lse, dout, dlse, sums)
        else:
            for n, (rows, cols, one, parts) in enumerate(each_sequence(problem, tensors)):
                _add(
                    one,
                    parts,
                    out[:, rows],
                    lse[:, :, rows],
                    dout[:, rows],
                    None if dlse is None else dlse[:, :, rows],
                    of_sequence(sums, n, rows, cols, one),
                )
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
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sums: Gradients,
) -> None:
    """Add the gradients of one dense call."""
    exact = problem.masked and not tame(problem, tensors, lse, dout, dlse)
    group = problem.group
    delta = row_stats.delta(out, dout, lse, dlse)
    shift = row_stats.score_lse(lse, problem.natural)
    rest = torch.zeros_like(lse) if problem.natural else None
    for strip in strips(problem, tensors):
        rows = _rows(problem, tensors, strip, dout, shift, delta)
        total = sum_of_weights(problem, tensors, strip, exact, (rows.q, rows.lse), rest)
        if total is not None:  # all gradients are linear in do and delta
            rows = rows._replace(do=rows.do / total, delta=rows.delta / total)
        dQ = torch.zeros_like(rows.q)
        for cols, full in strip.tiles:
            tile = weights(problem, tensors, strip, cols, full, exact, (rows.q, rows.lse))
            _add_tile(problem, tensors, strip, cols, rows, tile, dQ, sums)
        if sums.q is not None:
            b, h, g, n = strip.size(group)
            dQ = dQ.mul_(problem.scale).view(b, h, g, n, -1)
            strip.rows_of(sums.q, group).copy_(dQ.permute(0, 3, 1, 2, 4))
    if sums.sink is not None:
        assert tensors.sink is not None
        sums.sink.add_(row_stats.dsink(tensors.sink, lse, delta, rest))


def _rows(
    problem: Problem, tensors: Tensors, strip: Strip, dout: Tensor, lse: Tensor, delta: Tensor
) -> _Rows:
    dtype, group = problem.accumulator, problem.group
    lse, delta = (
        folded(problem, strip, strip.row_numbers(t, group).unsqueeze(-1)) for t in (lse, delta)
    )
    return _Rows(
        q=strip.queries(tensors.q, group, dtype) * factor(problem),
        do=strip.queries(dout, group, dtype).masked_fill(lse == torch.inf, 0.0),
        lse=lse,
        delta=delta,
    )


def sum_of_weights(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    exact: bool,
    rows: tuple[Tensor, Tensor],
    rest: Tensor | None,
) -> Tensor | None:
    """Return the sum of the weights ``exp(s - lse)`` of each row, or None where all are 1.

    It differs from 1 where lse is so far from 0 (``FAR``) that rounding lost its fraction. The log
    of the sum goes into ``rest``, which is None for scores in base 2: they are not far.
    """
    lse = rows[1]
    if rest is None:
        return None
    far = (lse.abs() >= FAR) & (lse < torch.inf)
    if not bool(far.any()):
        return None
    total = torch.zeros_like(lse)
    for cols, full in strip.tiles:
        total += weights(problem, tensors, strip, cols, full, exact, rows).P.sum(-1, True)
    if tensors.sink is not None:
        total += torch.exp(sink_of(problem, tensors.sink, strip, total) - lse)
    total = total.masked_fill(~far | (total == 0), 1.0)
    strip.row_numbers(rest, problem.group).copy_(total.log().view(strip.size(problem.group)))
    return total


def weights(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    cols: slice,
    full: bool,
    exact: bool,
    rows: tuple[Tensor, Tensor],
) -> Tile:
    """Return a tile of the rows (q with ``factor``, lse in the units of the scores)."""
    q, lse = rows
    k = strip.keys(tensors.k, cols, q.dtype)
    S, y = scores(problem, tensors, strip, cols, q, k)
    unseen = None if full else hidden(problem, tensors, strip, cols)
    apart = folded(problem, strip, unseen) if unseen is not None and exact else None
    if unseen is not None and not exact:
        hide(problem, strip, S, unseen)
    P = power_(problem, S.sub_(lse))
    if apart is not None:
        P.masked_fill_(apart, 0.0)
    return Tile(k, P, y, apart)


def _add_tile(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    cols: slice,
    rows: _Rows,
    tile: Tile,
    dQ: Tensor,
    sums: Gradients,
) -> None:
    """Add one tile's part to dQ and to the other gradients."""
    k, P, y, apart = tile
    apart_t = None if apart is None else apart.transpose(1, 2)
    R = kept(problem, tensors, strip, cols) if problem.dropout_threshold else None

    if any(x is not None for x in (sums.q, sums.k, sums.bias, sums.heads)):
        v = strip.keys(tensors.v, cols, dQ.dtype)
        dP = torch.bmm(rows.do, v.transpose(1, 2))
        if R is not None:
            dP.mul_(R)
        dS = score_gradient(P, dP, rows.delta)
        if apart is not None:
            dS.masked_fill_(apart, 0.0)
        if sums.bias is not None:
            part = bias_tile(sums.bias, problem, strip, cols)
            part += unfolded(problem, strip, dS).flatten(1, 2).sum_to_size(part.shape)
        if apart is not None:
            y = y.masked_fill_(apart, 0.0)
        terms = head_terms(problem, tensors, strip)
        if sums.heads is not None:
            _add_heads(problem, strip, cols, sums.heads, dS, rows, tile, terms)
        dX = _product_gradient(problem, strip, dS, y, terms)
        if sums.q is not None:
            dQ += product(dX, k, apart)
        if sums.k is not None:
            # rows.q includes factor; dk needs only the scale in it
            dK = product(dX.transpose(1, 2), rows.q, apart_t) * scale_of_factor(problem)
            add_keys(strip, sums.k, cols, dK)
    if sums.v is not None:
        PR = P if R is None else P.mul_(R)
        add_keys(strip, sums.v, cols, product(PR.transpose(1, 2), rows.do, apart_t))


def _product_gradient(
    problem: Problem, strip: Strip, dS: Tensor, y: Tensor, terms: ScoreTerms
) -> Tensor:
    """Return dX of a tile, without scale."""
    if problem.softcap > 0:
        terms = terms._replace(inner=1)
    dX = product_gradient(unfolded(problem, strip, dS), unfolded(problem, strip, y), terms)
    return dX.view(dS.shape)


def _add_heads(
    problem: Problem,
    strip: Strip,
    cols: slice,
    sums: Tensor,
    dS: Tensor,
    rows: _Rows,
    tile: Tile,
    terms: ScoreTerms,
) -> None:
    """Add a tile's part to the gradient of heads' parameters, ``[P, Hq]``."""
    x = torch.bmm(rows.q, tile.k.transpose(1, 2)).mul_(scale_of_factor(problem))
    if tile.apart is not None:
        x.masked_fill_(tile.apart, 0.0)
    terms = terms._replace(scale=1.0)
    if problem.distance:
        terms = terms._replace(distance=distances(problem, strip, cols, dS))
    dS, x, y = (unfolded(problem, strip, t) for t in (dS, x, tile.y))
    for n, name in enumerate(parameters_of(problem.heads)):
        part = head_gradient(dS, x, y, terms, name)
        sums[n, strip.q_heads(problem.group)] += part.sum((0, 3, 4)).flatten()


def add_keys(strip: Strip, sums: Tensor, cols: slice, part: Tensor) -> None:
    """Add a tile's part ``[heads, cols, D]`` to a gradient of keys or values."""
    view = sums[strip.batch, cols, strip.heads].transpose(1, 2)
    view += part.view(view.shape)
