"""The order of the tiles of packed sequences, made on the device: the host reads nothing back.

Sequence after sequence, the longest first, so that its keys and values stay in the L2 cache;
within one, sections of heads, and within a section the longest tile first. Blocks take their
tiles from a counter, since only the device knows how long they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiled import Launch

#: the counter, the number of tiles of one head, and (from here) where each sequence's begin
HEADER = 2
_CHUNK = 64
#: programs that clear the rows past the last sequence
_CLEARING = 128


class Pointers(NamedTuple):
    order: Any
    cu: Any
    other: Any  # the offsets of keys where ``cu`` are those of queries, and the other way round
    out: Any = None  # [total, heads, Dv]
    lse: Any = None  # [heads, total]
    sink: Any = None


class Numbers(NamedTuple):
    batch: int
    most: int  # tiles that there is room for
    total: int  # rows that ``cu`` are offsets of
    total_other: int
    heads: int = 0
    width: int = 0  # of a row of out, all heads


@triton.jit
def _risen(cu, at, batch, total, floor):
    """Return offsets in order: 0 first, in range, and no less than any before. ``floor`` is the
    greatest before these."""
    x = tl.load(cu + at, (at > 0) & (at <= batch), 0)
    x = tl.minimum(tl.maximum(x, 0), total)
    earlier = tl.where(at[None, :] <= at[:, None], x[None, :], 0)
    return tl.maximum(tl.max(earlier, 1), floor)


@triton.jit
def clear_rest(x, first, total, width):
    """Store zeros in the rows from ``first`` on. All programs share them."""
    end = total.to(tl.int64) * width
    begin = first.to(tl.int64) * width + tl.program_id(0) * 1024
    at = tl.arange(0, 1024)
    while begin < end:
        tl.store(x + begin + at, tl.zeros([1024], x.dtype.element_ty), mask=begin + at < end)
        begin += tl.num_programs(0) * 1024


@triton.jit
def _clear_rest_of_lse(t, n, rest, CHUNK: tl.constexpr):
    """Store the lse of rows that see nothing in the same rows."""
    for head in range(tl.program_id(0), n.heads, tl.num_programs(0)):
        value = tl.full([CHUNK], float("-inf"), tl.float32)
        if t.sink is not None:
            value = tl.load(t.sink + head).to(tl.float32) + tl.zeros([CHUNK], tl.float32)
        for first in range(rest, n.total, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(t.lse + tl.full([CHUNK], head, tl.int64) * n.total + i, value, i < n.total)


@triton.jit
def _place(t, n, HEADER: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Program b writes the number b in the rows of its sequence, and the offset of the sequence in
    order (program ``batch`` the end of the last one). All clear the rows after the last."""
    b = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    floor, floor_other = b * 0, b * 0
    begins, ends, begins_other = b * 0, b * 0, b * 0
    for first in range(0, n.batch + 1, CHUNK):
        x = _risen(t.cu, first + at, n.batch, n.total, floor)
        y = _risen(t.other, first + at, n.batch, n.total_other, floor_other)
        floor, floor_other = tl.max(x, 0), tl.max(y, 0)
        begins += tl.sum(tl.where(first + at == b, x, 0), 0)
        ends += tl.sum(tl.where(first + at == b + 1, x, 0), 0)
        begins_other += tl.sum(tl.where(first + at == b, y, 0), 0)
    offsets = t.order + HEADER + n.batch + n.most
    if b <= n.batch:
        tl.store(offsets + b, begins)
        tl.store(offsets + n.batch + 1 + b, begins_other)
    if b < n.batch:
        _place_one(t, n, b, ends - begins, HEADER, TOKENS, CHUNK)
    if t.out is not None:
        clear_rest(t.out, floor, n.total, n.width)
        _clear_rest_of_lse(t, n, floor, CHUNK)


@triton.jit
def _place_one(
    t, n, b, length, HEADER: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write the number b in the rows of a sequence of this length, and where these begin."""
    at = tl.arange(0, CHUNK)
    floor = b * 0
    before = tl.zeros([CHUNK], tl.int32)
    every = tl.zeros([CHUNK], tl.int32)
    for first in range(0, n.batch, CHUNK):
        other = first + at
        x = _risen(t.cu, other, n.batch, n.total, floor)
        size = _risen(t.cu, other + 1, n.batch, n.total, tl.max(tl.where(at == 0, x, 0), 0)) - x
        floor = tl.max(x, 0)
        tiles = tl.where(other < n.batch, (size + TOKENS - 1) // TOKENS, 0)
        every += tiles
        before += tl.where((size > length) | ((size == length) & (other < b)), tiles, 0)
    begin = tl.sum(before, 0)
    tl.store(t.order + HEADER + b, begin)
    rows = t.order + HEADER + n.batch
    if b == 0:
        count = tl.sum(every, 0)
        tl.store(t.order, 0)
        tl.store(t.order + 1, tl.minimum(count, n.most))
        if count == 0:  # a block looks at a first tile before it knows that there is none
            tl.store(rows, 0)
    tiles = (length + TOKENS - 1) // TOKENS
    for first in range(0, tiles, CHUNK):
        m = first + at
        tl.store(rows + begin + m, b + 0 * m, (m < tiles) & (begin + m < n.most))


def most_tiles(total: int, longest: int, batch: int, tokens: int) -> int:
    """Return a bound of the number of tiles: every sequence ends in a tile that may be bare."""
    return min(total // tokens + batch, batch * -(-longest // tokens))


@lru_cache(maxsize=256)
def _placing(numbers: Numbers, tokens: int, device: torch.device) -> Launch:
    # of the device as well: a launch keeps what it has loaded
    programs = max(numbers.batch + 1, _CLEARING if numbers.heads else 1)
    last = (numbers, *map(tl.constexpr, (HEADER, tokens, _CHUNK)))
    return Launch(_place, (programs, 1, 1), {"num_warps": 4, "enable_fp_fusion": True}, last)


class Order(NamedTuple):
    """The order of packed sequences as kernels read it, made on the device."""

    counter: Tensor
    ends: Tensor  # the number of tiles of one head
    table: Tensor  # where each sequence's tiles begin, then the sequence of each tile
    cu: Tensor  # offsets, brought in range
    other: Tensor


def order(
    cu: Tensor,
    other: Tensor,
    totals: tuple[int, int],
    tokens: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sink: Tensor | None = None,
) -> Order:
    """Return the order of sequences with the offsets ``cu``, in tiles of ``tokens`` positions.

    ``other`` are the offsets of the other side. Whatever both are, the returned ones begin with 0,
    never fall and are within the ``totals``. ``out`` and ``lse``, if given, are cleared past the
    last sequence.
    """
    batch = cu.shape[0] - 1
    most = totals[0] // tokens + batch  # whatever the longest is said to be
    room = HEADER + batch + most
    words = torch.empty(room + 2 * (batch + 1), dtype=torch.int32, device=cu.device)
    rows = (0, 0) if out is None else (out.shape[2], out.shape[2] * out.shape[3])
    launch = _placing(Numbers(batch, most, *totals, *rows), tokens, cu.device)
    launch(Pointers(words, cu, other, out, lse, sink))
    ranged = words[room:]
    return Order(words, words[1:], words[HEADER:], ranged, ranged[batch + 1 :])
