"""Who carries what: Q, dO, K and V into shared memory, dQ out of it.

One warp brings, one warp takes away, two warpgroups work in between. What they agree on, for a
block (arrivals that complete a phase; a use n of a ring of S takes buffer n % S in phase
(n // S) & 1, and both sides count uses):

    barrier       arrivals                              waited for by
    q_full[s]     producer's expect + bytes of Q, rows  consumers, before S of the use
    do_full[s]    producer's expect + bytes of dO       consumers, before dP of the use
    done[s]       each consumer, dS of the use is       consumers, before dQ of the use;
                  there, dK and dV and dQ of the last   producer, before it fills s again
                  are made
    k_full[s]     producer's expect + bytes of K        consumers, before a tile's first S
    v_full[s]     producer's expect + bytes of V        consumers, before a tile's first dP
    kv_empty[s]   each consumer, after a tile's last    producer, before K of a later tile
    b_full[t]     producer's expect + bytes of the bias  consumers, before P of the use
    dq_full[s]    the consumer that makes dQ of the use  writer, once a use
    dq_empty[s]   writer, its copy has been read        who fills s next, before that
    m_full[t]     producer, a tile is announced         consumers and writer, once a turn
    m_empty[t]    each consumer and the writer          producer, two turns later

Where dQ is made of dbias, afterwards, there is no writer, and no dq_full and dq_empty.

A tile that a sequence ends in has a barrier for its copy alone (``padding.py``), and *_full of the
buffer when it is cleared.

A use is a step: one tile of queries of one head of the group. A tile of keys that no query sees
has none: it takes a turn (m_full, m_empty) and touches no other barrier, on any side. All sides
read lo, hi and the size of the group from the same message, so they count the same uses.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
)
from ..lib.positional import post, row_at, told
from ..lib.ring import barriers, cleared, full_barriers, landing, phase, slot
from .schedule import draw, draw_next, neighbour_of, passing, plane_of, tile_of, turns_before


@gluon.jit
def all_barriers(C: gl.constexpr):
    q_full = full_barriers(C.Q_STAGES, C.VARLEN)
    b_full = q_full  # what nobody uses would lie where something else does
    if C.BIAS:
        b_full = barriers(C.DS_STAGES, 1)
    bars = (
        q_full,
        full_barriers(C.DO_STAGES, C.VARLEN),
        barriers(C.Q_STAGES, C.WARPGROUPS),
        full_barriers(C.KV_STAGES, C.PADDED),
        full_barriers(C.KV_STAGES, C.PADDED),
        barriers(C.KV_STAGES, C.WARPGROUPS),
        barriers(C.DQ_STAGES, 1) if C.DQ else q_full,
        barriers(C.DQ_STAGES, 1) if C.DQ else q_full,
        b_full,
    )
    fence_async_shared()
    return bars


@gluon.jit
def follow():
    """Wait until the launch before is done and what it wrote is there; what comes before this runs
    beside its end. The launch after may do the same."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_done(C: gl.constexpr, done, use):
    """Until the consumers are done with a use, one of the last Q_STAGES; there may not be it."""
    at = gl.maximum(use, 0)
    mbarrier.wait(done.index(slot(at, C.Q_STAGES)), phase(at, C.Q_STAGES), pred=use >= 0)


@gluon.jit
def load_step(C: gl.constexpr, descs, buffers, bars, where, m, g, use, nth):
    """Q, its rows' lse and delta, dO and the bias of one step. ``nth`` counts tiles that are cut
    short, before and after."""
    q, do, rows, k, v, bias = descs
    qs, dos, stats, ks, vs, dss = buffers
    q_full, do_full, done = bars[:3]
    b_full = bars[8]
    part, b, kv_head, first, q_row, nq, spread = where
    group, hq, each_b, each_h = spread
    head = kv_head * group + g
    plane, row = plane_of(C, b, head, q_row, hq)
    i = m * C.BLOCK_Q
    short = nq - i < C.BLOCK_Q
    s = slot(use, C.Q_STAGES)
    bar = landing(q_full, s, C.Q_STAGES, C.VARLEN, short)
    wait_done(C, done, use - C.Q_STAGES)
    mbarrier.expect(bar, q.block_type.nbytes + rows.block_type.nbytes)
    tma_load(q, [part, q_row + i, head, 0], bar, qs.index(s))
    tma_load(rows, [plane, 0, row + i], bar, stats.index(s))
    if C.VARLEN:  # before there need be room for dO
        cleared(q_full, s, C.Q_STAGES, qs.index(s), C.BLOCK_Q, C.D, nq - i, nth)
    u = slot(use, C.DO_STAGES)
    bar = landing(do_full, u, C.DO_STAGES, C.VARLEN, short)
    wait_done(C, done, use - C.DO_STAGES)
    mbarrier.expect(bar, do.block_type.nbytes)
    tma_load(do, [part, q_row + i, head, 0], bar, dos.index(u))
    if C.BIAS:  # its tile lies where dS of the step will be put
        s = slot(use, C.DS_STAGES)
        bar = b_full.index(s)
        wait_done(C, done, use - C.DS_STAGES + 1)  # with dQ of the one before it
        mbarrier.expect(bar, bias.block_type.nbytes)
        to = reinterpret(dss.index(s), dss.dtype, [1, 1, C.BLOCK_Q, C.BLOCK_K], bias.layout)
        tma_load(bias, [b * each_b, head * each_h, i, first], bar, to)
    if C.VARLEN:
        cleared(do_full, u, C.DO_STAGES, dos.index(u), C.BLOCK_Q, C.DV, nq - i, nth)
        nth += short.to(gl.int32)
    return nth


@gluon.jit
def load_keys(C: gl.constexpr, descs, buffers, bars, where, row, kept, rest, nth):
    """K and V of a tile of which ``rest`` keys are in use. ``nth`` as of ``load_step``."""
    q, do, rows, k, v, bias = descs
    qs, dos, stats, ks, vs, dss = buffers
    k_full, v_full, kv_empty = bars[3:6]
    part, b, kv_head, first, q_row, nq, spread = where
    short = rest < C.BLOCK_K
    s = slot(kept, C.KV_STAGES)
    mbarrier.wait(kv_empty.index(s), phase(kept, C.KV_STAGES) ^ 1)
    bar = landing(k_full, s, C.KV_STAGES, C.PADDED, short)
    mbarrier.expect(bar, k.block_type.nbytes)
    tma_load(k, [part, row, kv_head, 0], bar, ks.index(s))
    bar = landing(v_full, s, C.KV_STAGES, C.PADDED, short)
    mbarrier.expect(bar, v.block_type.nbytes)
    tma_load(v, [part, row, kv_head, 0], bar, vs.index(s))
    if C.PADDED:
        cleared(k_full, s, C.KV_STAGES, ks.index(s), C.BLOCK_K, C.D, rest, nth)
        cleared(v_full, s, C.KV_STAGES, vs.index(s), C.BLOCK_K, C.DV, rest, nth)
        nth += short.to(gl.int32)
    return nth


@gluon.jit
def told_of(C: gl.constexpr, n, end, turn, mail, order, sizes, seqs, lengths):
    """The place after n and its tile, which all are told of."""
    messages, m_full, m_empty = mail
    here = n
    n = draw_next(C, n, order)
    ahead = row_at(C, gl.where(n < end, n, here), order, sizes, seqs)
    tile = tile_of(C, ahead, sizes, seqs, lengths)
    post(C, tile, n < end, turn, messages, m_full, m_empty)
    return n, tile


@gluon.jit
def producer(C: gl.constexpr, descs, buffers, bars, mail, order, sizes, seqs, lengths, spread):
    """One warp: every copy into shared memory for every tile of this block."""
    messages, m_full, m_empty = mail
    group, hq, each_b, each_h = spread
    n, end = draw(C, order)
    turn = 0
    use = 0
    kept = 0
    cut_q = 0
    cut_k = 0
    here = gl.where(n < end, n, 0) if C.DRAWN else n
    tile = tile_of(C, row_at(C, here, order, sizes, seqs), sizes, seqs, lengths)
    post(C, tile, n < end, 0, messages, m_full, m_empty)
    while n < end:
        first, kv_head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        where = (0 if C.VARLEN else b, b, kv_head, first, q_row, nq, spread)
        if lo < hi:
            # the rings have room for the first step while K and V of the last tile are in use
            m, g = passing(C, 0, lo, hi, group)
            cut_q = load_step(C, descs, buffers, bars, where, m, g, use, cut_q)
            row = k_row + first
            cut_k = load_keys(C, descs, buffers, bars, where, row, kept, used - first, cut_k)
            kept += 1
        steps = hi - lo
        # as many steps as there is room for, since to look up the next tile takes a while
        some = gl.minimum(steps * group, C.DO_STAGES)
        for i in range(1, some):
            m, g = passing(C, i, lo, hi, group)
            cut_q = load_step(C, descs, buffers, bars, where, m, g, use + i, cut_q)
        if not C.ORDERED:
            n, tile = told_of(C, n, end, turn + 1, mail, order, sizes, seqs, lengths)
        for i in range(gl.maximum(some, 1), steps * group):
            m, g = passing(C, i, lo, hi, group)
            cut_q = load_step(C, descs, buffers, bars, where, m, g, use + i, cut_q)
        use += steps * group
        if C.ORDERED:  # not before its time: others are to follow what is drawn
            n, tile = told_of(C, n, end, turn + 1, mail, order, sizes, seqs, lengths)
        turn += 1


@gluon.jit
def looked_up(place):
    """How many steps are done, as ``told_others`` has put it: copies begun after this come after
    what those steps have added. (A fence of the proxies that does not say which memory it is
    about is one of all memory of the device, which takes as long as a copy.)"""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; "
        "fence.proxy.async.global;",
        "=r,l",
        [place],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def told_others(place, steps):
    """Tell that so many steps are done, when the copies of all of them are in memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p st.release.gpu.global.b32 [$1], $2; } mov.u32 $0, 0;",
        "=r,l,r",
        [place, steps],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def place_of(C: gl.constexpr, tile, turns, tiles, heads):
    """Where a tile of keys tells how many steps it has done; its neighbours' are beside it."""
    first, kv_head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    at = first // C.BLOCK_K
    if C.VARLEN:
        plane = kv_head
        at += k_row // C.BLOCK_K + b
    else:
        plane = b * heads + kv_head
    return turns + (plane * tiles + at)


@gluon.jit
def take_away(C: gl.constexpr, dq, dqs, bars, mail, turns, sizes, tiles, heads, group, hq):
    """One warp: dQ of every step added to memory.

    ORDERED: a tile of dQ takes what each tile of keys adds in the order of ``schedule.py``. Each
    tile of keys tells in ``turns`` how many steps it has done, and reads there how far the one
    that it follows has come: once for many steps where that one is well ahead. To be done is to
    be in memory, and to tell so takes about as long as half a step: it is done every few steps,
    and where this one has to wait itself.
    """
    messages, m_full, m_empty = mail
    dq_full, dq_empty = bars[6:8]
    turn = 0
    use = 0
    tile, live = told(C, 0, messages, m_full)
    mbarrier.arrive(m_empty.index(0), count=1)
    while live:
        first, kv_head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        steps = hi - lo
        end = steps * group
        seen = 0
        if C.ORDERED:
            place = place_of(C, tile, turns, tiles, heads)
            before = neighbour_of(C, tile, sizes)
        for i in range(end):
            m, g = passing(C, i, lo, hi, group)
            plane, row = plane_of(C, b, kv_head * group + g, q_row, hq)
            row = (row // C.BLOCK_Q + m) * (2 * C.D)  # of 32 numbers (layouts.by_threads)
            if C.ORDERED:
                ours = turns_before(C, g, m, before, group)
                if seen < ours:
                    seen = looked_up(place + C.NEIGHBOUR)
                    if seen < ours:
                        told_others(place, i)
                        while seen < ours:
                            seen = looked_up(place + C.NEIGHBOUR)
            s = slot(use, C.DQ_STAGES)
            mbarrier.wait(dq_full.index(s), phase(use, C.DQ_STAGES))
            if C.FRESH:
                if ours == 0:
                    tma_store(dq, [plane, row, 0], dqs.index(s))
                else:
                    tma_add(dq, [plane, row, 0], dqs.index(s))
            else:
                tma_add(dq, [plane, row, 0], dqs.index(s))
            tma_store_wait(0)
            mbarrier.arrive(dq_empty.index(s), count=1)
            if C.ORDERED:
                due = (i + 1) % C.EVERY == 0
                if due:
                    told_others(place, i + 1)
            use += 1
        if C.ORDERED:
            told_others(place, end)
        turn += 1
        tile, live = told(C, turn, messages, m_full)
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)
