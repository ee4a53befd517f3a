"""The floating-point operations of a call: one count, for every report of a speed.

The count is that of the matrix products over the pairs (query, key) that the band (causal, window)
allows. A multiplication and an addition count as two operations, as in papers and profilers.
Documents, lengths and boolean tensors depend on values, not on the problem: pairs that they mask
count. So do the pairs above the diagonal of a call with a bidirectional prefix. Positions aligned
to the lengths count as if every key were in use: an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from .problem import Problem

Lengths = Sequence[tuple[int, int]]


def forward_flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """Return the operations of ``q k^T`` and ``P v``.

    ``lengths`` holds (queries, keys) of each sequence of a packed call. Without them every sequence
    counts with the longest lengths: exact when all are equal, else a bound.
    """
    return 2 * _pairs(problem, lengths) * (problem.d + problem.dv)


def backward_flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """Return the operations of ``q k^T``, ``dO v^T``, and the products of dV, dQ and dK."""
    return 2 * _pairs(problem, lengths) * (3 * problem.d + 2 * problem.dv)


def tangent_flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """Return the operations of a forward, of ``q' k^T``, ``q k'^T``, ``(P s') v`` and ``P v'``."""
    return 2 * _pairs(problem, lengths) * (3 * problem.d + 3 * problem.dv)


def tangent_backward_flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """Return the operations of three products of scores, three of ``dO v^T``, and the gradients'.

    dV takes two products and dV' one, dQ and dK two each, dQ' and dK' one.
    """
    return 2 * _pairs(problem, lengths) * (9 * problem.d + 6 * problem.dv)


def _pairs(problem: Problem, lengths: Lengths | None) -> int:
    """Return the number of allowed pairs of all heads and sequences."""
    if lengths is not None:
        each = (problem._replace(batch=1, nq=nq, nk=nk) for nq, nk in lengths)
        return sum(_pairs(one, None) for one in each)
    n, nk = problem.nq, problem.nk
    right = None if problem.bidirectional else problem.right
    upto_right = n * nk if right is None else _below(problem, right + 1)
    before_left = 0 if problem.left is None else _below(problem, -problem.left)
    return problem.batch * problem.hq * max(0, upto_right - before_left)


def _below(problem: Problem, shift: int) -> int:
    """Return the number of pairs with ``j < i + offset + shift``, where j is in [0, nk)."""
    first = problem.offset + shift
    return _ramp(first + problem.nq - 1, problem.nk) - _ramp(first - 1, problem.nk)


def _ramp(x: int, top: int) -> int:
    """Return the sum of ``clamp(t, 0, top)`` over all t up to x."""
    if x <= 0:
        return 0
    under = min(x, top)
    return under * (under + 1) // 2 + (x - under) * top
