# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""The steps that kernels are made of: which sequence, which tiles, tiles in memory.

Kernels pass the bundles of ``bundles.py``. Each rule is in one place, here or in ``scores.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# --- where a program works ---------------------------------------------------------------------


@triton.jit
def nth_program(tiles, together):
    """(tile, head) of this program: ``together`` heads, of any batch, take turns tile by tile."""
    heads = tl.num_programs(0) // tiles
    first = tl.program_id(0) // (tiles * together) * together
    left = tl.program_id(0) - tiles * first
    group = tl.minimum(together, heads - first)
    return left // group, first + left % group


@triton.jit
def sequence(cu, b, batch, total, longest):
    """(start, length) of packed sequence b, kept in range whatever the offsets say.

    What lies past the last sequence is one more, number ``batch``.
    """
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    end = tl.load(cu + tl.minimum(b + 1, batch))
    end = tl.minimum(tl.maximum(end, start), total)
    length = tl.where(b < batch, tl.minimum(end - start, longest), total - start)
    return start, length


@triton.jit
def sequence_of_slot(cu, slot, batch, total, BLOCK: tl.constexpr):
    """(b, tile) of the slot-th of ``total // BLOCK + batch + 1`` slots.

    Sequence b has the slots from ``cu[b] // BLOCK + b`` on: at least as many as it has tiles.
    """
    before = 0
    for s in tl.range(0, batch + 1, 256):
        b = s + tl.arange(0, 256)
        start = tl.load(cu + b, mask=b <= batch, other=0)
        start = tl.minimum(tl.maximum(start, 0), total)
        before += tl.sum(((start // BLOCK + b <= slot) & (b <= batch)).to(tl.int32), 0)
    b = tl.maximum(before - 1, 0)
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    return b, slot - (start // BLOCK + b)


@triton.jit
def sizes(t, n, b, KEYS: tl.constexpr):
    """(q_start, nq, k_start, nk) of sequence b; dense sequences all start at 0.

    What lies past the packed sequences are queries without keys, or KEYS without queries.
    """
    if t.cu_q is not None:
        q_start, nq = sequence(t.cu_q, b, n.batch, n.total_q, n.longest_q)
        k_start, nk = sequence(t.cu_k, b, n.batch, n.total_k, n.longest_k)
        if KEYS:
            nq = tl.where(b < n.batch, nq, 0)
        else:
            nk = tl.where(b < n.batch, nk, 0)
        return q_start, nq, k_start, nk
    else:
        return 0, n.total_q, 0, n.total_k


@triton.jit
def keys_in_use(t, b, nk, n):
    """The keys before this one may be seen, nk or the length of the prefix."""
    if t.lengths is not None:
        length = tl.load(t.lengths + tl.minimum(b, n.batch - 1))
        return tl.maximum(tl.minimum(nk, length), 0)
    else:
        return nk


@triton.jit
def offset_of(nq, nk, used, c):
    """Return the key position of query 0; query i stands i further on."""
    if c.TO_LENGTHS:
        return used - nq
    else:
        return nk - nq


@triton.jit
def matrix(
    x, stride, b, head, start, ROW: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Where the rows of (b, head) start."""
    offset = tl.cast(head, tl.int64) * stride[1]
    if PACKED:
        return x + offset * ALIGN + tl.cast(start, tl.int64) * ROW
    else:
        return x + (offset + tl.cast(b, tl.int64) * stride[0]) * ALIGN


@triton.jit
def vector(x, b, head, start, total, HEADS: tl.constexpr, PACKED: tl.constexpr):
    """Where (b, head) starts in a contiguous ``[B, H, N]``, or ``[1, H, total]``."""
    if PACKED:
        return x + tl.cast(head, tl.int64) * total + start
    else:
        return x + (tl.cast(b, tl.int64) * HEADS + head) * total


# --- tiles in memory ---------------------------------------------------------------------------


@triton.jit
def tile_pointers(x, i0, ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[ROWS, BLOCK_D]`` pointers from row i0 on.

    ROW, the step from row to row, is a constant: that saves registers and arithmetic.
    """
    r = tl.arange(0, ROWS).to(tl.int64)[:, None] * ROW
    return x + tl.cast(i0, tl.int64) * ROW + (r + tl.arange(0, BLOCK_D).to(tl.int64)[None, :])


@triton.jit
def load_tile(
    x, ROW: tl.constexpr, i0, end,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``[ROWS, BLOCK_D]`` from row i0; zeros past D and, if the tile is ragged, past ``end``."""
    at = tile_pointers(x, i0, ROW, ROWS, BLOCK_D)
    i = i0 + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    if RAGGED:
        if BLOCK_D == D:
            return tl.load(at, mask=(i < end)[:, None], other=0.0)
        else:
            return tl.load(at, mask=(i < end)[:, None] & (d < D)[None, :], other=0.0)
    else:
        if BLOCK_D == D:
            return tl.load(at)
        else:
            return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def store_tile(
    x, ROW: tl.constexpr, i0, end, value,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    at = tile_pointers(x, i0, ROW, ROWS, BLOCK_D)
    i = i0 + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    tl.store(at, value.to(x.dtype.element_ty), mask=(i < end)[:, None] & (d < D)[None, :])


@triton.jit
def at_pair(x, stride, b, head, row, col, ALIGN: tl.constexpr):
    """Pointers to (b, head, row, col) of a term with four indices."""
    base = tl.cast(b, tl.int64) * stride[0] + tl.cast(head, tl.int64) * stride[1]
    at = x + base * ALIGN + row.to(tl.int64) * (stride[2] * ALIGN)
    if stride[3] is None:
        return at + col
    else:
        return at + col.to(tl.int64) * stride[3]


# --- which tiles -------------------------------------------------------------------------------


@triton.jit
def band(x0, x1, shift, back, ahead, end, BLOCK: tl.constexpr):
    """Tiles of y in [0, end) that some x in [x0, x1] sees: ``-back <= y - (x + shift) <= ahead``.

    Returns (first, full, full_end, last): tiles first to last hold something, those from full to
    full_end nothing but seen pairs. A limit that is None does not limit.
    """
    low = 0
    low_all = 0
    high = end
    high_all = end
    if back is not None:
        low = tl.maximum(x0 + shift - back, 0)
        low_all = tl.maximum(x1 + shift - back, 0)
    if ahead is not None:
        high = tl.minimum(end, x1 + shift + ahead + 1)
        high_all = tl.minimum(end, x0 + shift + ahead + 1)
    first = low // BLOCK
    last = tl.maximum((tl.maximum(high, 0) + BLOCK - 1) // BLOCK, first)
    full = tl.minimum((low_all + BLOCK - 1) // BLOCK, last)
    full_end = tl.minimum(tl.maximum(tl.maximum(high_all, 0) // BLOCK, full), last)
    return first, full, full_end, last


@triton.jit
def plan_tiles(t, n, b, head, tile, x0, x1, shift, back, ahead, end, BLOCK: tl.constexpr):
    """(count, n_full, first, full): how many tiles to visit and what ``nth_tile`` asks."""
    if t.order is not None:
        stride = n.stride.order
        number = tl.cast(tl.minimum(b, n.batch - 1), tl.int64) * stride[0]
        number += tl.cast(head, tl.int64) * stride[1] + tile
        n_full = tl.load(t.counts + 2 * number)
        n_partial = tl.load(t.counts + 2 * number + 1)
        return n_full + n_partial, n_full, t.order + number * stride[2], 0
    else:
        first, full, full_end, last = band(x0, x1, shift, back, ahead, end, BLOCK)
        return last - first, full_end - full, first, full


@triton.jit
def count_tiles(plan, KIND: tl.constexpr):
    if KIND == "full":
        return plan[1]
    elif KIND == "partial":
        return plan[0] - plan[1]
    else:
        return plan[0]


@triton.jit
def nth_tile(i, t, plan, KIND: tl.constexpr):
    """(tile, partial): the i-th "full", "partial" or "any" tile, and if it has an unseen pair.

    One loop over any tile asks of each whether it is partial; two loops, over the full ones and
    over the partial ones, need not, and take twice the code and its start.
    """
    _, n_full, first, full = plan
    if KIND == "full":
        if t.order is not None:
            return tl.load(first + i), False
        else:
            return full + i, False
    elif KIND == "partial":
        if t.order is not None:
            return tl.load(first + n_full + i), True
        else:
            return first + i + tl.where(first + i < full, 0, n_full), True
    else:
        if t.order is not None:
            return tl.load(first + i), i >= n_full
        else:
            tile = first + i
            return tile, (tile < full) | (tile >= full + n_full)


# --- what a matrix product cannot do ------------------------------------------------------------
#
# A pair that may not attend has weight 0 and no part in a sum, whatever its numbers: but in a
# product of tiles 0 times NaN is NaN. Where a sum came out as NaN it is made again, a row of the
# other side at a time, with only the pairs that are seen.


@triton.jit
def has_nan(x):
    # at once: of one axis after the other triton 3.6 makes no code for sm_100
    return tl.max((x != x).to(tl.int32), None) > 0


@triton.jit
def load_row(x, ROW: tl.constexpr, i, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row i as float32, ``[1, BLOCK_D]``."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + tl.cast(i, tl.int64) * ROW + d, mask=d < D, other=0.0).to(tl.float32)[None]


@triton.jit
def times_row(tile, row):
    """``tile @ row^T`` as a column, in float32."""
    return tl.sum(tile.to(tl.float32) * row, 1)[:, None]
