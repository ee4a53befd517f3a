"""The producer of the fused backward: one warp, which copies all tiles of a block.

Barriers and rings are those of ``backward_fused.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import first_tile, next_tile, steps_before_draw, wait_done
from .backward_order import plane_of, resident_head, step_of
from .gluon_compat import mbarrier, reinterpret, tma_load
from .lib.parts import cleared_parts, copy_parts, expect_parts, load_parts
from .lib.ring import landing, slot, wait_empty


@gluon.jit
def wait_free(C: gl.constexpr, rings, use):
    """Wait until the buffers of an earlier use are free; below 0 there is none."""
    wait_done(C, rings, gl.maximum(use, 0), use >= 0)


@gluon.jit
def load_step(C: gl.constexpr, FIRST: gl.constexpr, descs, rings, tile, i, use, cut, n):
    """Load Q, lse and delta, dO and the bias of step i of a tile of keys.

    Return the number of tiles so far that end after their sequence; ``cut`` were before this step.
    FIRST: this is the tile's first step.
    """
    SHORT: gl.constexpr = C.VARLEN and (FIRST or not C.ENDS_FIRST)
    m, g = step_of(C, i, tile, n.group)
    part = 0 if C.VARLEN else tile.b
    head = tile.head * n.group + g
    plane, row = plane_of(C, tile.b, head, tile.q_row, n.hq)
    first = m * C.BLOCK_STREAMED
    rest = tile.nq - first
    short = rest < C.BLOCK_STREAMED
    s = slot(use, C.Q_STAGES)
    bar = landing(rings.q.full, s, C.Q_STAGES, SHORT, short)
    wait_free(C, rings, use - C.Q_STAGES)
    expect_parts(bar, descs.q, C.D1, descs.rows.block_type.nbytes)
    corner = (part, tile.q_row + first, head)
    q = rings.q.buffers
    copy_parts(descs.q, corner, C.D0, C.D1, bar, q, s)
    tma_load(descs.rows, [plane, 0, row + first], bar, rings.rows.index(s))
    if SHORT:  # before the wait for a buffer of dO
        cleared_parts(rings.q.full, s, C.Q_STAGES, q, C.BLOCK_STREAMED, C.D0, C.D1, rest, cut)
    u = slot(use, C.DO_STAGES)
    bar = landing(rings.do.full, u, C.DO_STAGES, SHORT, short)
    wait_free(C, rings, use - C.DO_STAGES)
    do = rings.do.buffers
    load_parts(descs.do, corner, C.DV0, C.DV1, bar, do, u)
    if C.BIAS_FLOAT32:
        of_bias = [tile.b * n.each_b, head * n.each_h, first, tile.first]
        load_float32(C, descs.bias, rings.bias, rings, of_bias, use)
    elif C.BIAS:
        t = slot(use, C.DS_STAGES)
        bar = rings.ds.full.index(t)
        wait_free(C, rings, use - C.DS_STAGES + 1)  # released with dQ of the use before
        mbarrier.expect(bar, descs.bias.block_type.nbytes)
        ds = rings.ds.buffers
        box: gl.constexpr = [1, 1, C.BLOCK_STREAMED, C.BLOCK_RESIDENT]
        to = reinterpret(ds.index(t), ds.dtype, box, descs.bias.layout)
        at = [tile.b * n.each_b, head * n.each_h, first, tile.first]
        tma_load(descs.bias, at, bar, to)
    if SHORT:
        cleared_parts(rings.do.full, u, C.DO_STAGES, do, C.BLOCK_STREAMED, C.DV0, C.DV1, rest, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_float32(C: gl.constexpr, desc, ring, rings, corner, use):
    """Load a float32 bias of a use, half of the keys for each warpgroup."""
    t = slot(use, C.BIAS_STAGES)
    wait_free(C, rings, use - C.BIAS_STAGES)
    bar = ring.full.index(t)
    mbarrier.expect(bar, C.WARPGROUPS * desc.block_type.nbytes)
    for c in gl.static_range(C.WARPGROUPS):
        at = [corner[0], corner[1], corner[2], corner[3] + c * C.TOKENS]
        tma_load(desc, at, bar, ring.buffers.index(C.WARPGROUPS * t + c))


@gluon.jit
def load_keys(C: gl.constexpr, copy, corner, W0: gl.constexpr, W1: gl.constexpr, bar, buffers, s):
    """Load K or V of a tile of keys into buffer s of a ring."""
    if C.KEY_TILES == 1:
        load_parts(copy, corner, W0, W1, bar, buffers, s)
    else:
        expect_parts(bar, copy, W1, (C.KEY_TILES - 1) * copy.low.block_type.nbytes)
        for i in gl.static_range(C.KEY_TILES):
            at = (corner[0], corner[1] + i * C.TOKENS, corner[2])
            copy_parts(copy, at, W0, W1, bar, buffers, C.KEY_TILES * s + i)


@gluon.jit
def load_resident(C: gl.constexpr, descs, rings, tile, head, nth, cut):
    """Load K and V of the nth tile that has steps; ``cut`` as of ``load_step``."""
    part = 0 if C.VARLEN else tile.b
    corner = (part, tile.k_row + tile.first, head)
    rest = tile.used - tile.first
    short = rest < C.BLOCK_RESIDENT
    s = slot(nth, C.KV_STAGES)
    wait_empty(rings.k, nth, C.KV_STAGES)
    k = rings.k.buffers
    bar = landing(rings.k.full, s, C.KV_STAGES, C.PADDED, short)
    load_keys(C, descs.k, corner, C.D0, C.D1, bar, k, s)
    v = rings.v.buffers
    bar = landing(rings.v.full, s, C.KV_STAGES, C.PADDED, short)
    load_keys(C, descs.v, corner, C.DV0, C.DV1, bar, v, s)
    if C.PADDED:
        rows: gl.constexpr = C.BLOCK_RESIDENT
        n: gl.constexpr = C.KEY_TILES
        cleared_parts(rings.k.full, s, C.KV_STAGES, k, rows, C.D0, C.D1, rest, cut, n)
        cleared_parts(rings.v.full, s, C.KV_STAGES, v, rows, C.DV0, C.DV1, rest, cut, n)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def producer(C: gl.constexpr, descs, rings, mail, t, n):
    """Load all tiles of this block into shared memory, in one warp."""
    message = 0
    use = 0
    nth = 0
    cut_q = 0
    cut_k = 0
    place, end, tile = first_tile(C, mail, n.heads, t, n)
    while place < end:
        if tile.lo < tile.hi:
            # the rings have room for the first step while K and V of the last tile are in use
            cut_q = load_step(C, True, descs, rings, tile, 0, use, cut_q, n)
            head = resident_head(tile, n)
            cut_k = load_resident(C, descs, rings, tile, head, nth, cut_k)
            nth += 1
        steps = (tile.hi - tile.lo) * n.group
        # as many steps as there is room for, since looking up the next tile is slow
        some = gl.minimum(steps, C.DO_STAGES)
        if C.DRAWN:
            some = gl.maximum(some, steps_before_draw(steps, C.DRAWN_STEPS))
        for i in range(1, some):
            cut_q = load_step(C, False, descs, rings, tile, i, use + i, cut_q, n)
        following = tile
        if not C.ORDERED:
            place, following = next_tile(C, place, end, message + 1, mail, n.heads, t, n)
        for i in range(gl.maximum(some, 1), steps):
            cut_q = load_step(C, False, descs, rings, tile, i, use + i, cut_q, n)
        use += steps
        if C.ORDERED:  # late, because other blocks wait for every tile that a block has taken
            place, following = next_tile(C, place, end, message + 1, mail, n.heads, t, n)
        message += 1
        tile = following
