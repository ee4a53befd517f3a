"""The order of the tiles of packed sequences, made on the device: nothing is read back.

Sequence after sequence, the longest first, so that its keys and values stay in the L2 cache;
within one, sections of heads, and within a section the longest tile first. Blocks draw their
tiles from a counter, since only the device knows how long they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.compiled import Launch

#: the counter, the number of tiles of one head, and (from here) where each sequence's begin
HEADER = 2
_CHUNK = 128


#: programs that clear what lies past the last sequence, if that is wanted
_CLEARING = 128


class Pointers(NamedTuple):
    order: Any
    cu: Any
    out: Any = None  # [total, heads, Dv]
    lse: Any = None  # [heads, total]
    sink: Any = None


class Numbers(NamedTuple):
    batch: int
    total: int = 0
    heads: int = 0
    width: int = 0  # of a row of out, all heads


@triton.jit
def clear_rest(x, cu, batch, total, width):
    """Zeros in the rows past the last packed sequence, shared out among all programs."""
    end = total.to(tl.int64) * width
    first = tl.load(cu + batch).to(tl.int64) * width + tl.program_id(0) * 1024
    at = tl.arange(0, 1024)
    while first < end:
        tl.store(x + first + at, tl.zeros([1024], x.dtype.element_ty), mask=first + at < end)
        first += tl.num_programs(0) * 1024


@triton.jit
def clear_rest_of_lse(t, n, CHUNK: tl.constexpr):
    """The same of lse: rows that see nothing."""
    rest = tl.load(t.cu + n.batch)
    for head in range(tl.program_id(0), n.heads, tl.num_programs(0)):
        value = tl.full([CHUNK], float("-inf"), tl.float32)
        if t.sink is not None:
            value = tl.load(t.sink + head).to(tl.float32) + tl.zeros([CHUNK], tl.float32)
        for first in range(rest, n.total, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(t.lse + tl.full([CHUNK], head, tl.int64) * n.total + i, value, i < n.total)


@triton.jit
def _place(t, n, TOKENS: tl.constexpr, HEADER: tl.constexpr, CHUNK: tl.constexpr):
    """Program b writes the number b in the rows of its sequence; all clear what comes after the
    last one."""
    b = tl.program_id(0)
    if b < n.batch:
        _place_one(t, n, b, TOKENS, HEADER, CHUNK)
    if t.out is not None:
        clear_rest(t.out, t.cu, n.batch, n.total, n.width)
        clear_rest_of_lse(t, n, CHUNK)


@triton.jit
def _place_one(t, n, b, TOKENS: tl.constexpr, HEADER: tl.constexpr, CHUNK: tl.constexpr):
    order, cu_q = t.order, t.cu
    length = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
    before = tl.zeros([CHUNK], tl.int32)
    every = tl.zeros([CHUNK], tl.int32)
    for first in range(0, n.batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < n.batch
        size = tl.load(cu_q + other + 1, there, 0) - tl.load(cu_q + other, there, 0)
        tiles = (size + TOKENS - 1) // TOKENS
        every += tiles
        before += tl.where((size > length) | ((size == length) & (other < b)), tiles, 0)
    begin = tl.sum(before, 0)
    tl.store(order + HEADER + b, begin)
    if b == 0:
        tl.store(order, 0)
        tl.store(order + 1, tl.sum(every, 0))
    rows = order + HEADER + n.batch + begin
    tiles = (length + TOKENS - 1) // TOKENS
    for first in range(0, tiles, CHUNK):
        m = first + tl.arange(0, CHUNK)
        tl.store(rows + m, b + 0 * m, m < tiles)


def most_tiles(total: int, longest: int, batch: int, tokens: int) -> int:
    """No fewer than there can be: every sequence ends in a tile that may be bare."""
    return min(total // tokens + batch, batch * -(-longest // tokens))


@lru_cache(maxsize=256)
def _placing(numbers: Numbers, tokens: int, device: torch.device) -> tuple[Launch, tuple[Any, ...]]:
    # of the device as well: a launch keeps what it has loaded
    programs = max(numbers.batch, _CLEARING if numbers.total else 1)
    launch = Launch(_place, (programs, 1, 1), {"num_warps": 4, "enable_fp_fusion": True})
    return launch, (numbers, *map(tl.constexpr, (tokens, HEADER, _CHUNK)))


def order(
    cu: Tensor,
    batch: int,
    most: int,
    tokens: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Sequences that begin at ``cu``, in ``most`` tiles at most of ``tokens`` positions.

    What lies past the last one is cleared in ``out`` and ``lse``, where these are given.
    """
    made = torch.empty(HEADER + batch + most, dtype=torch.int32, device=cu.device)
    numbers = Numbers(batch)
    if out is not None:
        total, heads, dv = out.shape[1:]
        numbers = Numbers(batch, total, heads, heads * dv)
    launch, numbers = _placing(numbers, tokens, cu.device)
    launch((), Pointers(made, cu, out, lse, sink), numbers)
    return made
