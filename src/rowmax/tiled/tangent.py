"""The tangent: the forward's pass with two more running sums for each strip of rows."""

from __future__ import annotations

import torch

from ..call.inputs import Results, Tangents, Tensors
from ..call.problem import Problem
from ..rules.over_tensors import moved, out_tangent, sink_in_tangent, tangent_base, with_sink
from .scores import (
    factor,
    kept,
    log_unit,
    natural_terms,
    power_,
    product,
    product_tangent,
    seen_scores,
    sink_of,
    tame,
    tangents_of_scores,
)
from .strips import Strip, dense_parts, strips


def tangent(problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
    """Return the results and their tangents."""
    out = tensors.q.new_zeros(problem.out_shape)
    lse = out.new_full(problem.lse_shape, -torch.inf, dtype=problem.accumulator)
    results = Results(out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    with torch.autocast(tensors.q.device.type, enabled=False):
        for part in dense_parts(problem, tensors):
            _fill(part.problem, part.tensors, part.each(tangents), Results(*part.rows(*results)))
    return results


def _fill(problem: Problem, tensors: Tensors, tangents: Tangents, results: Results) -> None:
    """Write the results (views of them) of one dense call."""
    exact = problem.masked and not tame(problem, tensors, *tangents)
    for strip in strips(problem, tensors, exact):
        for t, x in zip(results, _strip(strip, tangents), strict=True):
            strip.store(t, x)


def _strip(strip: Strip, tangents: Tangents) -> Results:
    """Return out and lse of a strip, ``[heads, group * rows, Dv or 1]``, and their tangents."""
    problem, tensors = strip.problem, strip.tensors
    q, tq = strip.queries(tensors.q) * factor(problem), strip.queries(tangents.q)
    tq = None if tq is None else tq * factor(problem)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l, tl, r = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    O = q.new_zeros(*q.shape[:2], problem.dv)
    tO = torch.zeros_like(O)
    for cols, full in strip.tiles:
        k, tk = strip.keys(tensors.k, cols), strip.keys(tangents.k, cols)
        S, y, apart = seen_scores(strip, cols, full, q, k)
        terms = natural_terms(strip, cols, S)
        T = tangents_of_scores(strip, tangents, cols, (product_tangent(q, tq, k, tk), y), terms)
        if apart is not None:
            T = T.masked_fill(apart, 0.0)
        m_new, base = moved(m, S.amax(-1, keepdim=True))
        P = power_(problem, S.sub_(base))
        alpha = power_(problem, m - base)
        tile_l = P.sum(-1, keepdim=True)
        l, tl, before = alpha * l, alpha * tl, r
        r = tangent_base(l, tl, tile_l, (P * T).sum(-1, keepdim=True), r)
        T = T.sub_(r).mul_(P)
        tl = tl + (before - r) * l + T.sum(-1, keepdim=True)
        l = l + tile_l
        R = kept(strip, cols)
        if R is not None:
            P, T = P.mul_(R), T.mul_(R)
        v, tv = strip.keys(tensors.v, cols), strip.keys(tangents.v, cols)
        O = O.mul_(alpha)
        tO = tO.mul_(alpha).addcmul_(O, before - r).add_(product(T, v, apart))
        O.add_(product(P, v, apart))
        if tv is not None:
            tO += product(P, tv, apart)
        m = m_new
    m = m / log_unit(problem)
    te = None
    if tensors.sink is not None:
        sink = sink_of(strip, tensors.sink, m)
        keys = l
        m, l, alpha = with_sink(m, l, sink)
        O, tO = O.mul_(alpha), tO.mul_(alpha)
        tsink = torch.zeros_like(sink)
        if tangents.sink is not None:
            tsink = sink_of(strip, tangents.sink, m)
        tl, te = sink_in_tangent(tl * alpha, keys * alpha, m, sink, tsink, r)
    empty = m == -torch.inf
    l = l.masked_fill(empty, 1.0)
    e = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    out, above = O.div_(l), (tl / l).masked_fill(empty, 0.0)  # LSE' - r
    te = above + r if te is None else te
    return Results(out, e, out_tangent(tO.div_(l), above, out), te.masked_fill(empty, 0.0))
