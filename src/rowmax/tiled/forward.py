"""The forward: a running max and sum for each strip of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors
from ..rules.over_tensors import moved, with_sink
from ..rules.softmax import headroom
from .scores import (
    factor,
    kept,
    log_unit,
    power_,
    product,
    seen_scores,
    sink_of,
    tame,
)
from .strips import Strip, dense_parts, strips


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    out = tensors.q.new_zeros(problem.out_shape)
    lse = out.new_full(problem.lse_shape, -torch.inf, dtype=problem.accumulator)
    with torch.autocast(tensors.q.device.type, enabled=False):
        for part in dense_parts(problem, tensors):
            _fill(part.problem, part.tensors, *part.rows(out, lse))
    return out, lse


def _fill(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write out and lse (views of them) of one dense call."""
    for strip in strips(problem, tensors, problem.masked and not tame(problem, tensors)):
        O, e = _strip(strip)
        if overflowed(problem, O):
            c = headroom(problem.nk, problem.dropout_p)
            small, _ = _strip(strip, c)
            O = torch.where(O.isfinite(), O, small / c)
        strip.store(out, O)
        strip.store(lse, e)


def overflowed(problem: Problem, O: Tensor) -> bool:
    """Return True if sums of a strip may have overflowed. Other devices than a CPU do not look.

    An infinity stays: every later factor and term leaves it infinite or makes it NaN.
    """
    return problem.device == "cpu" and not bool(O.isfinite().all())


def _strip(strip: Strip, c: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (out ``[heads, group * rows, Dv]``, lse ``[heads, group * rows, 1]``) of a strip.

    out is that of the values times ``c``.
    """
    problem, tensors = strip.problem, strip.tensors
    q = strip.queries(tensors.q) * factor(problem)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l = torch.zeros_like(m)
    O = q.new_zeros(*q.shape[:2], problem.dv)
    for cols, full in strip.tiles:
        S, _, apart = seen_scores(strip, cols, full, q, strip.keys(tensors.k, cols))
        m_new, base = moved(m, S.amax(-1, keepdim=True))
        P = power_(problem, S.sub_(base))
        alpha = power_(problem, m - base)
        l = alpha * l + P.sum(-1, keepdim=True)
        R = kept(strip, cols)
        if R is not None:
            P.mul_(R)
        v = strip.keys(tensors.v, cols)
        v = v if c == 1.0 else v * c
        O = O.mul_(alpha).add_(product(P, v, apart))
        m = m_new
    m = m / log_unit(problem)
    if tensors.sink is not None:
        m, l, alpha = with_sink(m, l, sink_of(strip, tensors.sink, m))
        O.mul_(alpha)
    empty = m == -torch.inf
    l = l.masked_fill(empty, 1.0)
    e = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    return O.div_(l), e
