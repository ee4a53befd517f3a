"""The producer of the forward kernels: one warp, which copies queries, keys, values and the bias.

MENDS: it copies only for tiles with a row that overflowed (``forward_kernel.py``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_lib import Source, other_strip, sequence_of, tile_of
from .forward_results import place_of_lse
from .gluon_compat import mbarrier, tma_load
from .lib import ring
from .lib.arrivals import await_keys
from .lib.clocks import mark
from .lib.order import Order, first_place, next_place, row_ahead, row_at
from .lib.parts import cleared_parts, load_parts

# --- tiles to mend -----------------------------------------------------------------------------


@gluon.jit
def overflowed(C: gl.constexpr, COUNT: gl.constexpr, place, end, order, t, n):
    """Return True if a row of COUNT tiles, a stride apart from ``place`` on, has NaN as its lse."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    places = place + gl.arange(0, COUNT, gl.SliceLayout(1, L)) * gl.num_programs(0)
    there = places < end
    tile = row_at(C, gl.where(there, places, place), order)
    q_row, nq = 0 * tile.first, n.nq + 0 * tile.first
    if C.VARLEN:
        q_row, nq = tile.row, tile.length
    nq = gl.where(there, nq, 0)[:, None]
    r = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    found = gl.full([COUNT, 64], 0, gl.int32, L)
    for c in gl.static_range(C.WARPGROUPS):
        row = (tile.first + c * C.TOKENS)[:, None]
        at, row = place_of_lse(C, row, tile.head[:, None], tile.b[:, None], q_row[:, None], r, n)
        lse = gl.load(t.lse + at, mask=row < nq, other=0.0)
        found = found | (lse != lse).to(gl.int32)
    return gl.max(gl.max(found, 1), 0) != 0


@gluon.jit
def any_overflowed(C: gl.constexpr, order, t, n):
    """Return True if a row of this block's tiles has NaN as its lse: many tiles at a time."""
    COUNT: gl.constexpr = 16
    place, end = first_place(C, order)
    found = place < 0
    while place < end:
        found = found | overflowed(C, COUNT, place, end, order, t, n)
        place += COUNT * gl.num_programs(0)
    return found


@gluon.jit
def next_overflowed(C: gl.constexpr, place, end, order, t, n):
    """Return the first place of this block from ``place`` on whose tile has such a row."""
    going = place < end
    while going:
        clean = overflowed(C, 1, place, end, order, t, n) == 0
        place += gl.where(clean, gl.num_programs(0), 0)
        going = clean & (place < end)
    return place


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_queries(C: gl.constexpr, copies, shared, tile, number, n):
    """Copy 64 rows of queries to each warpgroup: TOKENS positions of each of the GROUP heads."""
    for c in gl.static_range(C.ROW_GROUPS):
        i = c * C.Q_STAGES + ring.slot(number, C.Q_STAGES)
        ring.wait_empty(shared.q, number, C.Q_STAGES, c)
        b = 0 if C.VARLEN else sequence_of(tile.b, n)
        corner = (b, tile.q_row + tile.first + c * C.TOKENS, tile.head, 0)
        load_parts(copies.q, corner, C.D0, C.D1, shared.q.full.index(i), shared.q.buffers, i)


@gluon.jit
def load_keys(
    C: gl.constexpr, side: gl.constexpr, copies, shared, source, tile, j, use, seen, t, n
):  # fmt: skip
    """Copy keys of tile j, and the bias of all sides, as use ``use`` of their rings.

    Return the copies to memory that are seen to be done; ``seen`` were so before.
    """
    s = ring.slot(use, C.K_STAGES)
    seen = await_keys(t, source.head, source.row + j * C.BLOCK_K, seen)
    ring.wait_empty(shared.k, use, C.K_STAGES)
    corner = (source.b, source.row + j * C.BLOCK_K, source.head)
    load_parts(copies.k, corner, C.D0, C.D1, shared.k.full.index(s), shared.k.buffers, s)
    if C.BIAS == "copied" and not C.STRIP and side == 0:
        for c in gl.static_range(C.WARPGROUPS):
            ring.wait_empty(shared.bias, use, C.B_STAGES, c)
            i = c * C.B_STAGES + ring.slot(use, C.B_STAGES)
            copy_bias(C, c, copies, shared.bias, tile, j, i, n)
    return seen


@gluon.jit
def copy_bias(C: gl.constexpr, c: gl.constexpr, copies, biases, tile, j, i, n):
    """Copy the bias of a warpgroup's queries and key tile j into buffer i."""
    bar = biases.full.index(i)
    mbarrier.expect(bar, copies.bias.block_type.nbytes)
    corner = [tile.b * n.each_b, tile.head * n.each_h, tile.first + 64 * c, j * C.BLOCK_K]
    tma_load(copies.bias, corner, bar, biases.buffers.index(i))


@gluon.jit
def load_strip(C: gl.constexpr, copies, biases, tile, strip, n):
    """Copy the bias of a tile's queries and all keys, as strip ``strip``; the last keys first."""
    for c in gl.static_range(C.WARPGROUPS):
        ring.wait_empty(biases, strip, 1, c)
    for i in range(C.STRIP):
        j = C.STRIP - 1 - i
        for c in gl.static_range(C.WARPGROUPS):
            copy_bias(C, c, copies, biases, tile, j, c * C.STRIP + j, n)


@gluon.jit
def load_values(C: gl.constexpr, copies, shared, source, j, use, cut):
    """Copy values of tile j, as use ``use`` of their ring.

    Return the number of short tiles so far; ``cut`` were before this one.
    """
    v = shared.v
    s = ring.slot(use, C.V_STAGES)
    rows = gl.maximum(source.nk - j * C.BLOCK_K, 0)
    short = rows < C.BLOCK_K
    bar = ring.landing(v.full, s, C.V_STAGES, C.PADDED, short)
    ring.wait_empty(v, use, C.V_STAGES)
    corner = (source.b, source.row + j * C.BLOCK_K, source.head)
    load_parts(copies.v, corner, C.DV0, C.DV1, bar, v.buffers, s)
    if C.PADDED:
        cleared_parts(v.full, s, C.V_STAGES, v.buffers, C.BLOCK_K, C.DV0, C.DV1, rows, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def producer(C: gl.constexpr, side: gl.constexpr, copies, shared, t, n, some):
    """Copy every tile of a side of this block, in the order in which buffers become free.

    Keys are free a softmax and a product earlier than the values of the key tile before. MENDS:
    only tiles to mend, and none unless there are ``some``.
    """
    order = Order(t.table, t.ends, t.counter, n.heads, n.kv_heads, n.keys)
    place, end = first_place(C, order, side)
    if C.MENDS:
        end = gl.where(some, end, 0)
        place = next_overflowed(C, place, end, order, t, n)
    number = 0  # number of the tile and of its message
    use = 0
    # in an order that the host made every block has a tile
    here = gl.where(place < end, place, 0) if C.SOUGHT else place
    tile = tile_of(C, row_at(C, here, order), t, n)
    if not C.SOUGHT:  # the next tile is loaded early, because a load from memory is slow
        coming = row_ahead(C, place, end, order)
    ring.post_message(shared.mail, 0, tile, place < end)
    cut = 0
    strip = 0
    fresh = True  # the tile begins a strip of the bias
    seen = 0  # copies to the memory of keys that are done
    behind = Source(0, 0, 0, 0)  # the tile before; its values of key tile ``last`` come next
    last = 0
    while place < end:
        b = tile.b * 0 if C.VARLEN else sequence_of(tile.b, n)
        source = Source(b, tile.k_row, tile.head // n.ratio, tile.used)
        lo = tile.lo
        hi = tile.hi
        seen = load_keys(C, side, copies, shared, source, tile, hi - 1, use, seen, t, n)
        if number:
            cut = load_values(C, copies, shared, behind, last, use - 1, cut)
        load_queries(C, copies, shared, tile, number, n)
        if C.STRIP and side == 0:  # noqa: SIM102  (the first is a constant)
            if fresh:
                load_strip(C, copies, shared.bias, tile, strip, n)
                strip += 1
        # the message of the next tile is posted early
        this = tile
        here = place
        place = next_place(C, place, order)
        if C.MENDS:
            place = next_overflowed(C, place, end, order, t, n)
        if C.SOUGHT:
            tile = tile_of(C, row_at(C, gl.where(place < end, place, here), order), t, n)
        else:
            tile = tile_of(C, coming, t, n)
        if C.STRIP and side == 0:
            fresh = other_strip(this, tile, n)
        ring.post_message(shared.mail, number + 1, tile, place < end)
        if not C.SOUGHT:
            coming = row_ahead(C, place, end, order)
        behind = source
        last = lo
        use += 1
        for i in range(lo + 1, hi):
            j = hi - 1 - i + lo
            mark(C, t.clocks, C.WARPGROUPS, use, 0)
            seen = load_keys(C, side, copies, shared, source, this, j, use, seen, t, n)
            mark(C, t.clocks, C.WARPGROUPS, use, 1)
            cut = load_values(C, copies, shared, behind, j + 1, use - 1, cut)
            mark(C, t.clocks, C.WARPGROUPS, use, 2)
            use += 1
        number += 1
    if number:
        load_values(C, copies, shared, behind, last, use - 1, cut)
