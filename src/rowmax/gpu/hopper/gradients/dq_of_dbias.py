"""dq where dS is in memory, since it is dbias: ``dq = scale dS K``, one plain product.

Nothing is added up in memory then, so nobody waits for a turn, and the result is the same in every
run. dbias is rounded as the dS is that dq would be made of otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def keys_of(t, n, c, b, first):
    """The keys that some query of a tile may see: lo (a multiple of COLUMNS) up to end."""
    lo = 0
    end = n.nk
    offset = n.nk - n.nq
    if t.lengths is not None:
        end = tl.maximum(tl.minimum(end, tl.load(t.lengths + b)), 0)
    if c.LEFT:
        lo = tl.maximum(first + offset - n.left, 0) // c.COLUMNS * c.COLUMNS
    if c.RIGHT:
        end = tl.minimum(end, tl.minimum(first + c.ROWS, n.nq) + offset + n.right)
    return lo, end


@triton.jit
def dq_of_dbias(t, n, c):
    """A tile of queries of a head; what was made last, which lies in L2, first."""
    gdc_wait()
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = i % n.tiles
    plane = i // n.tiles
    b = plane // n.hq
    head = plane % n.hq
    first = tile * c.ROWS
    lo, end = keys_of(t, n, c, b, first)
    # columns are read by eights, in which past the end dS is zero; keys there may hold anything
    end8 = (end + 7) // 8 * 8
    row = first + tl.arange(0, c.ROWS)
    col = tl.arange(0, c.COLUMNS)
    d = tl.arange(0, c.BLOCK_D)
    at = (plane.to(tl.int64) * n.nq + tl.minimum(row, n.nq - 1)) * n.q_step
    of_rows = t.dbias + (8 * at)[:, None] + col[None, :]
    at = b.to(tl.int64) * n.b_step + (head // n.ratio).to(tl.int64) * n.h_step
    of_keys = t.k + 8 * at + (8 * (col.to(tl.int64) * n.n_step))[:, None] + d[None, :]
    x = tl.zeros([c.ROWS, c.BLOCK_D], tl.float32)
    for j in range(lo, end, c.COLUMNS):
        ds = tl.load(of_rows + j, mask=(j + col < end8)[None, :], other=0.0)
        there = (j + col < end)[:, None] & (d < c.D)[None, :]
        k = tl.load(of_keys + (8 * (j * n.n_step.to(tl.int64))), mask=there, other=0.0)
        x = tl.dot(ds, k, x)
    at = ((b.to(tl.int64) * n.nq + row) * n.hq + head) * c.D
    there = (row < n.nq)[:, None] & (d < c.D)[None, :]
    tl.store(t.dq + at[:, None] + d[None, :], (x * n.scale).to(t.dq.dtype.element_ty), mask=there)
