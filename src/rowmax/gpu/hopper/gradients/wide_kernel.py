"""The kernel of wide heads: two consumers, and one warp that brings what stays and what passes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import fence_async_shared, mbarrier, reinterpret, tma_load
from ..lib.positional import post, row_at
from ..lib.ring import (
    barriers,
    clear_rows,
    cleared,
    full_barriers,
    landing,
    phase,
    slot,
)
from ..lib.ring import tile_buffers as blocks_of
from .pair import handing_over, keys, values
from .pipeline import follow
from .schedule import draw, draw_next, plane_of, query_tile_of, tile_of
from .wide import queries


@gluon.jit
def load_step(C: gl.constexpr, descs, buffers, bars, where, t, g, first_use, use, nth):
    """What passes by in one step: as uses of two rings, since the first may have carried more.
    ``nth`` counts tiles that are cut short, before and after."""
    a0, a1, b0, b1, rows, bias = descs
    bs0, bs1, stats, ws = buffers[2:]
    b0_full, b0_empty, b1_full, b1_empty = bars[2:]
    part, b, head, q_row, k_row, n, first, spread = where
    group, ratio, hq, each_b, each_h = spread
    i = t * C.BLOCK_Q
    rest = n - i
    short = rest < C.BLOCK_Q
    s = slot(first_use, C.Q_STAGES)
    bar = landing(b0_full, s, C.Q_STAGES, C.PASSES_SHORT, short)
    mbarrier.wait(b0_empty.index(s), phase(first_use, C.Q_STAGES) ^ 1)
    if C.KIND == "dq":
        row = k_row + i
        of = head // ratio
        mbarrier.expect(bar, b0.block_type.nbytes)
    else:
        row = q_row + i
        of = head * group + g
        plane, at = plane_of(C, b, of, q_row, hq)
        mbarrier.expect(bar, b0.block_type.nbytes + rows.block_type.nbytes)
        tma_load(rows, [plane, 0, at + i], bar, stats.index(s))
    tma_load(b0, [part, row, of, 0], bar, bs0.index(s))
    if C.PASSES_SHORT:  # before there need be room for the other
        cleared(b0_full, s, C.Q_STAGES, bs0.index(s), C.BLOCK_Q, C.D, rest, nth)
    u = slot(use, C.DO_STAGES)
    bar = landing(b1_full, u, C.DO_STAGES, C.PASSES_SHORT, short)
    mbarrier.wait(b1_empty.index(u), phase(use, C.DO_STAGES) ^ 1)
    if C.KIND == "pair" and C.BIAS:
        mbarrier.expect(bar, b1.block_type.nbytes + bias.block_type.nbytes)
        halves = reinterpret(ws.index(u), b1.dtype, [2] + bias.block_type.shape, bias.layout)
        tma_load(bias, [b * each_b, of * each_h, i, first], bar, halves.index(0))
    else:
        mbarrier.expect(bar, b1.block_type.nbytes)
    tma_load(b1, [part, row, of, 0], bar, bs1.index(u))
    if C.PASSES_SHORT:
        cleared(b1_full, u, C.DO_STAGES, bs1.index(u), C.BLOCK_Q, C.DV, rest, nth)
        nth += short.to(gl.int32)
    return nth


@gluon.jit
def load_rows(C: gl.constexpr, descs, buffers, bars, part, row, head, kept, rest, nth):
    """What stays for a tile. Rows past the ``rest`` are cleared where they are stored as well."""
    a0, a1 = descs[:2]
    as0, as1 = buffers[:2]
    a_full, a_empty = bars[:2]
    short = rest < C.BLOCK_K
    bar = landing(a_full, 0, 1, C.STAYS_SHORT, short)
    mbarrier.wait(a_empty.index(0), phase(kept, 1) ^ 1)
    mbarrier.expect(bar, a0.block_type.nbytes + a1.block_type.nbytes)
    tma_load(a1, [part, row, head, 0], bar, as1.index(0))
    tma_load(a0, [part, row, head, 0], bar, as0.index(0))
    if C.STAYS_SHORT:
        if short:
            mbarrier.wait(a_full.index(1), nth & 1)
            clear_rows(as0.index(0), C.BLOCK_K, C.D, rest)
            clear_rows(as1.index(0), C.BLOCK_K, C.DV, rest)
            fence_async_shared()
            mbarrier.arrive(a_full.index(0), count=1)
        nth += short.to(gl.int32)
    return nth


@gluon.jit
def load_halves(C: gl.constexpr, descs, buffers, bars, part, row, head, use, kept, rest, nth):
    """The same of K and V where half of each comes by a buffer of Q (``pair.held_columns``)."""
    k, v = descs[:2]
    ks, vs, bs0 = buffers[:3]
    a_full, a_empty, b0_full, b0_empty = bars[:4]
    s = slot(use, C.Q_STAGES)
    each: gl.constexpr = k.block_type.nbytes + v.block_type.nbytes
    left = reinterpret(bs0.index(s), bs0.dtype, [2] + k.block_type.shape, k.layout)
    mbarrier.wait(b0_empty.index(s), phase(use, C.Q_STAGES) ^ 1)
    short = rest < C.BLOCK_K
    if C.STAYS_SHORT:
        if short:
            bar = a_full.index(1)
            mbarrier.wait(a_empty.index(0), phase(kept, 1) ^ 1)
            mbarrier.expect(bar, 2 * each)
            load_both(k, v, part, row, head, 0, 0, bar, left.index(0), left.index(1))
            load_both(k, v, part, row, head, C.D // 2, C.DV // 2, bar, ks.index(0), vs.index(0))
            mbarrier.wait(bar, nth & 1)
            for half in gl.static_range(2):
                clear_rows(left.index(half), C.BLOCK_K, C.D // 2, rest)
            clear_rows(ks.index(0), C.BLOCK_K, C.D // 2, rest)
            clear_rows(vs.index(0), C.BLOCK_K, C.DV // 2, rest)
            fence_async_shared()
            mbarrier.arrive(b0_full.index(s), count=1)
            mbarrier.arrive(a_full.index(0), count=1)
        nth += short.to(gl.int32)
    if not (C.STAYS_SHORT and short):
        bar = b0_full.index(s)
        mbarrier.expect(bar, each)
        load_both(k, v, part, row, head, 0, 0, bar, left.index(0), left.index(1))
        bar = a_full.index(0)
        mbarrier.wait(a_empty.index(0), phase(kept, 1) ^ 1)
        mbarrier.expect(bar, each)
        load_both(k, v, part, row, head, C.D // 2, C.DV // 2, bar, ks.index(0), vs.index(0))
    return nth


@gluon.jit
def load_both(k, v, part, row, head, column_k, column_v, bar, to_k, to_v):
    tma_load(k, [part, row, head, column_k], bar, to_k)
    tma_load(v, [part, row, head, column_v], bar, to_v)


@gluon.jit
def tile_at(C: gl.constexpr, n, order, sizes, seqs, lengths):
    row = row_at(C, n, order, sizes, seqs)
    if C.KIND == "dq":
        tile = query_tile_of(C, row, sizes, seqs, lengths)
    else:
        tile = tile_of(C, row, sizes, seqs, lengths)
    return tile


@gluon.jit
def producer(C: gl.constexpr, descs, buffers, bars, mail, order, sizes, seqs, lengths, spread):
    """One warp: every copy into shared memory for every tile of this block."""
    messages, m_full, m_empty = mail
    group = spread[0]
    n, end = draw(C, order)
    turn = 0
    use = 0
    kept = 0
    cut = 0
    cut_rows = 0
    here = gl.where(n < end, n, 0) if C.DRAWN else n
    tile = tile_at(C, here, order, sizes, seqs, lengths)
    post(C, tile, n < end, 0, messages, m_full, m_empty)
    while n < end:
        first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        part = 0 if C.VARLEN else b
        n_passing = used if C.KIND == "dq" else nq
        where = (part, b, head, q_row, k_row, n_passing, first, spread)
        if lo < hi:
            row = (q_row if C.KIND == "dq" else k_row) + first
            rest = used - first
            if C.ALONE:
                cut_rows = load_halves(
                    C, descs, buffers, bars, part, row, head, use + kept, kept, rest, cut_rows
                )
            else:
                cut_rows = load_rows(C, descs, buffers, bars, part, row, head, kept, rest, cut_rows)
            kept += 1
            first_use = use + kept if C.ALONE else use
            cut = load_step(C, descs, buffers, bars, where, lo, 0, first_use, use, cut)
        here = n
        n = draw_next(C, n, order)
        tile = tile_at(C, gl.where(n < end, n, here), order, sizes, seqs, lengths)
        post(C, tile, n < end, turn + 1, messages, m_full, m_empty)
        steps = hi - lo
        for i in range(1, steps * group):
            g = i // steps
            t = lo + i - g * steps
            first_use = use + kept if C.ALONE else use
            cut = load_step(C, descs, buffers, bars, where, t, g, first_use + i, use + i, cut)
        use += steps * group
        turn += 1


@gluon.jit
def consumer0(C: gl.constexpr, out, rows, planes, bias, buffers, bars, mail, sizes, terms, rest):
    queries(C, 0, out, rows, planes, bias, buffers, bars, mail, sizes, terms, rest)


@gluon.jit
def consumer1(C: gl.constexpr, out, rows, planes, bias, buffers, bars, mail, sizes, terms, rest):
    queries(C, 1, out, rows, planes, bias, buffers, bars, mail, sizes, terms, rest)


@gluon.jit
def wide(
    a0, a1, b0, b1, row_tiles, bias, t, n, C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr
):
    """What copies what stays, what passes by, lse and delta, and a bias; the rest as of
    ``backward``."""
    as0 = blocks_of(a0, 1)
    as1 = blocks_of(a1, 1)
    bs0 = blocks_of(b0, C.Q_STAGES)
    bs1 = blocks_of(b1, C.DO_STAGES)
    stats = bs0
    if C.KIND == "pair":
        stats = blocks_of(row_tiles, C.Q_STAGES)
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = (messages, barriers(2, 1), barriers(2, C.WARPGROUPS))
    bars = (
        full_barriers(1, C.STAYS_SHORT),
        barriers(1, C.WARPGROUPS),
        full_barriers(C.Q_STAGES, C.PASSES_SHORT),
        barriers(C.Q_STAGES, C.WARPGROUPS),
        full_barriers(C.DO_STAGES, C.PASSES_SHORT),
        barriers(C.DO_STAGES, C.WARPGROUPS),
    )
    over = handing_over(C)
    fence_async_shared()
    buffers = (as0, as1, bs0, bs1, stats)
    descs = (a0, a1, b0, b1, row_tiles, bias)
    sizes = (n.nq, n.nk, n.left, n.right, t.spans)
    if C.KIND == "dq":
        seqs = (t.cu_q, t.cu_k, n.batch, t.lengths)
        order = (t.table, t.ends, t.counter, n.heads, n.heads // n.ratio, n.keys)
    else:
        seqs = (t.cu_k, t.cu_q, n.batch, t.lengths)
        order = (t.table, t.ends, t.counter, n.heads, n.heads, n.keys)
    length = n.nq if C.COLUMN else n.nk
    row = (t.bias, n.each_b, n.each_h, n.each_h * (n.hq - 1) + 1, length)
    terms = (n.inner, t.alibi, t.q_ids, t.k_ids, n.ids_q, n.ids_k, row)
    planes = (n.hq, n.rows)
    spread = (n.group, n.ratio, n.hq, n.each_b, n.each_h)
    filled = (as0, as1, bs0, bs1, stats, over[0])
    follow()
    if C.KIND == "pair":
        rest = (n.scale, n.out_scale, n.group, n.heads, t.dbias)
        gl.warp_specialize(
            [
                (values, (C, t.dv, buffers, bars, over, mail, sizes, terms, rest)),
                (keys, (C, t.out, buffers, bars, over, mail, sizes, terms, rest)),
                (producer, (C, descs, filled, bars, mail, order, sizes, seqs, t.lengths, spread)),
            ],
            [4, 1],
            [R0, R1],
        )
    else:
        rest = (n.scale, n.out_scale, n.group, n.heads)
        at = (t.bias, n.bias_b, n.bias_h, n.bias_q, t.dbias)
        gl.warp_specialize(
            [
                (
                    consumer0,
                    (C, t.out, t.rows, planes, at, buffers, bars, mail, sizes, terms, rest),
                ),
                (
                    consumer1,
                    (C, t.out, t.rows, planes, at, buffers, bars, mail, sizes, terms, rest),
                ),
                (producer, (C, descs, filled, bars, mail, order, sizes, seqs, t.lengths, spread)),
            ],
            [4, 1],
            [R0, R1],
        )
