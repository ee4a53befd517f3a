"""The producer's side: queries, keys and values by TMA into shared memory, tile after tile.

Every buffer has two barriers, ``full`` (the copy has landed) and ``empty`` (every warpgroup
that reads it has let go). Use n of a ring of S buffers takes buffer ``n % S`` in phase
``(n // S) & 1``; both sides count uses alone, and nothing else is agreed between them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import fence_async_shared, mbarrier, tma_load
from .schedule import first_place, next_place, row_at, tile_of


@gluon.jit
def slot(n, STAGES: gl.constexpr):
    """The buffer that use n of a ring takes."""
    if STAGES == 1:
        s = 0
    elif STAGES & (STAGES - 1):
        s = n % STAGES
    else:
        s = n & (STAGES - 1)
    return s


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    """The phase that use n of a ring takes its buffer in."""
    return (n // STAGES) & 1 if STAGES & (STAGES - 1) else (n >> (STAGES // 2)) & 1


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers, each of which completes a phase after ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def pipeline(C: gl.constexpr):
    """The barriers: of Q (one pair a warpgroup and buffer), of K and of V."""
    bars = (
        barriers(C.WARPGROUPS * C.Q_STAGES, 1),
        barriers(C.WARPGROUPS * C.Q_STAGES, 1),
        barriers(C.STAGES, 1),
        barriers(C.STAGES, C.WARPGROUPS),
        barriers(C.STAGES, 1),
        barriers(C.STAGES, C.WARPGROUPS),
    )
    fence_async_shared()
    return bars


@gluon.jit
def load_rows(desc0, desc1, b, row, head, W0: gl.constexpr, W1: gl.constexpr, bar, to0, to1):
    """BLOCK_K rows of keys or values, in one part or two (a head size of 96 is 64 + 32)."""
    if W1:
        mbarrier.expect(bar, desc0.block_type.nbytes + desc1.block_type.nbytes)
        tma_load(desc0, [b, row, head, 0], bar, to0)
        tma_load(desc1, [b, row, head, W0], bar, to1)
    else:
        mbarrier.expect(bar, desc0.block_type.nbytes)
        tma_load(desc0, [b, row, head, 0], bar, to0)


@gluon.jit
def load_queries(C: gl.constexpr, descs, b, row, head, bar, to0, to1):
    """64 rows of queries: TOKENS positions of each of the GROUP heads that share the tile."""
    q0, q1 = descs
    if C.D1:
        mbarrier.expect(bar, q0.block_type.nbytes + q1.block_type.nbytes)
        tma_load(q0, [b, row, head, 0, 0], bar, to0)
        tma_load(q1, [b, row, head, 0, C.D0], bar, to1)
    else:
        mbarrier.expect(bar, q0.block_type.nbytes)
        tma_load(q0, [b, row, head, 0, 0], bar, to0)


@gluon.jit
def load_bias(C: gl.constexpr, bias, biases, bar, b, head, token, column, spread):
    """A tile of the bias, a part for each warpgroup. ``spread`` is 0 where it is one for all."""
    each_b, each_h = spread
    mbarrier.expect(bar, bias.block_type.nbytes * C.WARPGROUPS)
    for c in gl.static_range(C.WARPGROUPS):
        tma_load(bias, [b * each_b, head * each_h, token + 64 * c, column], bar, biases.index(c))


@gluon.jit
def post(C: gl.constexpr, tile, live, turn, messages, m_full, m_empty):
    """Tell the consumers of a tile, or that there are no more."""
    L: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 16, L)
    words = gl.full([16], 0, gl.int32, L) + live.to(gl.int32)
    for i in gl.static_range(10):
        words = gl.where(at == i + 1, tile[i], words)
    s = slot(turn, 2)
    mbarrier.wait(m_empty.index(s), phase(turn, 2) ^ 1)
    messages.index(s).store(words)
    mbarrier.arrive(m_full.index(s), count=1)


@gluon.jit
def word(words, at, i: gl.constexpr):
    return gl.sum(gl.where(at == i, words, 0), 0)


@gluon.jit
def told(C: gl.constexpr, turn, messages, m_full):
    """(tile, whether it is one) as posted for a turn, whose slot is then to be let go."""
    L: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    s = slot(turn, 2)
    mbarrier.wait(m_full.index(s), phase(turn, 2))
    words = messages.index(s).load(L)
    at = gl.arange(0, 16, L)
    tile = (
        word(words, at, 1), word(words, at, 2), word(words, at, 3), word(words, at, 4),
        word(words, at, 5), word(words, at, 6), word(words, at, 7), word(words, at, 8),
        word(words, at, 9), word(words, at, 10),
    )  # fmt: skip
    return tile, word(words, at, 0) != 0


@gluon.jit
def load_keys(C: gl.constexpr, descs, buffers, bars, shared, where, j, use, spread):
    """Key tile j, keys and values and bias, as use ``use`` of the rings."""
    q0, q1, k0, k1, v0, v1, bias = descs
    qs0, qs1, ks0, ks1, vs0, vs1 = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    biases, b_full, b_empty = shared
    part, k_row, kv_head, b, head, token = where
    row = k_row + j * C.BLOCK_K
    s = slot(use, C.STAGES)
    at = phase(use, C.STAGES) ^ 1
    bar = k_full.index(s)
    mbarrier.wait(k_empty.index(s), at)
    load_rows(k0, k1, part, row, kv_head, C.D0, C.D1, bar, ks0.index(s), ks1.index(s))
    if C.BIAS == "copied":
        mbarrier.wait(b_empty.index(0), phase(use, 1) ^ 1)
        load_bias(C, bias, biases, b_full.index(0), b, head, token, j * C.BLOCK_K, spread)
    bar = v_full.index(s)
    mbarrier.wait(v_empty.index(s), at)
    load_rows(v0, v1, part, row, kv_head, C.DV0, C.DV1, bar, vs0.index(s), vs1.index(s))


@gluon.jit
def touch(rows, width: gl.constexpr):
    """Bring rows of ``width`` elements (a pointer a lane) as near as the L2 cache."""
    for line in gl.static_range((width * 2 + 127) // 128):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [rows + line * 64],
            gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def touch_keys(C: gl.constexpr, tile, ratio, source):
    """The first keys and values of a tile whose turn is next, from memory into the L2 cache: a
    load of them will then be there in time, for which the rings alone are too short."""
    k, k_b, k_n, k_h, v, v_b, v_n, v_h = source
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    part = b * 0 if C.VARLEN else b
    kv_head = head // ratio
    k = k + part.to(gl.int64) * k_b + kv_head.to(gl.int64) * k_h
    v = v + part.to(gl.int64) * v_b + kv_head.to(gl.int64) * v_h
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, L)
    first = gl.maximum(hi - C.TOUCHED, lo) * C.BLOCK_K
    for row in range(first, gl.minimum(hi * C.BLOCK_K, nk), 32):
        at = (k_row + gl.minimum(row + lane, nk - 1)).to(gl.int64)
        touch(k + at * k_n, C.D_IN)
        touch(v + at * v_n, C.DV_OUT)


@gluon.jit
def producer(C: gl.constexpr, descs, buffers, bars, shared, mail, order, sizes, seqs, more):
    """One warp: every copy of every tile of this block."""
    q0, q1 = descs[:2]
    qs0, qs1 = buffers[:2]
    q_full, q_empty = bars[:2]
    messages, m_full, m_empty = mail
    lengths, each_b, each_h, ratio, source = more
    spread = (each_b, each_h)
    n, end = first_place(C, order)
    turn = 0
    use = 0
    # where the host has set the order down every block has a tile
    here = gl.where(n < end, n, 0) if C.DRAWN else n
    tile = tile_of(C, row_at(C, here, order, sizes, seqs), sizes, seqs, lengths)
    post(C, tile, n < end, 0, messages, m_full, m_empty)
    while n < end:
        token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
        part = 0 if C.VARLEN else b
        at = phase(turn, C.Q_STAGES) ^ 1
        for c in gl.static_range(C.WARPGROUPS):
            i = c * C.Q_STAGES + slot(turn, C.Q_STAGES)
            mbarrier.wait(q_empty.index(i), at)
            row = q_row + token + c * C.TOKENS
            load_queries(C, (q0, q1), part, row, head, q_full.index(i), qs0.index(i), qs1.index(i))
        where = (part, k_row, head // ratio, b, head, token)
        load_keys(C, descs, buffers, bars, shared, where, hi - 1, use, spread)
        # the next tile is looked up and told of long before anyone needs it
        here = n
        n = next_place(C, n, order)
        ahead = row_at(C, gl.where(n < end, n, here), order, sizes, seqs)
        tile = tile_of(C, ahead, sizes, seqs, lengths)
        post(C, tile, n < end, turn + 1, messages, m_full, m_empty)
        if C.TOUCHED and (tile[1] // ratio != head // ratio) | (tile[2] != b):
            touch_keys(C, tile, ratio, source)
        use += 1
        for i in range(lo + 1, hi):
            load_keys(C, descs, buffers, bars, shared, where, hi - 1 - i + lo, use, spread)
            use += 1
        turn += 1
