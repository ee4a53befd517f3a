"""The backward of the tangent: each tile's weights, recomputed, and the second order's formulas.

Names are those of ``rules/tangent.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Cotangents, Gradients, Tangents, Tensors, WantedSecond, parameters_of
from ..call.problem import Problem, each_sequence
from ..rules import row_stats
from ..rules.over_tensors import (
    head_gradient,
    product_curvature,
    product_gradient,
    score_gradients,
)
from ..rules.score import ScoreTerms
from .backward import Tile, add_keys, rounded, sum_of_weights, weights, zeros
from .scores import (
    bias_tile,
    factor,
    folded,
    kept,
    natural_terms,
    product,
    product_tangent,
    scale_of_factor,
    tame,
    tangents_of_scores,
    unfolded,
)
from .strips import Strip, of_sequence, strips

Both = tuple[Gradients, Gradients]


class _Rows(NamedTuple):
    """The rows of a strip, ``[heads, group * rows, ...]``; e, g, b and c by the weights' sum."""

    q: Tensor  # times factor, as tq
    tq: Tensor | None
    lse: Tensor  # in the units of the scores; +inf where weights are 0
    tlse: Tensor
    e: Tensor | None
    g: Tensor
    b: Tensor
    c: Tensor


def tangent_backward(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    out: Tensor,
    lse: Tensor,
    tout: Tensor,
    tlse: Tensor,
    cotangents: Cotangents,
    wanted: WantedSecond,
) -> Both:
    """Return the wanted gradients of the inputs, and those of their tangents."""
    sums = tuple(zeros(problem, tensors, part) for part in wanted)
    if cotangents.tout is None:
        cotangents = cotangents._replace(tout=torch.zeros_like(out))
    with torch.autocast(out.device.type, enabled=False):
        if not problem.varlen:
            _add(problem, tensors, tangents, (out, lse, tout, tlse), cotangents, sums)
        else:
            for n, (rows, cols, one, parts) in enumerate(each_sequence(problem, tensors)):
                here = (_of_rows(t, rows) for t in (out, lse, tout, tlse))
                _add(
                    one,
                    parts,
                    of_sequence(tangents, n, rows, cols, one),
                    tuple(here),
                    Cotangents(*(_of_rows(t, rows) for t in cotangents)),
                    tuple(of_sequence(s, n, rows, cols, one) for s in sums),
                )
    first, second = sums
    return rounded(problem, tensors, first), rounded(problem, tensors, second)


def _of_rows(t: Tensor | None, rows: slice) -> Tensor | None:
    """Return these rows of a ``[1, total_q, Hq, Dv]`` or ``[1, Hq, total_q]``."""
    if t is None:
        return None
    return t[:, rows] if t.dim() == 4 else t[:, :, rows]


def _add(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: tuple[Tensor | None, ...],
    cotangents: Cotangents,
    sums: tuple[Gradients, ...],
) -> None:
    """Add the gradients of one dense call; ``results`` is (out, lse, tout, tlse)."""
    out, lse, tout, tlse = results
    assert out is not None
    assert lse is not None
    assert tout is not None
    assert tlse is not None
    first, second = sums
    finite = tame(problem, tensors, lse, more=(*tangents, *cotangents, tlse))
    exact = problem.masked and not finite
    b, c = row_stats.second_deltas(out, tout, lse, cotangents)
    shift = row_stats.score_lse(lse, problem.natural)
    rest = torch.zeros_like(lse) if problem.natural else None
    for strip in strips(problem, tensors):
        rows = _rows(problem, tensors, tangents, strip, cotangents, (shift, tlse, b, c))
        total = sum_of_weights(problem, tensors, strip, exact, (rows.q, rows.lse), rest)
        if total is not None:  # all gradients are linear in these
            e = None if rows.e is None else rows.e / total
            rows = rows._replace(e=e, g=rows.g / total, b=rows.b / total, c=rows.c / total)
        dQ, dtQ = torch.zeros_like(rows.q), torch.zeros_like(rows.q)
        for cols, full in strip.tiles:
            tile = weights(problem, tensors, strip, cols, full, exact, (rows.q, rows.lse))
            _add_tile(problem, tensors, tangents, strip, cols, rows, tile, (dQ, dtQ), sums)
        size = strip.size(problem.group)
        for d, part in ((dQ, first.q), (dtQ, second.q)):
            if part is not None:
                d = d.mul_(problem.scale).view(*size, -1).permute(0, 3, 1, 2, 4)
                strip.rows_of(part, problem.group).copy_(d)
    if first.sink is not None or second.sink is not None:
        assert tensors.sink is not None
        found = row_stats.second_dsink(tensors.sink, tangents.sink, lse, tlse, (b, c), rest)
        for part, x in zip((first.sink, second.sink), found, strict=True):
            if part is not None:
                part += x


def _rows(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    strip: Strip,
    cotangents: Cotangents,
    numbers: tuple[Tensor, ...],
) -> _Rows:
    """Return the rows of a strip; ``numbers`` is (lse, tlse, b, c), each like lse."""
    dtype, group = problem.accumulator, problem.group
    lse, tlse, b, c = (
        folded(problem, strip, strip.row_numbers(t, group).unsqueeze(-1)) for t in numbers
    )
    q, tq, e, g = (
        None if t is None else strip.queries(t.detach(), group, dtype)
        for t in (tensors.q, tangents.q, cotangents.out, cotangents.tout)
    )
    assert q is not None
    assert g is not None
    empty = lse == torch.inf
    return _Rows(
        q=q * factor(problem),
        tq=None if tq is None else tq * factor(problem),
        lse=lse,
        tlse=tlse.masked_fill(empty, 0.0),
        e=None if e is None else e.masked_fill(empty, 0.0),
        g=g.masked_fill(empty, 0.0),
        b=b,
        c=c,
    )


def _add_tile(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    strip: Strip,
    cols: slice,
    rows: _Rows,
    tile: Tile,
    rows_sums: tuple[Tensor, Tensor],
    sums: tuple[Gradients, ...],
) -> None:
    """Add one tile's part to dQ and dQ' (``rows_sums``) and to the other gradients."""
    k, P, y, apart = tile
    first, second = sums
    apart_t = None if apart is None else apart.transpose(1, 2)
    tk = strip.keys(tangents.k, cols, k.dtype)
    R = kept(problem, tensors, strip, cols) if problem.dropout_threshold else None
    terms = natural_terms(problem, tensors, strip, cols, P)
    tx = product_tangent(rows.q, rows.tq, k, tk)
    D = tangents_of_scores(problem, tangents, strip, cols, (tx, y), terms).sub_(rows.tlse)
    if apart is not None:
        tx, D, y = (t.masked_fill(apart, 0.0) for t in (tx, D, y))
    ds, dts = _of_scores(problem, tensors, tangents, strip, cols, rows, tile, D, R)
    _add_terms(problem, strip, cols, sums, (ds, dts), terms)
    dx, dtx = _of_products(problem, strip, (ds, dts), (tx, y), terms)
    dQ, dtQ = rows_sums
    if first.q is not None:
        dQ += product(dx, k, apart)
        if tk is not None:
            dQ += product(dtx, tk, apart)
    if second.q is not None:
        dtQ += product(dtx, k, apart)
    # rows include factor; the gradients of keys need only the scale in it
    scale = scale_of_factor(problem)
    if first.k is not None:
        dK = product(dx.transpose(1, 2), rows.q, apart_t)
        if rows.tq is not None:
            dK += product(dtx.transpose(1, 2), rows.tq, apart_t)
        add_keys(strip, first.k, cols, dK * scale)
    if second.k is not None:
        dK = product(dtx.transpose(1, 2), rows.q, apart_t)
        add_keys(strip, second.k, cols, dK * scale)
    if first.v is None and second.v is None:
        return
    PR = P if R is None else P.mul_(R)
    if second.v is not None:
        add_keys(strip, second.v, cols, product(PR.transpose(1, 2), rows.g, apart_t))
    if first.v is not None:
        dV = product(D.mul_(PR).transpose(1, 2), rows.g, apart_t)
        if rows.e is not None:
            dV += product(PR.transpose(1, 2), rows.e, apart_t)
        add_keys(strip, first.v, cols, dV)


def _of_scores(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    strip: Strip,
    cols: slice,
    rows: _Rows,
    tile: Tile,
    D: Tensor,
    R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (dS, dS') of a tile."""
    v, tv = strip.keys(tensors.v, cols, D.dtype), strip.keys(tangents.v, cols, D.dtype)
    vt = v.transpose(1, 2)
    beta = torch.bmm(rows.g, vt)
    gamma = torch.zeros_like(beta) if rows.e is None else torch.bmm(rows.e, vt)
    if tv is not None:
        gamma = gamma.baddbmm_(rows.g, tv.transpose(1, 2))
    if R is not None:
        beta, gamma = beta.mul_(R), gamma.mul_(R)
    if tile.apart is not None:
        beta, gamma = (t.masked_fill(tile.apart, 0.0) for t in (beta, gamma))
    return score_gradients(tile.P, beta, gamma, D, rows.b, rows.c)


def _add_terms(
    problem: Problem,
    strip: Strip,
    cols: slice,
    sums: tuple[Gradients, ...],
    gradients: tuple[Tensor, Tensor],
    terms: ScoreTerms,
) -> None:
    """Add a tile's part to the gradients of the bias and of heads' parameters."""
    for part, d in zip(sums, gradients, strict=True):
        d = unfolded(problem, strip, d)
        if part.bias is not None:
            tile = bias_tile(part.bias, problem, strip, cols)
            tile += d.flatten(1, 2).sum_to_size(tile.shape)
        if part.heads is not None:
            for n, name in enumerate(parameters_of(problem.heads)):
                # added terms, and no others (``supports``): x and y are not read
                each = head_gradient(d, None, None, terms, name)
                part.heads[n, strip.q_heads(problem.group)] += each.sum((0, 3, 4)).flatten()


def _of_products(
    problem: Problem,
    strip: Strip,
    gradients: tuple[Tensor, Tensor],
    products: tuple[Tensor, Tensor],
    terms: ScoreTerms,
) -> tuple[Tensor, Tensor]:
    """Return (dX, dX') of a tile, without scale, from (dS, dS') and (x', y)."""
    ds, dts, tx, y = (unfolded(problem, strip, t) for t in (*gradients, *products))
    dx = product_curvature(ds, dts, tx, y, terms)
    dtx = product_gradient(dts, y, terms)  # overwrites y
    return dx.view(gradients[0].shape), dtx.view(gradients[0].shape)
