"""The order of the tiles of packed sequences, made on the device: the host reads no offsets.

One sequence comes after the other, so that its keys and values stay in the L2 cache. The first has
most pairs of a query and a key: a few queries of many keys have long tiles, with which no block
should end. A sequence has sections of heads, and a section begins with its longest tile. Blocks
take their tiles from a counter, since the lengths are only on the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiled import Launch

#: numbers before the starts of sequences: the counter, and the number of tiles of one head
HEADER = 2
_CHUNK = 64
#: number of programs that clear the rows past the last sequence
_CLEARING = 128


class Pointers(NamedTuple):
    """``t``: the tensors of the kernel that builds the order."""

    order: Any
    cu: Any
    other: Any  # the offsets of keys where ``cu`` are those of queries, and the other way round
    out: Any = None  # [total, heads, Dv]
    lse: Any = None  # [heads, total]
    sink: Any = None


class Numbers(NamedTuple):
    """``n``: numbers at run time."""

    batch: int
    most: int  # number of tiles with room in the order
    total: int  # rows of the tensor with the offsets ``cu``
    total_other: int
    heads: int = 0
    width: int = 0  # numbers in a row of out, all heads


@triton.jit
def _risen(cu, at, batch, total, floor):
    """Return offsets in order: 0 first, in range, never decreasing.

    ``floor`` is the greatest offset before these.
    """
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
    """Store -inf, or the sink, as lse of the same rows: they see nothing."""
    for head in range(tl.program_id(0), n.heads, tl.num_programs(0)):
        value = tl.full([CHUNK], float("-inf"), tl.float32)
        if t.sink is not None:
            value = tl.load(t.sink + head).to(tl.float32) + tl.zeros([CHUNK], tl.float32)
        for first in range(rest, n.total, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(t.lse + tl.full([CHUNK], head, tl.int64) * n.total + i, value, i < n.total)


@triton.jit
def _place(t, n, HEADER: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tiles of sequence b, and its offset in order, in program b.

    Each row of its tiles holds b. Program ``batch`` writes the end of the last sequence. All
    programs clear the rows past that end.
    """
    b = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    floor, floor_other = b * 0, b * 0
    begins, ends, begins_other, ends_other = b * 0, b * 0, b * 0, b * 0
    for first in range(0, n.batch + 1, CHUNK):
        x = _risen(t.cu, first + at, n.batch, n.total, floor)
        y = _risen(t.other, first + at, n.batch, n.total_other, floor_other)
        floor, floor_other = tl.max(x, 0), tl.max(y, 0)
        begins += tl.sum(tl.where(first + at == b, x, 0), 0)
        ends += tl.sum(tl.where(first + at == b + 1, x, 0), 0)
        begins_other += tl.sum(tl.where(first + at == b, y, 0), 0)
        ends_other += tl.sum(tl.where(first + at == b + 1, y, 0), 0)
    offsets = t.order + HEADER + n.batch + n.most
    if b <= n.batch:
        tl.store(offsets + b, begins)
        tl.store(offsets + n.batch + 1 + b, begins_other)
    if b < n.batch:
        _place_one(t, n, b, ends - begins, ends_other - begins_other, HEADER, TOKENS, CHUNK)
    if t.out is not None:
        clear_rest(t.out, floor, n.total, n.width)
        _clear_rest_of_lse(t, n, floor, CHUNK)


@triton.jit
def _sizes(cu, first, batch, total, floor, CHUNK: tl.constexpr):
    """Return (the lengths of sequences from ``first`` on, the greatest offset at their begins)."""
    at = tl.arange(0, CHUNK)
    x = _risen(cu, first + at, batch, total, floor)
    begin = tl.max(tl.where(at == 0, x, 0), 0)
    return _risen(cu, first + at + 1, batch, total, begin) - x, tl.max(x, 0)


@triton.jit
def _place_one(
    t, n, b, length, length_other, HEADER: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write b in the rows of a sequence of these lengths, and the first of these rows."""
    at = tl.arange(0, CHUNK)
    floor, floor_other = b * 0, b * 0
    before = tl.zeros([CHUNK], tl.int32)
    every = tl.zeros([CHUNK], tl.int32)
    own_pairs = length.to(tl.int64) * length_other
    for first in range(0, n.batch, CHUNK):
        other = first + at
        size, floor = _sizes(t.cu, first, n.batch, n.total, floor, CHUNK)
        size_other, floor_other = _sizes(t.other, first, n.batch, n.total_other, floor_other, CHUNK)
        tiles = tl.where(other < n.batch, (size + TOKENS - 1) // TOKENS, 0)
        every += tiles
        pairs = size.to(tl.int64) * size_other
        earlier = (size > length) | ((size == length) & (other < b))
        before += tl.where((pairs > own_pairs) | ((pairs == own_pairs) & earlier), tiles, 0)
    begin = tl.sum(before, 0)
    tl.store(t.order + HEADER + b, begin)
    rows = t.order + HEADER + n.batch
    if b == 0:
        count = tl.sum(every, 0)
        tl.store(t.order, 0)
        tl.store(t.order + 1, tl.minimum(count, n.most))
        if count == 0:  # a block reads a first tile before it reads their number
            tl.store(rows, 0)
    tiles = (length + TOKENS - 1) // TOKENS
    for first in range(0, tiles, CHUNK):
        m = first + at
        tl.store(rows + begin + m, b + 0 * m, (m < tiles) & (begin + m < n.most))


def most_tiles(total: int, longest: int, batch: int, tokens: int) -> int:
    """Return a bound of the number of tiles: every sequence may end in a partial tile."""
    return min(total // tokens + batch, batch * -(-longest // tokens))


@lru_cache(maxsize=256)
def _placing(numbers: Numbers, tokens: int, device: torch.device) -> Launch:
    # the key includes the device: a launch keeps its loaded kernel
    programs = max(numbers.batch + 1, _CLEARING if numbers.heads else 1)
    last = (numbers, *map(tl.constexpr, (HEADER, tokens, _CHUNK)))
    return Launch(_place, (programs, 1, 1), {"num_warps": 4, "enable_fp_fusion": True}, last)


class Order(NamedTuple):
    """The order of packed sequences as kernels read it, made on the device."""

    counter: Tensor
    ends: Tensor  # the number of tiles of one head
    table: Tensor  # the first tile of each sequence, then the sequence of each tile
    cu: Tensor  # offsets, clamped to the range
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

    ``other`` are the offsets of the other side. The returned offsets always begin with 0, never
    decrease and are within the ``totals``. ``out`` and ``lse``, if given, are cleared past the last
    sequence.
    """
    batch = cu.shape[0] - 1
    most = totals[0] // tokens + batch  # even if the given longest length is wrong
    room = HEADER + batch + most
    words = torch.empty(room + 2 * (batch + 1), dtype=torch.int32, device=cu.device)
    rows = (0, 0) if out is None else (out.shape[2], out.shape[2] * out.shape[3])
    launch = _placing(Numbers(batch, most, *totals, *rows), tokens, cu.device)
    launch(Pointers(words, cu, other, out, lse, sink))
    ranged = words[room:]
    cu, rest = ranged[: batch + 1], ranged[batch + 1 :]
    return Order(words, words[1:], words[HEADER:], cu, rest)
