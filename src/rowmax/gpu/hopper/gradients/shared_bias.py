"""dbias of a bias that sequences or heads share: a tile of it stays, and all of them pass by.

``dbias_ij = sum P_ij (dP_ij - Delta_i)`` over what shares it, added up in registers in one order:
S and dP are made once more, which is two products for the five of the other launch, and no float32
sum is ever in memory. (To add to one there, from the launch that makes all gradients, was slower.)

A block holds 128 queries by 128 keys of the bias (64 of wide heads), 64 queries a warpgroup. For
each sequence and head that shares it Q and K come in one ring of buffers, V and dO in another:

    barrier      arrivals                               waited for by
    a_full[s]    producer's expect + bytes of Q, K,     consumers, before S of the use
                 lse and delta
    a_empty[s]   each consumer, S is made, lse and      producer, before it fills s again
                 delta are read
    b_full[s]    producer's expect + bytes of V and dO  consumers, before dP of the use
    b_empty[s]   each consumer, dP is made              producer, before it fills s again
    full[t]      producer's expect + bytes of the bias  consumers, once a tile
    empty[t]     each consumer, dbias has left          producer, before it fills t again

dbias goes out by the very buffer that the bias came in.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from ..lib.ring import barriers, phase, slot
from ..lib.ring import tile_buffers as blocks_of
from .consumer import issue_dp, issue_scores
from .layouts import by_row_layout, by_rows, score_layout
from .pipeline import follow
from .schedule import full_range, query_tile_of
from .terms import weights


@gluon.jit
def place_of(C: gl.constexpr, i, sizes):
    """(first query, plane, tile of keys) of the i-th tile."""
    nq, nk, left, right, spans = sizes
    across = (nk + C.BLOCK_Q - 1) // C.BLOCK_Q
    down = (nq + C.BLOCK_K - 1) // C.BLOCK_K
    return i // across % down * C.BLOCK_K, i // across // down, i % across


@gluon.jit
def tiles(C: gl.constexpr, sizes, shared):
    """How many there are."""
    planes = shared[2]
    nq, nk, left, right, spans = sizes
    across = (nk + C.BLOCK_Q - 1) // C.BLOCK_Q
    return (nq + C.BLOCK_K - 1) // C.BLOCK_K * across * planes


@gluon.jit
def tile_of(C: gl.constexpr, first, plane, run, sizes, shared, lengths):
    """The tile as those of a run see it, with the tiles of keys that they see."""
    row = (first, 0, plane // shared[0] + run)
    return query_tile_of(C, row, sizes, (None, None, 0, None), lengths)


@gluon.jit
def sharer(plane, run, s, shared):
    """(sequence, head) that is the s-th of a run to share a plane."""
    heads, each, planes, runs, over = shared
    return plane // heads + run + s // each, plane % heads + s % each


@gluon.jit
def own_bias(C: gl.constexpr, c: gl.constexpr, biases, turn):
    """The warpgroup's half of the tile of a turn."""
    return biases.index(C.WARPGROUPS * slot(turn, C.KV_STAGES) + c)


@gluon.jit
def of_rows(C: gl.constexpr, c: gl.constexpr, stats, a):
    """lse and delta of the warpgroup's queries, from buffer a."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    both = reinterpret(stats.index(a), stats.dtype, [2, C.BLOCK_K], flat)
    lse = both.index(0).slice(c * C.TOKENS, C.TOKENS).load(by_row_layout())
    delta = both.index(1).slice(c * C.TOKENS, C.TOKENS).load(by_row_layout())
    return by_rows(lse, C), by_rows(delta, C)


@gluon.jit
def is_seen(t, tile):
    """Whether the queries of the tile see keys of the t-th."""
    return (t >= tile[8]) & (t < tile[9])


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, s, t, head, use, turn, x, buffers,
    bars, tile, sizes, terms, over, scale,
):  # fmt: skip
    """x, the sum, with one more that shares the bias."""
    qs, ks, stats, vs, dos, biases = buffers
    a_full, a_empty, b_full, b_empty = bars[:4]
    a = slot(use, C.Q_STAGES)
    S = issue_scores(C, c, 0, qs, a, ks, use)
    at = slot(use, C.DO_STAGES)
    _, dp = issue_dp(C, c, 0, dos, at, vs, b_full, use)
    lse, delta = of_rows(C, c, stats, a)
    S = warpgroup_mma_wait(1, deps=[S])
    mbarrier.arrive(a_empty.index(a), count=1)
    # use >> 30 is a zero that the compiler cannot see: it has no registers to keep the tile in
    own = own_bias(C, c, biases, turn + (use >> 30)).load(score_layout(C))
    p, _ = weights(C, MASKED, c, S, lse[:, None], own, t, head, tile, sizes, terms, scale, qs.dtype)
    after = use + 1
    # begins a basic block, so that the exponentials stay beside the product
    mbarrier.wait(
        a_full.index(slot(after, C.Q_STAGES)), phase(after, C.Q_STAGES), pred=s + 1 < over
    )
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(b_empty.index(at), count=1)
    ds = p * (dp - delta[:, None])
    if MASKED and C.PREFIX:  # past a length values may be anything
        ds = gl.where(p == 0.0, 0.0, ds)
    return after, x + ds


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, dbias, buffers, bars, sizes, terms, shared, rest):
    """Warpgroup c: queries ``64 c`` to ``64 c + 63`` of every tile of this block."""
    a_full, a_empty, b_full, b_empty, full, empty = bars
    heads, each, planes, runs, over = shared
    lengths, scale = rest
    biases = buffers[5]
    use = 0
    turn = 0
    end = tiles(C, sizes, shared)
    i = gl.program_id(0)
    while i < end:
        top, plane, t = place_of(C, i, sizes)
        first = top + c * C.TOKENS
        at = slot(turn, C.KV_STAGES)
        mbarrier.wait(full.index(at), phase(turn, C.KV_STAGES))
        x = gl.full([C.TOKENS, C.BLOCK_Q], 0.0, gl.float32, score_layout(C))
        for run in range(runs):
            tile = tile_of(C, top, plane, run, sizes, shared, lengths)
            seen = is_seen(t, tile)
            mbarrier.wait(a_full.index(slot(use, C.Q_STAGES)), phase(use, C.Q_STAGES), pred=seen)
            y, z = full_range(C, first, tile, sizes)
            whole = (t >= y) & (t < z)
            if C.MASKS:
                for s in range(gl.where(seen & (whole == 0), over, 0)):
                    b, head = sharer(plane, run, s, shared)
                    use, x = step(
                        C, True, c, s, t, head, use, turn, x, buffers, bars, tile, sizes, terms,
                        over, scale,
                    )  # fmt: skip
            for s in range(gl.where(seen & whole, over, 0)):
                b, head = sharer(plane, run, s, shared)
                use, x = step(
                    C, False, c, s, t, head, use, turn, x, buffers, bars, tile, sizes, terms, over,
                    scale,
                )  # fmt: skip
        own = own_bias(C, c, biases, turn)
        own.store(x.to(dbias.dtype))
        fence_async_shared()
        to = [plane // heads, plane % heads, first, t * C.BLOCK_Q]
        tma_store(dbias, to, reinterpret(own, dbias.dtype, dbias.block_type.shape, dbias.layout))
        tma_store_wait(0)
        mbarrier.arrive(empty.index(at), count=1)
        turn += 1
        i += gl.num_programs(0)


@gluon.jit
def consumer0(C: gl.constexpr, dbias, buffers, bars, sizes, terms, shared, rest):
    consumer(C, 0, dbias, buffers, bars, sizes, terms, shared, rest)


@gluon.jit
def consumer1(C: gl.constexpr, dbias, buffers, bars, sizes, terms, shared, rest):
    consumer(C, 1, dbias, buffers, bars, sizes, terms, shared, rest)


@gluon.jit
def producer(C: gl.constexpr, descs, buffers, bars, sizes, shared, lengths, spread):
    """One warp: every copy into shared memory for every tile of this block."""
    q, do, k, v, rows, bias = descs
    qs, ks, stats, vs, dos, biases = buffers
    ratio, hq = spread
    a_full, a_empty, b_full, b_empty, full, empty = bars
    heads, each, planes, runs, over = shared
    use = 0
    turn = 0
    end = tiles(C, sizes, shared)
    i = gl.program_id(0)
    while i < end:
        first, plane, t = place_of(C, i, sizes)
        at = slot(turn, C.KV_STAGES)
        mbarrier.wait(empty.index(at), phase(turn, C.KV_STAGES) ^ 1)
        mbarrier.expect(full.index(at), C.WARPGROUPS * bias.block_type.nbytes)
        for c in gl.static_range(C.WARPGROUPS):
            to = own_bias(C, c, biases, turn)
            to = reinterpret(to, q.dtype, bias.block_type.shape, bias.layout)
            here = [plane // heads, plane % heads, first + c * C.TOKENS, t * C.BLOCK_Q]
            tma_load(bias, here, full.index(at), to)
        turn += 1
        for run in range(runs):
            tile = tile_of(C, first, plane, run, sizes, shared, lengths)
            for s in range(gl.where(is_seen(t, tile), over, 0)):
                b, head = sharer(plane, run, s, shared)
                a = slot(use, C.Q_STAGES)
                bar = a_full.index(a)
                mbarrier.wait(a_empty.index(a), phase(use, C.Q_STAGES) ^ 1)
                both: gl.constexpr = q.block_type.nbytes + k.block_type.nbytes
                mbarrier.expect(bar, both + rows.block_type.nbytes)
                tma_load(rows, [b * hq + head, 0, first], bar, stats.index(a))
                tma_load(q, [b, first, head, 0], bar, qs.index(a))
                tma_load(k, [b, t * C.BLOCK_Q, head // ratio, 0], bar, ks.index(a))
                u = slot(use, C.DO_STAGES)
                bar = b_full.index(u)
                mbarrier.wait(b_empty.index(u), phase(use, C.DO_STAGES) ^ 1)
                mbarrier.expect(bar, v.block_type.nbytes + do.block_type.nbytes)
                tma_load(v, [b, t * C.BLOCK_Q, head // ratio, 0], bar, vs.index(u))
                tma_load(do, [b, first, head, 0], bar, dos.index(u))
                use += 1
        i += gl.num_programs(0)


@gluon.jit
def shared_bias(
    q, do, k, v, rows, bias, dbias, t, n, C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr
):
    """As of ``backward``; n.each_b and n.each_h say whether each sequence and head has its own."""
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.TOKENS, C.BLOCK_Q], q.dtype)
    buffers = (
        blocks_of(q, C.Q_STAGES),
        blocks_of(k, C.Q_STAGES),
        blocks_of(rows, C.Q_STAGES),
        blocks_of(v, C.DO_STAGES),
        blocks_of(do, C.DO_STAGES),
        gl.allocate_shared_memory(q.dtype, [C.KV_STAGES * C.WARPGROUPS, C.TOKENS, C.BLOCK_Q], DS),
    )
    bars = (
        barriers(C.Q_STAGES, 1),
        barriers(C.Q_STAGES, C.WARPGROUPS),
        barriers(C.DO_STAGES, 1),
        barriers(C.DO_STAGES, C.WARPGROUPS),
        barriers(C.KV_STAGES, 1),
        barriers(C.KV_STAGES, C.WARPGROUPS),
    )
    fence_async_shared()
    heads = n.each_h * (n.hq - 1) + 1
    batch = n.each_b * (n.batch - 1) + 1
    each = n.hq // heads
    many = n.batch // batch
    # heads of the bias, heads that share one, planes of it; runs of those that share one: all in
    # one, but of each sequence its own where those may see other keys; how many a run has
    if C.PREFIX or C.DOCUMENTS:
        shared = (heads, each, heads * batch, many, each)
    else:
        shared = (heads, each, heads * batch, 1, each * many)
    sizes = (n.nq, n.nk, n.left, n.right, t.spans)
    terms = (n.inner, t.alibi, t.q_ids, t.k_ids, n.ids_q, n.ids_k)
    descs = (q, do, k, v, rows, bias)
    follow()
    gl.warp_specialize(
        [
            (consumer0, (C, dbias, buffers, bars, sizes, terms, shared, (t.lengths, n.scale))),
            (consumer1, (C, dbias, buffers, bars, sizes, terms, shared, (t.lengths, n.scale))),
            (producer, (C, descs, buffers, bars, sizes, shared, t.lengths, (n.ratio, n.hq))),
        ],
        [4, 1],
        [R0, R1],
    )
