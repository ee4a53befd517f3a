"""The writer of the fused backward: one warp, which adds dQ of every step to memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_complete import begin_head, end_tile
from .backward_lib import publish, read_done
from .backward_order import neighbour_range, plane_of, step_of, steps_before
from .gluon_compat import tma_add, tma_store, tma_store_wait
from .lib.assembly import STORE
from .lib.ring import release, slot, take_message, wait_full


@gluon.jit
def done_place(C: gl.constexpr, tile, tiles, t, n):
    """Return a pointer to a tile's count of done steps, one of the ``tiles`` of a plane."""
    at = tile.first // C.BLOCK_RESIDENT
    if C.VARLEN:
        plane = tile.head
        at += tile.k_row // C.BLOCK_RESIDENT + tile.b
    else:
        plane = tile.b * n.heads + tile.head
    return t.done + (plane * tiles + at)


@gluon.jit
def wait_for_neighbour(C: gl.constexpr, place, seen, ours, i):
    """Wait until the neighbour has done ``ours`` steps or more; return their number.

    Before a wait, publish that i steps of this tile are done, for the tile that follows it.
    """
    if seen < ours:
        seen = read_done(place + C.NEIGHBOUR)
        if seen < ours:
            publish(place, i, STORE)
            while seen < ours:
                seen = read_done(place + C.NEIGHBOUR)
    return seen


@gluon.jit
def add_parts(C: gl.constexpr, desc, plane, row, buffers, s):
    """Add both parts of dQ in buffer s to memory, one behind the other."""
    tma_add(desc.low, [plane, row, 0], buffers.low.index(s))
    if C.D1:
        tma_add(desc.high, [plane, row + 2 * C.D0, 0], buffers.high.index(s))


@gluon.jit
def add_dq(C: gl.constexpr, desc, ring, mail, tiles, t, n):
    """Add dQ of every step to memory, in one warp.

    ORDERED: the tiles of keys add to a tile of dQ in the order of ``backward_order.py``. Each
    publishes its number of done steps, and reads that of the tile that it follows: once for many
    steps where that tile is well ahead. A step is done once its sum is in memory. Publishing takes
    half as long as a step: it happens every few steps, and before a wait.
    """
    message = 0
    use = 0
    tile, live = take_message(mail, 0)
    while live:
        end = (tile.hi - tile.lo) * n.group
        seen = 0
        if C.ORDERED:
            place = done_place(C, tile, tiles, t, n)
            lo, hi = neighbour_range(C, tile, t, n)
        if C.COMPLETE:
            of_head, writes = begin_head(C, tile, t, n)
        for i in range(end):
            m, g = step_of(C, i, tile, n.group)
            head = tile.head * n.group + g
            plane, row = plane_of(C, tile.b, head, tile.q_row, n.hq)
            row = (row // C.ROW_TILE + m) * (2 * C.D)  # in units of 32 numbers (thread_order)
            if C.ORDERED:
                ours = steps_before(C, g, m, lo, hi, n.group)
                seen = wait_for_neighbour(C, place, seen, ours, i)
            s = slot(use, C.DQ_STAGES)
            wait_full(ring, use, C.DQ_STAGES)
            if C.FRESH or C.COMPLETE:
                if C.ORDERED:
                    writes = ours == 0
                if writes:
                    tma_store(desc.low, [plane, row, 0], ring.buffers.low.index(s))
                    if C.D1:
                        tma_store(desc.high, [plane, row + 2 * C.D0, 0], ring.buffers.high.index(s))
                else:
                    add_parts(C, desc, plane, row, ring.buffers, s)
            else:
                add_parts(C, desc, plane, row, ring.buffers, s)
            tma_store_wait(0)
            release(ring, use, C.DQ_STAGES)
            if C.ORDERED:
                due = (i + 1) % C.EVERY == 0
                if due:
                    publish(place, i + 1, STORE)
            use += 1
        if C.ORDERED:
            publish(place, end, STORE)
        if C.COMPLETE:
            end_tile(of_head, writes, tile, n)
        message += 1
        tile, live = take_message(mail, message)


@gluon.jit
def writer(C: gl.constexpr, desc, ring, mail, tiles, t, n):
    """Add dQ to memory, if this kernel makes it."""
    if C.DQ:
        add_dq(C, desc, ring, mail, tiles, t, n)
