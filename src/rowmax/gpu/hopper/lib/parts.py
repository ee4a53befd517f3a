"""Tiles in two parts of columns: shapes are powers of two, so 96 columns are 64 and 32.

W0 and W1 are the widths of the parts, and W1 is 0 where one part has all columns. A product over
columns is a sum of two products, a product with columns is one for each part. Each is a product in
flight of its own (``count``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .layouts import product_layout, weight_layout
from .ring import clear_rows, tile_at, tile_buffers


class Parts(NamedTuple):
    """The columns of a tile: the largest power of two, and the others if there are any."""

    low: Any
    high: Any


@gluon.constexpr_function
def count(W1):
    """Return the products in flight of a product with parts."""
    return 2 if W1 else 1


# --- shared memory -----------------------------------------------------------------------------


@gluon.jit
def part_buffers(copy, n: gl.constexpr, W1: gl.constexpr):
    """Return n buffers for each part of a tile; an absent part's are unused."""
    low = tile_buffers(copy.low, n)
    high = low
    if W1:
        high = tile_buffers(copy.high, n)
    return Parts(low, high)


@gluon.jit
def parts_at(buffers, s, ROWS: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr):
    """Return buffer s as ``[ROWS, W0]`` and ``[ROWS, W1]``."""
    low = tile_at(buffers.low, s, ROWS, W0)
    high = low
    if W1:
        high = tile_at(buffers.high, s, ROWS, W1)
    return Parts(low, high)


@gluon.jit
def columns_of(x, W0: gl.constexpr, W1: gl.constexpr):
    """Return both parts of a tile in shared memory that holds them side by side."""
    low = x
    high = x
    if W1:
        low = x.slice(0, W0, dim=1)
        high = x.slice(W0, W1, dim=1)
    return Parts(low, high)


@gluon.jit
def rows_of_parts(x, first: gl.constexpr, n: gl.constexpr, W1: gl.constexpr):
    """Return n rows of tiles in shared memory."""
    low = x.low.slice(first, n, dim=0)
    high = low
    if W1:
        high = x.high.slice(first, n, dim=0)
    return Parts(low, high)


@gluon.jit
def expect_parts(bar, copy, W1: gl.constexpr, more: gl.constexpr = 0):
    """Expect the bytes of both parts of a copy, and ``more``."""
    if W1:
        mbarrier.expect(bar, copy.low.block_type.nbytes + copy.high.block_type.nbytes + more)
    else:
        mbarrier.expect(bar, copy.low.block_type.nbytes + more)


@gluon.jit
def copy_parts(copy, corner, W0: gl.constexpr, W1: gl.constexpr, bar, buffers, s):
    """Copy a tile into buffer s. ``corner`` is without the column."""
    tma_load(copy.low, corner + (0,), bar, buffers.low.index(s))
    if W1:
        tma_load(copy.high, corner + (W0,), bar, buffers.high.index(s))


@gluon.jit
def load_parts(copy, corner, W0: gl.constexpr, W1: gl.constexpr, bar, buffers, s):
    """Expect the bytes of a tile, and copy it into buffer s."""
    expect_parts(bar, copy, W1)
    copy_parts(copy, corner, W0, W1, bar, buffers, s)


@gluon.jit
def cleared_parts(
    full, s, STAGES: gl.constexpr, buffers, ROWS: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr,
    rows, nth, TILES: gl.constexpr = 1,
):  # fmt: skip
    """Clear the tile in buffer s past its first ``rows``, if it is short: the ``nth`` short one.

    The tile may be TILES buffers of ROWS / TILES rows.
    """
    if rows < ROWS:
        mbarrier.wait(full.index(STAGES), nth & 1)
        EACH: gl.constexpr = ROWS // TILES
        for i in gl.static_range(TILES):
            begin = rows
            if TILES > 1:
                begin = gl.minimum(gl.maximum(rows - i * EACH, 0), EACH)
            clear_rows(buffers.low.index(TILES * s + i), EACH, W0, begin)
            if W1:
                clear_rows(buffers.high.index(TILES * s + i), EACH, W1, begin)
        fence_async_shared()
        mbarrier.arrive(full.index(s), count=1)


# --- products ----------------------------------------------------------------------------------


@gluon.jit
def issue_over_columns(a, b, acc, W1: gl.constexpr):
    """Issue ``a b^T`` in the layout of ``acc``, whose values are unused."""
    x = warpgroup_mma(a.low, b.low.permute((1, 0)), acc, use_acc=False, is_async=True)
    if W1:
        x = warpgroup_mma(a.high, b.high.permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def issue_with_columns(p, b, acc, W0: gl.constexpr, W1: gl.constexpr):
    """Issue ``acc + p b``, p ``[64, N]`` in registers, in the layout of its scores."""
    P0 = gl.convert_layout(p, weight_layout(W0))
    low = warpgroup_mma(P0, b.low, acc.low, is_async=True)
    high = acc.high
    if W1:
        P1 = gl.convert_layout(p, weight_layout(W1))
        high = warpgroup_mma(P1, b.high, high, is_async=True)
    return Parts(low, high)


@gluon.jit
def zeros(ROWS: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr):
    """Return sums ``[ROWS, W0 + W1]`` of a warpgroup, all 0; an absent part is the number 0."""
    low = gl.full([ROWS, W0], 0.0, gl.float32, product_layout(W0))
    high = 0
    if W1:
        high = gl.full([ROWS, W1], 0.0, gl.float32, product_layout(W1))
    return Parts(low, high)


@gluon.jit
def wait_parts(n: gl.constexpr, x, W1: gl.constexpr):
    """Wait until n products are in flight; return x."""
    if W1:
        low, high = warpgroup_mma_wait(n, deps=[x.low, x.high])
        x = Parts(low, high)
    else:
        x = Parts(warpgroup_mma_wait(n, deps=[x.low]), x.high)
    return x


@gluon.jit
def wait_two(n: gl.constexpr, x, y, W1: gl.constexpr):
    """Wait until n products are in flight; return x and y, whose parts are alike."""
    if W1:
        a, b, c, d = warpgroup_mma_wait(n, deps=[x.low, x.high, y.low, y.high])
        x = Parts(a, b)
        y = Parts(c, d)
    else:
        a, c = warpgroup_mma_wait(n, deps=[x.low, y.low])
        x = Parts(a, x.high)
        y = Parts(c, y.high)
    return x, y


@gluon.jit
def scaled_parts(x, scale, W1: gl.constexpr):
    """Return x times a number."""
    high = x.high
    if W1:
        high = x.high * scale
    return Parts(x.low * scale, high)
