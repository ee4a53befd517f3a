"""The producer's side: queries, keys and values by TMA into shared memory, tile after tile.

Every buffer has two barriers, ``full`` (the copy has landed) and ``empty`` (every warpgroup
that reads it has let go). Use n of a ring of S buffers takes buffer ``n % S`` in phase
``(n // S) & 1``; both sides count uses alone, and nothing else is agreed between them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import fence_async_shared, mbarrier, tma_load
from .padding import barriers, clear_rows, full_barriers, landing
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
def pipeline(C: gl.constexpr):
    """The barriers: of Q (one pair a warpgroup and buffer), of K and of V."""
    bars = (
        barriers(C.WARPGROUPS * C.Q_STAGES, 1),
        barriers(C.WARPGROUPS * C.Q_STAGES, 1),
        barriers(C.K_STAGES, 1),
        barriers(C.K_STAGES, C.WARPGROUPS),
        full_barriers(C.V_STAGES, C.PADDED),
        barriers(C.V_STAGES, C.WARPGROUPS),
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
    """Keys of tile j, and its bias, as use ``use`` of their rings."""
    k0, k1, bias = descs[2], descs[3], descs[6]
    ks0, ks1 = buffers[2:4]
    k_full, k_empty = bars[2:4]
    biases, b_full, b_empty = shared
    part, k_row, kv_head, b, head, token = where
    s = slot(use, C.K_STAGES)
    bar = k_full.index(s)
    mbarrier.wait(k_empty.index(s), phase(use, C.K_STAGES) ^ 1)
    row = k_row + j * C.BLOCK_K
    load_rows(k0, k1, part, row, kv_head, C.D0, C.D1, bar, ks0.index(s), ks1.index(s))
    if C.BIAS == "copied":
        at = phase(use, C.B_STAGES) ^ 1
        for c in gl.static_range(C.WARPGROUPS):
            i = c * C.B_STAGES + slot(use, C.B_STAGES)
            mbarrier.wait(b_empty.index(i), at)
            corner = [b * spread[0], head * spread[1], token + 64 * c, j * C.BLOCK_K]
            mbarrier.expect(b_full.index(i), bias.block_type.nbytes)
            tma_load(bias, corner, b_full.index(i), biases.index(i))


@gluon.jit
def load_values(C: gl.constexpr, descs, buffers, bars, where, j, use, cut):
    """Values of tile j, as use ``use`` of their ring; how many tiles were ``cut`` short by then."""
    v0, v1 = descs[4:6]
    vs0, vs1 = buffers[4:6]
    v_full, v_empty = bars[4:6]
    part, k_row, kv_head, nk = where
    s = slot(use, C.V_STAGES)
    rows = gl.maximum(nk - j * C.BLOCK_K, 0)
    short = rows < C.BLOCK_K
    bar = landing(v_full, s, C.V_STAGES, C.PADDED, short)
    mbarrier.wait(v_empty.index(s), phase(use, C.V_STAGES) ^ 1)
    row = k_row + j * C.BLOCK_K
    load_rows(v0, v1, part, row, kv_head, C.DV0, C.DV1, bar, vs0.index(s), vs1.index(s))
    if C.PADDED:
        if short:
            mbarrier.wait(v_full.index(C.V_STAGES), cut & 1)
            clear_rows(vs0.index(s), C.BLOCK_K, C.DV0, rows)
            if C.DV1:
                clear_rows(vs1.index(s), C.BLOCK_K, C.DV1, rows)
            fence_async_shared()
            mbarrier.arrive(v_full.index(s), count=1)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def producer(C: gl.constexpr, descs, buffers, bars, shared, mail, order, sizes, seqs, more):
    """One warp: every copy of every tile of this block, in the order in which room is made:
    keys are done with a softmax and a product before the values of the key tile before."""
    q0, q1 = descs[:2]
    qs0, qs1 = buffers[:2]
    q_full, q_empty = bars[:2]
    messages, m_full, m_empty = mail
    lengths, each_b, each_h, ratio = more
    spread = (each_b, each_h)
    n, end = first_place(C, order)
    turn = 0
    use = 0
    # where the host has set the order down every block has a tile
    here = gl.where(n < end, n, 0) if C.DRAWN else n
    tile = tile_of(C, row_at(C, here, order, sizes, seqs), sizes, seqs, lengths)
    # of the tile after this: known long before it is needed, for memory is far
    coming = (tile[0], tile[1], tile[2])
    if not C.DRAWN:
        coming = row_at(C, after(C, n, end), order, sizes, seqs)
    post(C, tile, n < end, 0, messages, m_full, m_empty)
    cut = 0
    behind = (0, 0, 0, 0)  # the values that are still to come of the tile before, and where
    last = 0
    while n < end:
        token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
        part = b * 0 if C.VARLEN else b
        where = (part, k_row, head // ratio, b, head, token)
        load_keys(C, descs, buffers, bars, shared, where, hi - 1, use, spread)
        if turn:
            cut = load_values(C, descs, buffers, bars, behind, last, use - 1, cut)
        at = phase(turn, C.Q_STAGES) ^ 1
        for c in gl.static_range(C.WARPGROUPS):
            i = c * C.Q_STAGES + slot(turn, C.Q_STAGES)
            mbarrier.wait(q_empty.index(i), at)
            row = q_row + token + c * C.TOKENS
            load_queries(C, (q0, q1), part, row, head, q_full.index(i), qs0.index(i), qs1.index(i))
        # the next tile is told of long before anyone needs it
        here = n
        n = next_place(C, n, order)
        if C.DRAWN:
            coming = row_at(C, gl.where(n < end, n, here), order, sizes, seqs)
        tile = tile_of(C, coming, sizes, seqs, lengths)
        post(C, tile, n < end, turn + 1, messages, m_full, m_empty)
        if not C.DRAWN:
            coming = row_at(C, after(C, n, end), order, sizes, seqs)
        behind = (part, k_row, head // ratio, nk)
        last = lo
        use += 1
        for i in range(lo + 1, hi):
            j = hi - 1 - i + lo
            load_keys(C, descs, buffers, bars, shared, where, j, use, spread)
            cut = load_values(C, descs, buffers, bars, behind, j + 1, use - 1, cut)
            use += 1
        turn += 1
    if turn:
        load_values(C, descs, buffers, bars, behind, last, use - 1, cut)


@gluon.jit
def after(C: gl.constexpr, n, end):
    """The place after n where blocks take them in strides; past the end, any that is one."""
    following = n + gl.num_programs(0)
    return gl.where(following < end, following, gl.program_id(0))
