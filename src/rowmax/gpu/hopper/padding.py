"""What lies past the end of a sequence is not to reach it.

The last tile of a packed sequence ends in rows of the next one, and keys past a prefix length may
hold anything. Their weights are 0, but 0 times what is no number, or infinite, is not: whoever
copies such a tile clears those rows before it tells anyone. The copy lands at a barrier of its
own, the last of the tile's ring, which has one more than buffers for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import fence_async_shared, mbarrier, reinterpret


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers, each of which completes a phase after ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def full_barriers(STAGES: gl.constexpr, SHORT: gl.constexpr):
    """One for each buffer of a ring, and where tiles may be short one for those."""
    return barriers(STAGES + 1 if SHORT else STAGES, 1)


@gluon.jit
def landing(full, s, STAGES: gl.constexpr, SHORT: gl.constexpr, short):
    """The barrier for the copy of a tile into buffer s of a ring."""
    if SHORT:
        s = gl.where(short, STAGES, s)
    return full.index(s)


@gluon.jit
def cleared(
    full, s, STAGES: gl.constexpr, buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr, rows, nth
):
    """Zeros past the first ``rows`` of the tile in buffer s, if it is short: the ``nth`` such."""
    if rows < ROWS:
        mbarrier.wait(full.index(STAGES), nth & 1)
        clear_rows(buffer, ROWS, WIDTH, rows)
        fence_async_shared()
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def clear_rows(buffer, BLOCK_K: gl.constexpr, width: gl.constexpr, begin):
    """Zeros in rows ``begin`` and up of a block. The swizzle moves what is in a row about within
    its 128 bytes, and wider blocks are as many columns of these side by side."""
    W: gl.constexpr = min(width, 64)
    parts: gl.constexpr = width // W
    eights: gl.constexpr = BLOCK_K // 8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    single = reinterpret(buffer, buffer.dtype, [parts * BLOCK_K, W], plain)
    eight = reinterpret(buffer, buffer.dtype, [parts * eights, 8, W], flat)
    row: gl.constexpr = gl.BlockedLayout([W // 32], [32], [gl.num_warps()], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, W // 16], [2, 16], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(parts):
        for r in range(begin, gl.minimum((begin + 7) // 8 * 8, BLOCK_K)):
            single.index(part * BLOCK_K + r).store(gl.zeros([W], buffer.dtype, row))
        for i in range((begin + 7) // 8, eights):
            eight.index(part * eights + i).store(gl.zeros([8, W], buffer.dtype, rows))
