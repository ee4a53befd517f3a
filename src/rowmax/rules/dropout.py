"""The probabilities that dropout keeps: a counter-based generator on (seed, b, h, i, j).

Philox4x32 with seven rounds, the fewest that Salmon et al. ("Parallel random numbers: as easy as 1,
2, 3", SC 2011) found to pass every test of BigCrush. One call makes eight 16-bit draws, for the
eight columns ``64 a + 8 lane + r``, lane = 0..7, of a block of 64 keys. One thread of a tensor
core's accumulator holds these columns; on a CPU one vector computes them.

    counter = (8 (j // 64) + j % 8, i, h, b),  key = (low, high word of the seed)
    lane    = (j // 8) % 8: the low halves of the four words, then the high halves

A pair is kept when its draw is at least ``round(65536 p)``, so the result depends on no tile,
device or backend. In a packed call b counts sequences, and i and j are positions within one.
In a block of a longer call all four are numbers within that call (``Positions``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.inputs import Positions
from ..call.problem import Problem, Tensors
from . import bound

unrolled = range

ROUNDS = 7
M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
INCREMENT_0, INCREMENT_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def multiply(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the high and the low word of a 32 x 32 bit product, of Python's integers."""
    return (a * b) >> 32, (a * b) & WORD


def philox_round(c0, c1, c2, c3, k0, k1):
    """Return the four words after one round; the next has the keys ``k + INCREMENT``."""
    high0, low0 = multiply(c0, M0)
    high1, low1 = multiply(c2, M1)
    return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0


def philox_rounds(counter, key):
    """Return the four words of a counter of four words, with the key's low and high word.

    Compilers bind ``unrolled`` to a ``range`` without a branch, and the numbers to their own words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in unrolled(ROUNDS):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0, k1 = (k0 + INCREMENT_0) & WORD, (k1 + INCREMENT_1) & WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the words as ``multiply`` does, in 16-bit parts whose products fit in int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


#: the rounds over int64 tensors (torch has no arithmetic of uint32)
philox = bound(philox_rounds, philox_round=bound(philox_round, multiply=_multiply))


def keep_tile(seed: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, threshold: int) -> Tensor:
    """Return True where (b, h, i, j), integers that broadcast together, is kept."""
    seed = seed.to(torch.int64)
    key = (seed & WORD, (seed >> 32) & WORD)
    column = 8 * (j // 64) + j % 8
    counter = tuple(torch.broadcast_tensors(column, i, h, b))
    words = torch.stack(philox(counter, key), -1)
    lane = ((j // 8) % 8).expand(words.shape[:-1])
    word = words.gather(-1, (lane % 4).unsqueeze(-1)).squeeze(-1)
    return ((word >> (16 * (lane // 4))) & 0xFFFF) >= threshold


def keep_columns(
    seed: Tensor, b: Tensor, h: Tensor, i: Tensor, columns: range, threshold: int
) -> Tensor:
    """Return ``keep_tile`` of consecutive columns, ``[..., columns]``, eight draws per call.

    b, h and i broadcast together and end in a dimension of 1 for the columns.
    """
    seed = seed.to(torch.int64)
    first, last = columns.start // 64, -(-columns.stop // 64)  # whole blocks of 64
    column = torch.arange(8 * first, 8 * last, device=seed.device)
    counter = tuple(torch.broadcast_tensors(column, i, h, b))
    words = torch.stack(philox(counter, (seed & WORD, (seed >> 32) & WORD)), -1)
    lanes = torch.cat([words & 0xFFFF, words >> 16], -1)  # [..., 8 a + r, lane]
    draws = lanes.unflatten(-2, (-1, 8)).transpose(-1, -2).flatten(-3)
    start = columns.start - 64 * first
    return draws[..., start : start + len(columns)] >= threshold


def dense(problem: Problem, tensors: Tensors) -> Tensor:
    """Return R of the definition, ``[B, Hq, Nq, Nk]``: keep_scale where kept, 0 where dropped."""
    assert tensors.seed is not None
    sizes = problem.batch, problem.hq, problem.nq, problem.nk
    ranges = counted(problem, *map(range, sizes))
    b, h, i, j = (_along(n, x, tensors.seed) for n, x in enumerate(ranges))
    keep = keep_tile(tensors.seed, b, h, i, j, problem.dropout_threshold)
    return keep.to(problem.accumulator) * problem.keep_scale


def tile(problem: Problem, tensors: Tensors, b: range, h: range, i: range, j: range) -> Tensor:
    """Return the part of ``dense`` in these ranges."""
    assert tensors.seed is not None
    *ranges, columns = counted(problem, b, h, i, j)
    b_at, h_at, i_at = (_along(n, x, tensors.seed) for n, x in enumerate(ranges))
    keep = keep_columns(tensors.seed, b_at, h_at, i_at, columns, problem.dropout_threshold)
    return keep.to(problem.accumulator).mul_(problem.keep_scale)


def counted(problem: Problem, *ranges: range) -> list[range]:
    """Return the numbers that the counter has for sequences, heads, queries and keys of a call."""
    _, query, key, head, sequence = problem.positions or Positions()
    firsts = (sequence, head, query, key)
    return [range(x.start + n, x.stop + n) for x, n in zip(ranges, firsts, strict=True)]


def _along(axis: int, numbers: range, like: Tensor) -> Tensor:
    """Return the numbers as a tensor of four dimensions, along one of them."""
    t = torch.arange(numbers.start, numbers.stop, device=like.device)
    return t.view([-1 if n == axis else 1 for n in range(4)])
