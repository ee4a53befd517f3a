"""What is done row by row, before and after: delta and lse for the kernel, dq from its sums.

Both passes cut rows into the tiles of queries of the kernel, padded alike (``plane_of``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.steps import sequence, sequence_of_slot

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(cu_q, tile, plane, batch, total, hq, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, head, its first row, its length, first row of the tile within it)."""
    if PACKED:
        b, tile = sequence_of_slot(cu_q, tile, batch, total, ROWS)
        start, n = sequence(cu_q, b, batch, total, total)
        head = plane
    else:
        b = plane // hq
        head = plane % hq
        start = 0
        n = total
    return b, head, start, n, tile * ROWS


@triton.jit(do_not_specialize=["batch", "total", "hq", "tiles"])
def prepare(
    out, dout, lse, dlse, sink, stats, dsink, cu_q, batch, total, hq, tiles, b_step, n_step, h_step,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """lse in units of log 2 and ``Delta - dLSE`` of a tile of rows, and its part of dsink.

    Rows that see nothing, and those that pad a tile, have an lse of +inf: weights of 0.
    """
    PACKED: tl.constexpr = cu_q is not None
    tile = tl.program_id(0) % tiles
    plane = tl.program_id(0) // tiles
    b, head, start, n, i0 = place(cu_q, tile, plane, batch, total, hq, ROWS, PACKED)
    n = tl.where(b < batch, n, 0)
    r = tl.arange(0, ROWS)
    here = i0 + r < n
    d = tl.arange(0, BLOCK_DV)
    there = here[:, None] & (d < DV)[None, :]
    row = (start + i0 + r).to(tl.int64)
    if not PACKED:
        row += b.to(tl.int64) * total
    at = (row * hq + head) * DV
    o = tl.load(out + at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    at = (start + i0 + r).to(tl.int64) * n_step + head.to(tl.int64) * h_step
    if not PACKED:
        at += b.to(tl.int64) * b_step
    do = tl.load(dout + at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    at = plane.to(tl.int64) * total + start + i0 + r
    value = tl.load(lse + at, mask=here, other=float("-inf"))
    if dlse is not None:
        delta -= tl.load(dlse + at, mask=here, other=0.0)
    lse2 = tl.where(value == float("-inf"), float("inf"), value * _LOG2E)
    to = stats + plane.to(tl.int64) * (2 * tiles * ROWS) + tile * ROWS + r
    tl.store(to, lse2)
    tl.store(to + tiles * ROWS, delta)
    if dsink is not None:
        p = tl.exp2(tl.load(sink + head).to(tl.float32) * _LOG2E - lse2)
        tl.store(dsink + tl.program_id(0), -tl.sum(tl.where(here, p * delta, 0.0), 0))


@triton.jit(do_not_specialize=["batch", "total", "hq", "tiles"])
def finish(
    sums, dq, cu_q, batch, total, hq, tiles, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``dq = scale sums`` of a tile of rows, in the dtype of q; 0 past the last sequence."""
    PACKED: tl.constexpr = cu_q is not None
    tile = tl.program_id(0) % tiles
    plane = tl.program_id(0) // tiles
    b, head, start, n, i0 = place(cu_q, tile, plane, batch, total, hq, ROWS, PACKED)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    there = (i0 + r < n)[:, None] & (d < D)[None, :]
    at = (plane.to(tl.int64) * tiles + tile) * ROWS + r
    x = tl.load(sums + at[:, None] * BLOCK_D + d[None, :], mask=there, other=0.0) * scale
    row = (start + i0 + r).to(tl.int64)
    if not PACKED:
        row += b.to(tl.int64) * total
    at = (row * hq + head) * D
    tl.store(dq + at[:, None] + d[None, :], x.to(dq.dtype.element_ty), mask=there)
