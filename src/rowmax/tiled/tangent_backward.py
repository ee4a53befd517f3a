"""The backward of the tangent: each tile's weights, recomputed, and the second order's formulas.

Names are those of ``rules/tangent.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Cotangents, Gradients, Results, Tangents, Tensors, WantedSecond
from ..call.problem import Problem
from ..rules import row_stats
from ..rules.over_tensors import product_curvature, product_gradient, score_gradients
from ..rules.score import ScoreTerms
from .backward import Tile, add_bias, add_heads, add_keys, rounded, sum_of_weights, weights, zeros
from .scores import (
    factor,
    kept,
    natural_terms,
    product,
    product_tangent,
    scale_of_factor,
    tame,
    tangents_of_scores,
)
from .strips import Strip, dense_parts, strips

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
    results: Results,
    cotangents: Cotangents,
    wanted: WantedSecond,
) -> Both:
    """Return the wanted gradients of the inputs, and those of their tangents."""
    first, second = (zeros(problem, tensors, part) for part in wanted)
    if cotangents.tout is None:
        cotangents = cotangents._replace(tout=torch.zeros_like(results.out))
    with torch.autocast(results.out.device.type, enabled=False):
        for part in dense_parts(problem, tensors):
            rows = Results(*part.rows(*results)), Cotangents(*part.rows(*cotangents))
            sums = part.each(first), part.each(second)
            _add(part.problem, part.tensors, part.each(tangents), *rows, sums)
    return rounded(problem, tensors, first), rounded(problem, tensors, second)


def _add(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: Results,
    cotangents: Cotangents,
    sums: Both,
) -> None:
    """Add the gradients of one dense call."""
    _, lse, _, tlse = results
    first, second = sums
    finite = tame(problem, tensors, *tangents, *cotangents, tlse, lse=lse)
    b, c = row_stats.second_deltas(results, cotangents)
    shift = row_stats.score_lse(lse, problem.natural)
    rest = torch.zeros_like(lse) if problem.natural else None
    for strip in strips(problem, tensors, problem.masked and not finite):
        rows = _rows(strip, tangents, cotangents, (shift, tlse, b, c))
        total = sum_of_weights(strip, rows.q, rows.lse, rest)
        if total is not None:  # all gradients are linear in these
            e = None if rows.e is None else rows.e / total
            rows = rows._replace(e=e, g=rows.g / total, b=rows.b / total, c=rows.c / total)
        dQ, dtQ = torch.zeros_like(rows.q), torch.zeros_like(rows.q)
        for cols, full in strip.tiles:
            tile = weights(strip, cols, full, rows.q, rows.lse)
            _add_tile(strip, tangents, cols, rows, tile, (dQ, dtQ), sums)
        for d, part in ((dQ, first.q), (dtQ, second.q)):
            if part is not None:
                strip.store(part, d.mul_(problem.scale))
    if first.sink is not None or second.sink is not None:
        assert tensors.sink is not None
        found = row_stats.second_dsink(tensors.sink, tangents.sink, (lse, tlse), (b, c), rest)
        for part, x in zip((first.sink, second.sink), found, strict=True):
            if part is not None:
                part += x


def _rows(
    strip: Strip, tangents: Tangents, cotangents: Cotangents, numbers: tuple[Tensor, ...]
) -> _Rows:
    """Return the rows of a strip; ``numbers`` is (lse, tlse, b, c), each like lse."""
    unit = factor(strip.problem)
    lse, tlse, b, c = map(strip.numbers, numbers)
    tq, e = strip.queries(tangents.q), strip.queries(cotangents.out)
    assert cotangents.tout is not None
    empty = lse == torch.inf
    return _Rows(
        q=strip.queries(strip.tensors.q) * unit,
        tq=None if tq is None else tq * unit,
        lse=lse,
        tlse=tlse.masked_fill(empty, 0.0),
        e=None if e is None else e.masked_fill(empty, 0.0),
        g=strip.queries(cotangents.tout).masked_fill(empty, 0.0),
        b=b,
        c=c,
    )


def _add_tile(
    strip: Strip,
    tangents: Tangents,
    cols: slice,
    rows: _Rows,
    tile: Tile,
    rows_sums: tuple[Tensor, Tensor],
    sums: Both,
) -> None:
    """Add one tile's part to dQ and dQ' (``rows_sums``) and to the other gradients."""
    k, P, y, apart = tile
    first, second = sums
    apart_t = None if apart is None else apart.transpose(1, 2)
    tk, R = strip.keys(tangents.k, cols), kept(strip, cols)
    terms = natural_terms(strip, cols, P)
    tx = product_tangent(rows.q, rows.tq, k, tk)
    D = tangents_of_scores(strip, tangents, cols, (tx, y), terms).sub_(rows.tlse)
    if apart is not None:
        tx, D, y = (t.masked_fill(apart, 0.0) for t in (tx, D, y))
    ds, dts = _of_scores(strip, tangents, cols, rows, tile, D, R)
    for part, d in zip(sums, (ds, dts), strict=True):
        add_bias(strip, cols, part, d)
        add_heads(strip, part, d, terms, None)  # added terms, and no others (``supports``)
    dx, dtx = _of_products(strip, (ds, dts), (tx, y), terms)
    dQ, dtQ = rows_sums
    if first.q is not None:
        dQ += product(dx, k, apart)
        if tk is not None:
            dQ += product(dtx, tk, apart)
    if second.q is not None:
        dtQ += product(dtx, k, apart)
    # rows include factor; the gradients of keys need only the scale in it
    scale = scale_of_factor(strip.problem)
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
    strip: Strip,
    tangents: Tangents,
    cols: slice,
    rows: _Rows,
    tile: Tile,
    D: Tensor,
    R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (dS, dS') of a tile."""
    v, tv = strip.keys(strip.tensors.v, cols), strip.keys(tangents.v, cols)
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


def _of_products(
    strip: Strip,
    gradients: tuple[Tensor, Tensor],
    products: tuple[Tensor, Tensor],
    terms: ScoreTerms,
) -> tuple[Tensor, Tensor]:
    """Return (dX, dX') of a tile, without scale, from (dS, dS') and (x', y)."""
    ds, dts, tx, y = map(strip.unfolded, (*gradients, *products))
    dx = product_curvature(ds, dts, tx, y, terms)
    dtx = product_gradient(dts, y, terms)  # overwrites y
    return dx.view(gradients[0].shape), dtx.view(gradients[0].shape)
