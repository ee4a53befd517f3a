"""The forward: a running max and sum for each strip of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors, each_sequence
from ..rules.over_tensors import moved, with_sink
from ..rules.softmax import headroom
from .scores import (
    factor,
    folded,
    hidden,
    hide,
    kept,
    log_unit,
    power_,
    product,
    scores,
    sink_of,
    tame,
    unfolded,
)
from .strips import Strip, strips


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    out = tensors.q.new_zeros(problem.out_shape)
    lse = out.new_full(problem.lse_shape, -torch.inf, dtype=problem.accumulator)
    with torch.autocast(tensors.q.device.type, enabled=False):
        if problem.varlen:
            for rows, _, one, parts in each_sequence(problem, tensors):
                _fill(one, parts, out[:, rows], lse[:, :, rows])
        else:
            _fill(problem, tensors, out, lse)
    return out, lse


def _fill(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write out and lse (views of them) of one dense call."""
    exact = problem.masked and not tame(problem, tensors)
    for strip in strips(problem, tensors):
        O, e = _strip(problem, tensors, strip, exact)
        if overflowed(problem, O):
            c = headroom(problem.nk, problem.dropout_p)
            small, _ = _strip(problem, tensors, strip, exact, c)
            O = torch.where(O.isfinite(), O, small / c)
        b, h, g, rows = strip.size(problem.group)
        strip.rows_of(out, g).copy_(O.view(b, h, g, rows, -1).permute(0, 3, 1, 2, 4))
        strip.row_numbers(lse, g).copy_(e.view(b, h, g, rows))


def overflowed(problem: Problem, O: Tensor) -> bool:
    """Return True if sums of a strip may have overflowed. Other devices than a CPU do not look.

    An infinity stays: every later factor and term leaves it infinite or makes it NaN.
    """
    return problem.device == "cpu" and not bool(O.isfinite().all())


def _strip(
    problem: Problem, tensors: Tensors, strip: Strip, exact: bool, c: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (out ``[heads, group * rows, Dv]``, lse ``[heads, group * rows, 1]``) of a strip.

    out is that of the values times ``c``.
    """
    dtype = problem.accumulator
    q = strip.queries(tensors.q, problem.group, dtype) * factor(problem)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l = torch.zeros_like(m)
    O = q.new_zeros(*q.shape[:2], problem.dv)
    for cols, full in strip.tiles:
        k = strip.keys(tensors.k, cols, dtype)
        S, _ = scores(problem, tensors, strip, cols, q, k)
        unseen = None if full else hidden(problem, tensors, strip, cols)
        if unseen is not None and not exact:
            hide(problem, strip, S, unseen)
        elif unseen is not None:
            unfolded(problem, strip, S).masked_fill_(unseen, -torch.inf)
        m_new, base = moved(m, S.amax(-1, keepdim=True))
        P = power_(problem, S.sub_(base))
        alpha = power_(problem, m - base)
        l = alpha * l + P.sum(-1, keepdim=True)
        if problem.dropout_threshold:
            P.mul_(kept(problem, tensors, strip, cols))
        apart = folded(problem, strip, unseen) if unseen is not None and exact else None
        v = strip.keys(tensors.v, cols, dtype)
        v = v if c == 1.0 else v * c
        O = O.mul_(alpha).add_(product(P, v, apart))
        m = m_new
    m = m / log_unit(problem)
    if tensors.sink is not None:
        m, l, alpha = with_sink(m, l, sink_of(problem, tensors.sink, strip, m))
        O.mul_(alpha)
    empty = m == -torch.inf
    l = l.masked_fill(empty, 1.0)
    e = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    return O.div_(l), e
