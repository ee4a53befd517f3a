"""A consumer's side: 64 keys, their scores with tile after tile of queries, dK, dV, every other dQ.

Scores are held with keys down and queries across, ``S^T = K Q^T`` and ``dP^T = V dO^T``, so that
P^T and dS^T are left operands of dV and dK as they lie in registers. dQ alone needs what the
other warpgroup has: dS goes through shared memory, and the warpgroups take turns at making dQ of a
step from the whole of it. (Half of dQ each reads dS twice, and products of fewer columns read more
for what they do: shared memory, and the power that it takes, are what a step is short of.)

dQ of a step is made in the next one: what it needs of the other warpgroup was stored a while ago,
so that neither waits for the other and one's products run beside the other's exponentials.

One step, tensor core above, threads below:

    dP          | dV, then dK | dQ of the last, every other step | S of the next
    P = exp2(S) | dS, stored  | dQ out

At the end of a step nothing is in flight: the assembler would make products wait for one another
that are. The scores that a last step makes for a next one are not used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..lib.layouts import matrix, output_layout, weight_layout
from ..lib.layouts import product_layout as value_layout
from ..lib.positional import told
from ..lib.ring import phase, slot
from ..lib.softmax import by_lane, rounded
from .layouts import by_columns, by_threads, held_layout, row_layout, score_layout, store_rows
from .schedule import counted, full_tiles
from .terms import weights


@gluon.jit
def block(buffers, s, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Buffer s as ``[ROWS, WIDTH]``."""
    return reinterpret(
        buffers.index(s), buffers.dtype, [ROWS, WIDTH], matrix(ROWS, WIDTH, buffers.dtype)
    )


@gluon.jit
def own(buffers, at, c: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr):
    """This warpgroup's rows of K or V in buffer ``at``. To that a zero is added that the compiler
    cannot see: what it knows to be the same in every step it keeps in registers that are not
    there."""
    return block(buffers, at, C.BLOCK_K, WIDTH).slice(c * C.TOKENS, C.TOKENS, dim=0)


@gluon.jit
def held(C: gl.constexpr, buffers, at, c: gl.constexpr, WIDTH: gl.constexpr):
    """This warpgroup's rows of K or V as left operands in registers, where those have room: half
    of what S and dP ask of shared memory."""
    x = 0
    if C.HELD:
        x = own(buffers, at, c, C, WIDTH).load(held_layout(C))
    return x


@gluon.jit
def of_keys(dss, use, c: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of the tile of dS of a use, keys down. In memory queries are down,
    as they are in a bias: matrices of 8 by 8 are turned on their way to and from registers."""
    return dss.index(slot(use, C.DS_STAGES)).permute((1, 0)).slice(c * C.TOKENS, C.TOKENS, dim=0)


@gluon.jit
def issue_scores(C: gl.constexpr, c: gl.constexpr, k, ks, at, qs, use):
    """S^T = K Q^T, on its way."""
    z = gl.full([C.TOKENS, C.BLOCK_Q], 0.0, gl.float32, score_layout(C))
    q = block(qs, slot(use, C.Q_STAGES), C.BLOCK_Q, C.D)
    if not C.HELD:
        k = own(ks, at + (use >> 30), c, C, C.D)
    return warpgroup_mma(k, q.permute((1, 0)), z, use_acc=False, is_async=True)


@gluon.jit
def issue_dp(C: gl.constexpr, c: gl.constexpr, v, vs, at, dos, do_full, use):
    """(dO of a use, dP^T = V dO^T, on its way)."""
    s = slot(use, C.DO_STAGES)
    mbarrier.wait(do_full.index(s), phase(use, C.DO_STAGES))
    do = block(dos, s, C.BLOCK_Q, C.DV)
    if not C.HELD:
        v = own(vs, at + (use >> 30), c, C, C.DV)
    z = gl.full([C.TOKENS, C.BLOCK_Q], 0.0, gl.float32, score_layout(C))
    return do, warpgroup_mma(v, do.permute((1, 0)), z, use_acc=False, is_async=True)


@gluon.jit
def issue_dq(C: gl.constexpr, dss, ks, at, use):
    """dQ = dS K of a use, on its way."""
    z = gl.full([C.BLOCK_Q, C.D], 0.0, gl.float32, value_layout(C.D))
    k = block(ks, at + (use >> 30), C.BLOCK_K, C.D)
    ds = dss.index(slot(use, C.DS_STAGES))
    return warpgroup_mma(ds, k, z, use_acc=False, is_async=True)


@gluon.jit
def make_dq(C: gl.constexpr, dss, ks, at, dqs, dq_full, dq_empty, use):
    """dQ of a use, to the one that takes it away. Waits for all products on their way."""
    dq = warpgroup_mma_wait(0, deps=[issue_dq(C, dss, ks, at, use)])
    s = slot(use, C.DQ_STAGES)
    mbarrier.wait(dq_empty.index(s), phase(use, C.DQ_STAGES) ^ 1)
    block(dqs, s, 2 * C.D, 32).store(by_threads(dq, C.D))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(s), count=1)


@gluon.jit
def row_numbers(C: gl.constexpr, stats, s, i: gl.constexpr):
    """lse (i = 0) or delta (1) of a step's queries, one a column of S^T."""
    both = reinterpret(
        stats.index(s), stats.dtype, [2, C.BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return by_columns(both.index(i).load(row_layout(C)), C)


@gluon.jit
def store_dbias(C: gl.constexpr, c: gl.constexpr, dbias, dss, use, m, head, tile):
    """This warpgroup's half of dS of a use to where it belongs in dbias, when the last one has left
    its buffer."""
    tma_store_wait(0)
    half = dss.index(slot(use, C.DS_STAGES)).slice(c * C.TOKENS, C.TOKENS, dim=1)
    tma_store(dbias, [tile[2], head, m * C.BLOCK_Q, tile[0] + c * C.TOKENS], half)


@gluon.jit
def in_lanes(x):
    """Sums of rows of x as far as a thread has them: ``[64, 4]``."""
    return gl.sum(gl.sum(by_lane(x), 3), 1)


@gluon.jit
def store_row(x, to, rows):
    """The first ``rows`` of the sums of rows that threads have parts of."""
    x = gl.sum(x, 1)
    r = gl.arange(0, x.shape[0], x.type.layout)
    gl.store(to + r, x, mask=r < rows)


@gluon.jit
def step(
    C: gl.constexpr,
    MASKED: gl.constexpr,
    c: gl.constexpr,
    m,
    head,
    use,
    span,
    left,
    state,
    buffers,
    bars,
    tile,
    sizes,
    terms,
    dbias,
    scale,
):
    """One tile of queries. ``span`` are the first use and the end of the uses of this tile of
    keys, ``left`` are K and V where they are held.

    AHEAD, where there are registers for it: S of the next step is made before dQ.
    """
    S, dk, dv, drow = state
    qs, dos, stats, ks, vs, dss, dqs = buffers
    q_full, do_full, done, k_full, v_full, kv_empty, dq_full, dq_empty, b_full = bars
    dtype: gl.constexpr = qs.dtype
    begin, end = span
    before = gl.maximum(use - 1, 0)
    after = use + 1
    was = use > begin

    k, v, at = left
    do, dp = issue_dp(C, c, v, vs, at, dos, do_full, use)
    lse = row_numbers(C, stats, slot(use, C.Q_STAGES), 0)[None, :]
    bias = 0
    if C.BIAS:
        s = slot(use, C.DS_STAGES)
        mbarrier.wait(b_full.index(s), phase(use, C.DS_STAGES))
        bias = of_keys(dss, use, c, C).load(score_layout(C))
    p, w = weights(C, MASKED, c, S, lse, bias, m, head, tile, sizes, terms, scale, dtype)
    P = rounded(p, dtype)
    # A wait begins a new basic block: without one here ptxas sinks the exponentials below the
    # wait for the products that they are to run beside.
    mbarrier.wait(q_full.index(slot(after, C.Q_STAGES)), phase(after, C.Q_STAGES), pred=after < end)
    dp = warpgroup_mma_wait(0, deps=[dp])

    dv = warpgroup_mma(gl.convert_layout(P, weight_layout(C.DV)), do, dv, is_async=True)
    if C.DQ:
        mbarrier.wait(done.index(slot(before, C.Q_STAGES)), phase(before, C.Q_STAGES), pred=was)
    delta = row_numbers(C, stats, slot(use, C.Q_STAGES), 1)
    dp = dp - delta[None, :]
    ds = rounded(w * dp, dtype)
    if C.DROW:
        drow = drow + in_lanes(p * dp)
    of_keys(dss, use, c, C).store(ds)
    fence_async_shared()
    if C.DBIAS:
        store_dbias(C, c, dbias, dss, use, m, head, tile)
    q = block(qs, slot(use, C.Q_STAGES), C.BLOCK_Q, C.D)
    dk = warpgroup_mma(gl.convert_layout(ds, weight_layout(C.D)), q, dk, is_async=True)
    if C.AHEAD:
        S = issue_scores(C, c, k, ks, at, qs, after)
    if C.DQ:
        if not C.AHEAD:  # the registers of P are dQ's
            dv = warpgroup_mma_wait(1, deps=[dv])
        if was & ((before & 1) == c):
            make_dq(C, dss, ks, at, dqs, dq_full, dq_empty, before)
    if not C.AHEAD:
        S = issue_scores(C, c, k, ks, at, qs, after)
    dv, dk = warpgroup_mma_wait(1, deps=[dv, dk])
    mbarrier.arrive(done.index(slot(use, C.Q_STAGES)), count=1)
    return after, (warpgroup_mma_wait(0, deps=[S]), dk, dv, drow)


@gluon.jit
def consumer(
    C: gl.constexpr, c: gl.constexpr, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest
):
    """Warpgroup c: keys ``64 c`` to ``64 c + 63`` of every tile of this block."""
    messages, m_full, m_empty = mail
    qs, dos, stats, ks, vs, dss, dqs = buffers
    q_full, do_full, done, k_full, v_full, kv_empty, dq_full, dq_empty, b_full = bars
    scale, out_scale, group, hk, sums = rest
    turn = 0
    use = 0
    kept = 0
    tile, live = told(C, 0, messages, m_full)
    mbarrier.arrive(m_empty.index(0), count=1)
    while live:
        first, kv_head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        a, z = full_tiles(C, first + c * C.TOKENS, tile, sizes)
        some = lo < hi
        span = (use, use + (hi - lo) * group)
        at = slot(kept, C.KV_STAGES)
        mbarrier.wait(k_full.index(at), phase(kept, C.KV_STAGES), pred=some)
        s = slot(use, C.Q_STAGES)
        mbarrier.wait(q_full.index(s), phase(use, C.Q_STAGES), pred=some)
        k = held(C, ks, at, c, C.D)
        S = warpgroup_mma_wait(0, deps=[issue_scores(C, c, k, ks, at, qs, use)])
        mbarrier.wait(v_full.index(at), phase(kept, C.KV_STAGES), pred=some)
        left = (k, held(C, vs, at, c, C.DV), at)
        dk_sum = gl.full([C.TOKENS, C.D], 0.0, gl.float32, value_layout(C.D))
        dv_sum = gl.full([C.TOKENS, C.DV], 0.0, gl.float32, value_layout(C.DV))
        drow = 0
        if C.DROW:
            drow = in_lanes(gl.full([C.TOKENS, C.BLOCK_Q], 0.0, gl.float32, score_layout(C)))
        state = (S, dk_sum, dv_sum, drow)
        rounds, abreast = group, 1
        if C.ABREAST:
            rounds, abreast = 1, group
        for g in range(rounds):
            head = kv_head * group + g
            if C.UP:
                for i in range(lo, a):
                    use, state = step(
                        C, True, c, i, head, use, span, left, state, buffers, bars,
                        tile,
                        sizes, terms, dbias, scale,
                    )  # fmt: skip
            if C.LEFT:
                for i in range(z, hi):
                    use, state = step(
                        C, True, c, hi - 1 - i + z, head, use, span, left, state, buffers, bars,
                        tile,
                        sizes, terms, dbias, scale,
                    )  # fmt: skip
            if not C.DOCUMENTS:
                for n in range(a * abreast, z * abreast):
                    i, head = counted(C, n, g, group)
                    head += kv_head * group
                    m = z - 1 - i + a
                    if C.UP:
                        m = i
                    use, state = step(
                        C, False, c, m, head, use, span, left, state, buffers, bars,
                        tile,
                        sizes, terms, dbias, scale,
                    )  # fmt: skip
            if C.MASKS and not C.UP:
                for n in range(lo * abreast, a * abreast):
                    i, head = counted(C, n, g, group)
                    head += kv_head * group
                    use, state = step(
                        C, True, c, a - 1 - i + lo, head, use, span, left, state, buffers, bars,
                        tile,
                        sizes, terms, dbias, scale,
                    )  # fmt: skip
        S, dk_sum, dv_sum, drow = state
        if C.DQ:
            begin, end = span
            last = gl.maximum(end - 1, 0)
            mbarrier.wait(done.index(slot(last, C.Q_STAGES)), phase(last, C.Q_STAGES), pred=some)
            if some & ((last & 1) == c):
                make_dq(C, dss, ks, at, dqs, dq_full, dq_empty, last)
        mbarrier.arrive(kv_empty.index(at), count=1, pred=some)
        kept += some.to(gl.int32)
        turn += 1
        after, live = told(C, turn, messages, m_full)
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)
        # rows of all sequences, dense or packed, lie one after the other
        row = k_row + first + c * C.TOKENS
        if not C.VARLEN:
            row = row + b * (nq + offset)
        there = nq + offset - first - c * C.TOKENS
        place = row.to(gl.int64) * hk + kv_head
        store(C, dk_sum * out_scale, dk + place * C.D_OUT, hk * C.D_OUT, there, C.D, C.D_OUT)
        if C.DROW:
            to = sums + (b * hk + kv_head).to(gl.int64) * sizes[1] + first + c * C.TOKENS
            store_row(drow, to, there)
        store(C, dv_sum, dv + place * C.DV_OUT, hk * C.DV_OUT, there, C.DV, C.DV_OUT)
        tile = after
    if C.DBIAS:
        tma_store_wait(0)


@gluon.jit
def store(C: gl.constexpr, x, to, stride, rows, WIDTH: gl.constexpr, OUT: gl.constexpr):
    """The first ``rows`` of 64 rows x, in stores of 16 bytes where shared memory has room to turn
    them."""
    if not C.BIAS:
        x = gl.convert_layout(x.to(to.dtype.element_ty), output_layout(WIDTH))
    store_rows(x, to, stride, rows, OUT)
