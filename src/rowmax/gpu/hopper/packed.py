"""The order of the tiles of packed sequences, made on the device: the host reads no offsets.

One sequence comes after the other, so that its keys and values stay in the L2 cache. The first has
most pairs of a query and a key: a few queries of many keys have long tiles, with which no block
should end. A sequence has sections of heads, and a section begins with its longest tile. Blocks
take their tiles from a counter, since the lengths are only on the device.

Under a diagonal blocks would not end together: the last sequence has tiles as long as those of the
first. So the last sequences have their tiles of keys in several runs. Each run has the tiles longer
than half of its longest one. The longest runs of all these sequences come first. A sequence is one
of them if those after it end before its longest tile. They are few: each run reads the queries
again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiled import Launch
from .lib.order import WORDS

#: numbers before the rows of tiles: the counter, and the number of tiles of one head
HEADER = 2
_HEADER = tl.constexpr(HEADER)
_WORDS = tl.constexpr(WORDS)
_CHUNK = 64
#: the most sequences of an order with several runs
MOST_IN_RUNS = _CHUNK
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
    kv_heads: int = 1  # for runs: Late
    blocks: int = 1


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


class Sequence(NamedTuple):
    """A sequence: its place in the tensors, on the side of ``cu`` and on the other."""

    b: Any
    begin: Any
    length: Any
    begin_other: Any
    length_other: Any


class Run(NamedTuple):
    """Tiles of a sequence that follow one another in the order."""

    place: Any  # that of the first tile
    first: Any  # the first tile
    tiles: Any  # their number


@triton.jit
def _store_rows(t, n, to, there, of, run):
    """Write the rows of tiles at places ``to``: their sequence and run (``order.PackedRow``)."""
    there &= to < n.most
    row = t.order + _HEADER + _WORDS * to
    tl.store(row, of.b, there)
    tl.store(row + 1, run.place, there)
    tl.store(row + 2, run.first, there)
    tl.store(row + 3, run.tiles, there)
    tl.store(row + 4, of.begin, there)
    tl.store(row + 5, of.length, there)
    tl.store(row + 6, of.begin_other, there)
    tl.store(row + 7, of.length_other, there)


@triton.jit
def _place(t, n, c):
    """Write the tiles of sequence b, and its offset in order, in program b.

    Program ``batch`` writes the end of the last sequence. All programs clear the rows past that
    end.
    """
    CHUNK: tl.constexpr = c.CHUNK
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
    offsets = t.order + _HEADER + _WORDS * n.most
    if b <= n.batch:
        tl.store(offsets + b, begins)
        tl.store(offsets + n.batch + 1 + b, begins_other)
    if b < n.batch:
        of = Sequence(b, begins, ends - begins, begins_other, ends_other - begins_other)
        if c.RUNS > 1:
            _place_runs(t, n, of, c)
        else:
            _place_one(t, n, of, c)
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
def _precedes(size, size_other, at, than, than_other, than_at):
    """Return True if a sequence comes before another: more pairs, or more rows, or by number."""
    pairs, than_pairs = size.to(tl.int64) * size_other, than.to(tl.int64) * than_other
    more = (size > than) | ((size == than) & (at < than_at))
    return (pairs > than_pairs) | ((pairs == than_pairs) & more)


@triton.jit
def _place_one(t, n, of, c):
    """Write the rows of a sequence in one run."""
    CHUNK: tl.constexpr = c.CHUNK
    at = tl.arange(0, CHUNK)
    floor, floor_other = of.b * 0, of.b * 0
    before = tl.zeros([CHUNK], tl.int32)
    every = tl.zeros([CHUNK], tl.int32)
    for first in range(0, n.batch, CHUNK):
        other = first + at
        size, floor = _sizes(t.cu, first, n.batch, n.total, floor, CHUNK)
        size_other, floor_other = _sizes(t.other, first, n.batch, n.total_other, floor_other, CHUNK)
        tiles = tl.where(other < n.batch, (size + c.TOKENS - 1) // c.TOKENS, 0)
        every += tiles
        earlier = _precedes(size, size_other, other, of.length, of.length_other, of.b)
        before += tl.where(earlier, tiles, 0)
    begin = tl.sum(before, 0)
    _place_count(t, n, of.b, tl.sum(every, 0))
    tiles = (of.length + c.TOKENS - 1) // c.TOKENS
    for first in range(0, tiles, CHUNK):
        m = first + at
        _store_rows(t, n, begin + m, m < tiles, of, Run(begin, 0, tiles))


@triton.jit
def _place_count(t, n, b, count):
    """Write the counter and the number of tiles of all sequences, in program 0."""
    if b == 0:
        tl.store(t.order, 0)
        tl.store(t.order + 1, tl.minimum(count, n.most))
        if count == 0:  # a block reads a first tile before it reads their number
            at = tl.arange(0, 1)
            _store_rows(t, n, at, at == 0, Sequence(0, 0, 0, 0, 0), Run(0, 0, 1))


# --- several runs of a sequence ----------------------------------------------------------------


@triton.jit
def _longer(size, seen, than, c):
    """Return how many tiles of the keys of a sequence are seen by more than ``than`` queries.

    Under a diagonal that ends at the last positions, tile n is not seen by the first
    ``n TOKENS + nq - nk`` of the ``seen`` queries.
    """
    tiles = (size + c.TOKENS - 1) // c.TOKENS
    found = tl.maximum(size - than + c.TOKENS - 1, 0) // c.TOKENS
    return tl.where(seen > than, tl.minimum(found, tiles), 0)


@triton.jit
def _are_late(size, seen, n, c):
    """Return True for sequences whose longest tile ends after all sequences that follow.

    The work of a tile is the number of queries that see it, so that of a sequence is its number of
    pairs under the diagonal in tiles.
    """
    at = tl.arange(0, c.CHUNK)
    least = tl.minimum(size, seen).to(tl.float32)
    work = least * (size - least / 2) / c.TOKENS
    after = _precedes(
        size[:, None], seen[:, None], at[:, None], size[None, :], seen[None, :], at[None, :]
    )
    left = tl.sum(tl.where(after, work[None, :], 0.0), 1)
    return left * n.kv_heads < least * n.blocks


@triton.jit
def _bounds_of_runs(size, seen, n, c):
    """Return (begin, end), int32 ``[RUNS, sequences]``: the tiles of each run."""
    late = _are_late(size, seen, n, c)
    longest = tl.max(tl.where(late, tl.minimum(size, seen), 0), 0)
    late = late[None, :]
    r = tl.arange(0, c.RUNS)[:, None]
    size, seen = size[None, :], seen[None, :]
    tiles = (size + c.TOKENS - 1) // c.TOKENS
    begin = _longer(size, seen, longest >> r, c)
    end = _longer(size, seen, longest >> (r + 1), c)
    begin = tl.where(late, begin, tiles)
    return tl.where(r > 0, begin, 0), tl.where(late & (r < c.RUNS - 1), end, tiles)


@triton.jit
def _place_runs(t, n, of, c):
    """Write the rows of a sequence in several runs. There are at most CHUNK sequences."""
    at = tl.arange(0, c.CHUNK)
    r = tl.arange(0, c.RUNS)
    size, _ = _sizes(t.cu, 0, n.batch, n.total, of.b * 0, c.CHUNK)
    seen, _ = _sizes(t.other, 0, n.batch, n.total_other, of.b * 0, c.CHUNK)
    begins, ends = _bounds_of_runs(size, seen, n, c)
    tiles = ends - begins
    of_runs = tl.sum(tiles, 1)
    earlier = _precedes(size, seen, at, of.length, of.length_other, of.b)
    place = tl.sum(tl.where(earlier[None, :], tiles, 0), 1)
    place += tl.sum(tl.where(r[None, :] < r[:, None], of_runs[None, :], 0), 1)
    begin = tl.sum(tl.where((at == of.b)[None, :], begins, 0), 1)
    end = tl.sum(tl.where((at == of.b)[None, :], ends, 0), 1)
    _place_count(t, n, of.b, tl.sum(of_runs, 0))
    every = (of.length + c.TOKENS - 1) // c.TOKENS
    for m0 in range(0, every, c.CHUNK):
        m = m0 + at
        within = (begin[:, None] <= m[None, :]) & (m[None, :] < end[:, None])
        to = tl.sum(tl.where(within, place[:, None], 0), 0)
        first = tl.sum(tl.where(within, begin[:, None], 0), 0)
        many = tl.sum(tl.where(within, (end - begin)[:, None], 0), 0)
        _store_rows(t, n, to + m - first, m < every, of, Run(to, first, many))


def most_tiles(total: int, longest: int, batch: int, tokens: int) -> int:
    """Return a bound of the number of tiles: every sequence may end in a partial tile."""
    return min(total // tokens + batch, batch * -(-longest // tokens))


class Shape(NamedTuple):
    """``c``: the constants of the kernel."""

    TOKENS: Any  # positions of a tile
    CHUNK: Any
    RUNS: Any  # runs of a sequence, a power of 2


def shape(tokens: int, runs: int) -> Shape:
    """Return the constants of an order in tiles of ``tokens`` positions."""
    return Shape(*map(tl.constexpr, (tokens, _CHUNK, runs)))


@lru_cache(maxsize=256)
def _placing(numbers: Numbers, tokens: int, runs: int, device: torch.device) -> Launch:
    # the key includes the device: a launch keeps its loaded kernel
    programs = max(numbers.batch + 1, _CLEARING if numbers.heads else 1)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Launch(_place, (programs, 1, 1), options, (numbers, shape(tokens, runs)))


class Late(NamedTuple):
    """The runs of the last sequences, and what their number depends on."""

    runs: int = 1
    kv_heads: int = 1
    blocks: int = 1  # that take the tiles


class Order(NamedTuple):
    """The order of packed sequences as kernels read it, made on the device."""

    counter: Tensor
    ends: Tensor  # the number of tiles of one head
    table: Tensor  # a row of WORDS numbers for each tile (lib/order.py)
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
    late: Late | None = None,
) -> Order:
    """Return the order of sequences with the offsets ``cu``, in tiles of ``tokens`` positions.

    ``other`` are the offsets of the other side. The returned offsets always begin with 0, never
    decrease and are within the ``totals``. ``out`` and ``lse``, if given, are cleared past the last
    sequence. ``late``: how the last sequences are in runs, where ``cu`` are offsets of keys
    under a diagonal; None: one run each.
    """
    batch = cu.shape[0] - 1
    most = totals[0] // tokens + batch  # even if the given longest length is wrong
    late = late or Late()
    room = HEADER + WORDS * most
    words = torch.empty(room + 2 * (batch + 1), dtype=torch.int32, device=cu.device)
    rows = (0, 0) if out is None else (out.shape[2], out.shape[2] * out.shape[3])
    numbers = Numbers(batch, most, *totals, *rows, late.kv_heads, late.blocks)
    launch = _placing(numbers, tokens, late.runs, cu.device)
    launch(Pointers(words, cu, other, out, lse, sink))
    ranged = words[room:]
    cu, rest = ranged[: batch + 1], ranged[batch + 1 :]
    return Order(words, words[1:], words[HEADER:], cu, rest)
