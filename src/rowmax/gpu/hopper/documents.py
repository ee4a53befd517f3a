"""The documents of a mask: the key tiles that share one with a query tile, and their ids.

Any order of ids is valid; sorted ids are fast. A query tile skips the key tiles before the first
and after the last that share an id with it. On a GPU three kernels or four compute the tables: the
same in torch is forty operations, 0.9 ms of the host (H200).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from ..compiled import Launch

_FAR = tl.constexpr(2**31 - 1)
_CHUNK = tl.constexpr(256)  # tiles that a step of a kernel reads


class Spans(NamedTuple):
    """The documents of a call as the forward reads them."""

    spans: Tensor  # int32 [B, query tiles, 2], the columns that a query tile may see
    q_range: Tensor  # int32 [B|1, warpgroups' tiles, 2], the least and the greatest id
    k_range: Tensor  # int32 [B|1, key tiles, 2]
    counter: Tensor  # int32 [1], 0


def tile_spans(
    resident: Tensor, streamed: Tensor, group: int, rows: int, block_streamed: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Return the streamed tiles of each resident tile, and those that its rows need no mask for.

    Both are int32 ``[B, tiles, 2]``, the first one and past the last one. A resident tile has
    ``group`` times so many rows, and the second tensor has an interval for each of those parts.

    The arguments are the ids of both sides, ``[B|1, N]``. Neither bound of the first decreases from
    one tile to the next, so the resident tiles of a streamed one are an interval too.
    """
    ranges = tile_ranges(resident, rows), tile_ranges(streamed, block_streamed)
    alike = resident.new_empty(batch, ranges[0].shape[1], 2)
    spans = _spans(*ranges, group, 1, batch, alike)
    _run(_sorted_launch(batch, spans.shape[1], ranges[1].shape[1]), SpanPointers(spans=spans))
    return spans, alike


def tile_ranges(ids: Tensor, block: int, counter: Tensor | None = None) -> Tensor:
    """Return int32 ``[B|1, tiles, 2]``, the least and greatest id of each tile of ids ``[B|1, N]``.

    ``counter`` is set to 0 if it is given.
    """
    batch, n = ids.shape
    ranges = ids.new_empty(batch, -(-n // block), 2)
    _run(_ranges_launch(batch, n, block), SpanPointers(ids, ranges, counter=counter))
    return ranges


def spans_of(p: Problem, t: Tensors, warpgroups: int, tokens: int, block_k: int) -> Spans:
    """Return what the forward reads of documents."""
    assert t.q_ids is not None
    assert t.k_ids is not None
    q_ids, k_ids = t.q_ids.contiguous(), t.k_ids.contiguous()
    counter = q_ids.new_empty(1)
    q_range, k_range = tile_ranges(q_ids, tokens, counter), tile_ranges(k_ids, block_k)
    return Spans(_spans(q_range, k_range, warpgroups, block_k, p.batch), q_range, k_range, counter)


# --- kernels -----------------------------------------------------------------------------------


class SpanPointers(NamedTuple):
    """The tensors of the kernels here."""

    ids: Any = None  # int32 [B|1, N]
    ranges: Any = None  # int32 [B|1, tiles, 2]
    others: Any = None
    spans: Any = None  # int32 [B, tiles, 2]
    alike: Any = None  # int32 [B, ranges, 2]
    counter: Any = None  # int32 [1], set to 0


class SpanNumbers(NamedTuple):
    """The sizes of the kernels here."""

    n: Any  # ids of a sequence, or tiles
    others: Any = 1  # other tiles
    stride: Any = 0  # tiles from sequence to sequence; 0: all share one
    stride_others: Any = 0
    BLOCK: Any = tl.constexpr(1)  # ids of a tile, or ranges of one
    PADDED: Any = tl.constexpr(1)  # the next power of two
    UNIT: Any = tl.constexpr(1)  # factor of a span


@triton.jit
def ranges_kernel(t, num):
    """Store the least and the greatest id of one tile."""
    tile = tl.program_id(0)
    b = tl.program_id(1)
    if t.counter is not None:
        tl.store(t.counter, 0)  # every program stores the same
    i = tile * num.BLOCK + tl.minimum(tl.arange(0, num.PADDED), num.BLOCK - 1)
    ids = tl.load(t.ids + b.to(tl.int64) * num.n + tl.minimum(i, num.n - 1))
    to = t.ranges + (b.to(tl.int64) * tl.num_programs(0) + tile) * 2
    tl.store(to, tl.min(ids, 0))
    tl.store(to + 1, tl.max(ids, 0))


@triton.jit
def spans_kernel(t, num):
    """Store where the other tiles begin and end that may share an id with one tile.

    ``t.alike``: by range of the tile, also the other tiles that have its one id and no other. They
    are the first of such tiles, and those after it up to a tile with another id.
    """
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    i = tile * num.BLOCK + tl.minimum(tl.arange(0, num.PADDED), num.BLOCK - 1)
    i = tl.minimum(i, num.n - 1)
    at = t.ranges + (b * num.stride + i) * 2
    lows, highs = tl.load(at), tl.load(at + 1)
    low, high = tl.min(lows, 0), tl.max(highs, 0)
    begin, end = num.others, 0
    first_alike = tl.full((num.PADDED,), num.others, tl.int32)
    end_alike = first_alike
    for first in tl.range(0, num.others, _CHUNK):
        j = first + tl.arange(0, _CHUNK)
        other = t.others + (b * num.stride_others + j) * 2
        other_low = tl.load(other, mask=j < num.others, other=_FAR)
        other_high = tl.load(other + 1, mask=j < num.others, other=0)
        met = (low <= other_high) & (other_low <= high) & (j < num.others)
        begin = tl.minimum(begin, tl.min(tl.where(met, j, num.others), 0))
        end = tl.maximum(end, tl.max(tl.where(met, j + 1, 0), 0))
        if t.alike is not None:
            x, y = other_low[None, :], tl.minimum(j, num.others)[None, :]
            same = (lows == highs)[:, None] & (x == lows[:, None])
            same = same & (other_low == other_high)[None, :]
            first_alike = tl.minimum(first_alike, tl.min(tl.where(same, y, num.others), 1))
            past = (y > first_alike[:, None]) & (same == 0)
            end_alike = tl.minimum(end_alike, tl.min(tl.where(past, y, num.others), 1))
    to = t.spans + (b * tl.num_programs(0) + tile) * 2
    tl.store(to, begin * num.UNIT)
    tl.store(to + 1, end * num.UNIT)
    if t.alike is not None:
        to = t.alike + (b * num.n + i) * 2
        tl.store(to, first_alike)
        tl.store(to + 1, end_alike)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _greatest(a, b):
    return tl.maximum(a, b)


@triton.jit
def sorted_kernel(t, num):
    """Lower the begins and raise the ends of a sequence, so that neither ever decreases."""
    spans = t.spans + tl.program_id(0).to(tl.int64) * num.n * 2
    chunks = tl.cdiv(num.n, _CHUNK)
    least = num.others
    greatest = 0
    for c in tl.range(0, chunks):
        j = (chunks - 1 - c) * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(spans + 2 * j, mask=j < num.n, other=_FAR)
        x = tl.minimum(tl.associative_scan(x, 0, _least, reverse=True), least)
        tl.store(spans + 2 * j, x, mask=j < num.n)
        least = tl.min(x, 0)
        j = c * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(spans + 2 * j + 1, mask=j < num.n, other=0)
        x = tl.maximum(tl.associative_scan(x, 0, _greatest), greatest)
        tl.store(spans + 2 * j + 1, x, mask=j < num.n)
        greatest = tl.max(x, 0)


# --- launches ----------------------------------------------------------------------------------


def _is_interpreted() -> bool:
    # by its name: the emulator of the tests has no classes of Triton's
    return type(ranges_kernel).__name__ == "InterpretedFunction"


def _constants(block: int) -> dict[str, Any]:
    return {"BLOCK": tl.constexpr(block), "PADDED": tl.constexpr(triton.next_power_of_2(block))}


@lru_cache(maxsize=4096)
def _ranges_launch(batch: int, n: int, block: int) -> Launch:
    numbers = SpanNumbers(n, **_constants(block))
    return Launch(ranges_kernel, (-(-n // block), batch, 1), {"num_warps": 1}, (numbers,))


@lru_cache(maxsize=4096)
def _spans_launch(
    batch: int, n: int, others: int, shared: tuple[bool, bool], group: int, unit: int
) -> Launch:
    strides = [0 if one else size for one, size in zip(shared, (n, others), strict=True)]
    numbers = SpanNumbers(n, others, *strides, **_constants(group), UNIT=tl.constexpr(unit))
    return Launch(spans_kernel, (-(-n // group), batch, 1), {"num_warps": 2}, (numbers,))


@lru_cache(maxsize=4096)
def _sorted_launch(batch: int, n: int, others: int) -> Launch:
    return Launch(sorted_kernel, (batch, 1, 1), {"num_warps": 2}, (SpanNumbers(n, others),))


def _run(launch: Launch, t: SpanPointers) -> None:
    (launch.public if _is_interpreted() else launch)(t)


def _spans(
    ranges: Tensor, others: Tensor, group: int, unit: int, batch: int, alike: Tensor | None = None
) -> Tensor:
    """Return int32 ``[B, tiles, 2]``: where the other tiles begin and end, times ``unit``.

    A tile is ``group`` ranges. Only tiles that may share an id with it are within. ``alike`` is
    filled if it is given (``tile_spans``).
    """
    n, m = ranges.shape[1], others.shape[1]
    spans = ranges.new_empty(batch, -(-n // group), 2)
    shared = ranges.shape[0] == 1, others.shape[0] == 1
    launch = _spans_launch(batch, n, m, shared, group, unit)
    _run(launch, SpanPointers(ranges=ranges, others=others, spans=spans, alike=alike))
    return spans
