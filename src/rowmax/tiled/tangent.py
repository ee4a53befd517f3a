"""The tangent: the forward's pass with two more running sums for each strip of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.inputs import Tangents, Tensors
from ..call.problem import Problem, each_sequence
from ..rules.over_tensors import moved, out_tangent, sink_in_tangent, tangent_base, with_sink
from .scores import (
    factor,
    folded,
    hidden,
    hide,
    kept,
    log_unit,
    natural_terms,
    power_,
    product,
    product_tangent,
    scores,
    sink_of,
    tame,
    tangents_of_scores,
)
from .strips import Strip, of_sequence, strips

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def tangent(problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
    """Return (out, lse, tout, tlse): the results and their tangents."""
    out = tensors.q.new_zeros(problem.out_shape)
    lse = out.new_full(problem.lse_shape, -torch.inf, dtype=problem.accumulator)
    results = out, lse, torch.zeros_like(out), torch.zeros_like(lse)
    with torch.autocast(tensors.q.device.type, enabled=False):
        if problem.varlen:
            for n, (rows, cols, one, parts) in enumerate(each_sequence(problem, tensors)):
                along = of_sequence(tangents, n, rows, cols, one)
                part = tuple(t[:, rows] if t.dim() == 4 else t[:, :, rows] for t in results)
                _fill(one, parts, along, part)
        else:
            _fill(problem, tensors, tangents, results)
    return results


def _fill(
    problem: Problem, tensors: Tensors, tangents: Tangents, results: tuple[Tensor, ...]
) -> None:
    """Write the results (views of them) of one dense call."""
    exact = problem.masked and not tame(problem, tensors, more=tangents)
    for strip in strips(problem, tensors):
        found = _strip(problem, tensors, tangents, strip, exact)
        b, h, g, rows = strip.size(problem.group)
        for t, x in zip(results, found, strict=True):
            if t.dim() == 4:
                strip.rows_of(t, g).copy_(x.view(b, h, g, rows, -1).permute(0, 3, 1, 2, 4))
            else:
                strip.row_numbers(t, g).copy_(x.view(b, h, g, rows))


def _strip(
    problem: Problem, tensors: Tensors, tangents: Tangents, strip: Strip, exact: bool
) -> Results:
    """Return out and lse of a strip, ``[heads, group * rows, Dv or 1]``, and their tangents."""
    dtype, group = problem.accumulator, problem.group
    q = strip.queries(tensors.q, group, dtype) * factor(problem)
    tq = None
    if tangents.q is not None:
        tq = strip.queries(tangents.q.detach(), group, dtype) * factor(problem)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l, tl, r = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    O = q.new_zeros(*q.shape[:2], problem.dv)
    tO = torch.zeros_like(O)
    for cols, full in strip.tiles:
        k, tk = strip.keys(tensors.k, cols, dtype), strip.keys(tangents.k, cols, dtype)
        S, y = scores(problem, tensors, strip, cols, q, k)
        terms = natural_terms(problem, tensors, strip, cols, S)
        tx = product_tangent(q, tq, k, tk)
        T = tangents_of_scores(problem, tangents, strip, cols, (tx, y), terms)
        unseen = None if full else hidden(problem, tensors, strip, cols)
        apart = folded(problem, strip, unseen) if unseen is not None and exact else None
        if apart is not None:
            T = T.masked_fill(apart, 0.0)
            S.masked_fill_(apart, -torch.inf)
        elif unseen is not None:
            hide(problem, strip, S, unseen)
        m_new, base = moved(m, S.amax(-1, keepdim=True))
        P = power_(problem, S.sub_(base))
        alpha = power_(problem, m - base)
        tile_l = P.sum(-1, keepdim=True)
        l, tl, before = alpha * l, alpha * tl, r
        r = tangent_base(l, tl, tile_l, (P * T).sum(-1, keepdim=True), r)
        T = T.sub_(r).mul_(P)
        tl = tl + (before - r) * l + T.sum(-1, keepdim=True)
        l = l + tile_l
        if problem.dropout_threshold:
            R = kept(problem, tensors, strip, cols)
            P, T = P.mul_(R), T.mul_(R)
        v, tv = strip.keys(tensors.v, cols, dtype), strip.keys(tangents.v, cols, dtype)
        O = O.mul_(alpha)
        tO = tO.mul_(alpha).addcmul_(O, before - r).add_(product(T, v, apart))
        O.add_(product(P, v, apart))
        if tv is not None:
            tO += product(P, tv, apart)
        m = m_new
    m = m / log_unit(problem)
    te = None
    if tensors.sink is not None:
        sink = sink_of(problem, tensors.sink, strip, m)
        keys = l
        m, l, alpha = with_sink(m, l, sink)
        O, tO = O.mul_(alpha), tO.mul_(alpha)
        tsink = torch.zeros_like(sink)
        if tangents.sink is not None:
            tsink = sink_of(problem, tangents.sink, strip, m)
        tl, te = sink_in_tangent(tl * alpha, keys * alpha, m, sink, tsink, r)
    empty = m == -torch.inf
    l = l.masked_fill(empty, 1.0)
    e = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    out, above = O.div_(l), (tl / l).masked_fill(empty, 0.0)  # LSE' - r
    te = above + r if te is None else te
    return out, e, out_tangent(tO.div_(l), above, out), te.masked_fill(empty, 0.0)
