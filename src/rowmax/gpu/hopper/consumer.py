"""A consumer's side: 64 query rows, their scores, softmax and output, tile after tile.

Within a warpgroup the product of one tile's weights and values runs under the softmax of the
next. The chain does not break where a query tile ends: its last product runs under the first
softmax of the query tile that follows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .layouts import matrix, output_layout, score_layout, value_layout, weight_layout
from .pipeline import phase, slot, told
from .schedule import full_tiles
from .softmax import LN2, LOG2E, LOWEST, LOWEST_NATURAL, along_row, by_lane, rounded, softmax_step
from .terms import masked, partial, settled, with_terms


@gluon.jit
def issue_scores(C: gl.constexpr, q0, q1, ks0, ks1, s):
    """S = Q K^T, on its way."""
    SL: gl.constexpr = score_layout(C)
    z = gl.full([64, C.BLOCK_K], 0.0, gl.float32, SL)
    k0 = reinterpret(ks0.index(s), ks0.dtype, [C.BLOCK_K, C.D0], matrix(C.BLOCK_K, C.D0, ks0.dtype))
    S = warpgroup_mma(q0, k0.permute((1, 0)), z, use_acc=False, is_async=True)
    if C.D1:
        k1 = reinterpret(
            ks1.index(s), ks1.dtype, [C.BLOCK_K, C.D1], matrix(C.BLOCK_K, C.D1, ks1.dtype)
        )
        S = warpgroup_mma(q1, k1.permute((1, 0)), S, is_async=True)
    return S


@gluon.jit
def issue_output(C: gl.constexpr, p, o0, o1, vs0, vs1, s, use_acc):
    """O += P V, on its way."""
    v0 = reinterpret(
        vs0.index(s), vs0.dtype, [C.BLOCK_K, C.DV0], matrix(C.BLOCK_K, C.DV0, vs0.dtype)
    )
    P0 = gl.convert_layout(p, weight_layout(C.DV0))
    o0 = warpgroup_mma(P0, v0, o0, use_acc=use_acc, is_async=True)
    if C.DV1:
        v1 = reinterpret(
            vs1.index(s), vs1.dtype, [C.BLOCK_K, C.DV1], matrix(C.BLOCK_K, C.DV1, vs1.dtype)
        )
        P1 = gl.convert_layout(p, weight_layout(C.DV1))
        o1 = warpgroup_mma(P1, v1, o1, use_acc=use_acc, is_async=True)
    return o0, o1


@gluon.jit
def wait_output(C: gl.constexpr, o0, o1):
    if C.DV1:
        o0, o1 = warpgroup_mma_wait(0, deps=[o0, o1])
    else:
        o0 = warpgroup_mma_wait(0, deps=[o0])
    return o0, o1


@gluon.jit
def scale_rows(o, r):
    """o ``[64, D]`` times r ``[64, 4]``, row by row."""
    o4 = by_lane(o)
    r4 = gl.convert_layout(r, gl.SliceLayout(1, gl.SliceLayout(3, o4.type.layout)))
    return gl.convert_layout((o4 * along_row(r4)).reshape(o.shape), o.type.layout)


@gluon.jit
def weights(C: gl.constexpr, LATE: gl.constexpr, S, m, l, scale, dtype: gl.constexpr):
    """(P, rounded for the product unless LATE, m, l, alpha)."""
    p, m, l, alpha = softmax_step(S, m, l, LOG2E if C.ADDED else scale, C.NATURAL)
    if not LATE:
        p = rounded(p, dtype)
    return p.reshape([64, C.BLOCK_K]), m, l, alpha


@gluon.jit
def bias_tile(C: gl.constexpr, c: gl.constexpr, use, live, shared):
    """The tile of a copied bias, taken while the product that it is added to runs."""
    biases, b_full, b_empty = shared
    copied = 0
    if C.BIAS == "copied":
        i = c * C.B_STAGES + slot(use, C.B_STAGES)
        mbarrier.wait(b_full.index(i), phase(use, C.B_STAGES), pred=live)
        mine = reinterpret(
            biases.index(i), biases.dtype, [64, C.BLOCK_K], matrix(64, C.BLOCK_K, biases.dtype)
        )
        copied = mine.load(score_layout(C))
        if C.B_STAGES == 1:  # the next is waited for
            copied = settled(copied)
            mbarrier.arrive(b_empty.index(i), count=1, pred=live)
    return copied


@gluon.jit
def bias_done(C: gl.constexpr, c: gl.constexpr, use, live, shared):
    """Let go of it after the softmax: no number of it can then still be on its way."""
    if C.BIAS == "copied" and C.B_STAGES > 1:
        i = c * C.B_STAGES + slot(use, C.B_STAGES)
        mbarrier.arrive(shared[2].index(i), count=1, pred=live)


@gluon.jit
def scores(
    C: gl.constexpr,
    S,
    copied,
    j,
    first,
    tile,
    terms,
    scale,
    dtype: gl.constexpr,
):
    """All of a score but the mask, from the product."""
    if C.BIAS == "copied":
        copied = by_lane(copied)
    return with_terms(C, by_lane(S), copied, j, first, tile, terms, scale, dtype)


@gluon.jit
def step(
    C: gl.constexpr,
    MASKED: gl.constexpr,
    c: gl.constexpr,
    j,
    use,
    turn,
    state,
    buffers,
    bars,
    shared,
    first,
    tile,
    sizes,
    terms,
    scale,
):
    """One key tile: its scores, and the output of the one before under its softmax."""
    o0, o1, p, m, l, alpha = state
    qs0, qs1, ks0, ks1, vs0, vs1 = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = vs0.dtype
    q0, q1 = queries(C, qs0, qs1, c, turn, use)
    s = slot(use, C.K_STAGES)
    S = issue_scores(C, q0, q1, ks0, ks1, s)
    before = use - 1
    sv = slot(before, C.V_STAGES)
    mbarrier.wait(v_full.index(sv), phase(before, C.V_STAGES))
    o0, o1 = issue_output(C, p, o0, o1, vs0, vs1, sv, True)
    copied = bias_tile(C, c, use, True, shared)
    S = warpgroup_mma_wait(1, deps=[S])
    mbarrier.arrive(k_empty.index(s), count=1)
    if C.Q_STAGES == 1:
        mbarrier.arrive(q_empty.index(c), count=1, pred=j == tile[8])
    S = scores(C, S, copied, j, first, tile, terms, scale, dtype)
    if MASKED:
        if C.DOCUMENTS:
            if partial(C, j, first, tile, sizes, terms):
                S = masked(C, S, j, first, tile, sizes, terms)
        else:
            S = masked(C, S, j, first, tile, sizes, terms)
    p, m, l, alpha = weights(C, C.ROUND_LATE, S, m, l, scale, dtype)
    # A wait begins a new basic block: without one here ptxas sinks the softmax below the wait
    # for the product that it is to run under.
    use += 1
    mbarrier.wait(k_full.index(slot(use, C.K_STAGES)), phase(use, C.K_STAGES), pred=j > tile[8])
    o0, o1 = wait_output(C, o0, o1)
    mbarrier.arrive(v_empty.index(sv), count=1)
    bias_done(C, c, use - 1, True, shared)
    p = p.to(dtype)
    o0 = scale_rows(o0, alpha)
    if C.DV1:
        o1 = scale_rows(o1, alpha)
    return use, (o0, o1, p, m, l, alpha)


@gluon.jit
def first_weights(
    C: gl.constexpr,
    c: gl.constexpr,
    S,
    copied,
    tile,
    sizes,
    terms,
    scale,
    dtype: gl.constexpr,
):
    """The softmax step that begins a query tile: its last key tile, where every bound is met."""
    first = tile[0] + c * C.TOKENS
    S = scores(C, S, copied, tile[9] - 1, first, tile, terms, scale, dtype)
    if C.RIGHT or C.LEFT or C.DOCUMENTS or not C.EVEN_K:
        S = masked(C, S, tile[9] - 1, first, tile, sizes, terms)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, S.type.layout))
    m = gl.full([64, 4], LOWEST_NATURAL if C.NATURAL else LOWEST, gl.float32, rows)
    l = gl.full([64, 4], 0.0, gl.float32, rows)
    return weights(C, False, S, m, l, scale, dtype)


@gluon.jit
def work(
    C: gl.constexpr,
    c: gl.constexpr,
    tile,
    out,
    lse,
    buffers,
    bars,
    shared,
    mail,
    sizes,
    terms,
    rest,
):
    qs0, qs1, ks0, ks1, vs0, vs1 = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    messages, m_full, m_empty = mail
    scale, hq, total_q = rest
    dtype: gl.constexpr = vs0.dtype
    OL0: gl.constexpr = value_layout(C.DV0)
    OL1: gl.constexpr = value_layout(C.DV1 if C.DV1 else 16)
    turn = 0
    use = 0

    mbarrier.wait(q_full.index(c * C.Q_STAGES), 0)
    mbarrier.wait(k_full.index(0), 0)
    q0, q1 = queries(C, qs0, qs1, c, 0, 0)
    S = warpgroup_mma_wait(0, deps=[issue_scores(C, q0, q1, ks0, ks1, 0)])
    mbarrier.arrive(k_empty.index(0), count=1)
    if C.Q_STAGES == 1:
        mbarrier.arrive(q_empty.index(c), count=1, pred=tile[8] + 1 == tile[9])
    copied = bias_tile(C, c, use, True, shared)
    p, m, l, alpha = first_weights(C, c, S, copied, tile, sizes, terms, scale, dtype)
    if C.BIAS == "copied":
        # begins a basic block, as in step; these values stay until their product
        mbarrier.wait(v_full.index(0), 0)
        bias_done(C, c, use, True, shared)
    use += 1

    live = True
    while live:
        lo = tile[8]
        hi = tile[9]
        first = tile[0] + c * C.TOKENS
        z, a = full_tiles(C, first, first + C.TOKENS - 1, tile, sizes)
        o0 = gl.full([64, C.DV0], 0.0, gl.float32, OL0)
        o1 = gl.full([64, C.DV1 if C.DV1 else 16], 0.0, gl.float32, OL1)
        state = (o0, o1, p, m, l, alpha)
        mbarrier.wait(k_full.index(slot(use, C.K_STAGES)), phase(use, C.K_STAGES), pred=lo + 1 < hi)
        if C.RIGHT or C.DOCUMENTS:
            for i in range(a, hi - 1):
                use, state = step(
                    C,
                    True,
                    c,
                    hi - 2 - i + a,
                    use,
                    turn,
                    state,
                    buffers,
                    bars,
                    shared,
                    first,
                    tile,
                    sizes,
                    terms,
                    scale,
                )
        if not C.DOCUMENTS:
            for i in range(z, a):
                use, state = step(
                    C,
                    False,
                    c,
                    a - 1 - i + z,
                    use,
                    turn,
                    state,
                    buffers,
                    bars,
                    shared,
                    first,
                    tile,
                    sizes,
                    terms,
                    scale,
                )
        if C.LEFT and not C.DOCUMENTS:
            for i in range(lo, z):
                use, state = step(
                    C,
                    True,
                    c,
                    z - 1 - i + lo,
                    use,
                    turn,
                    state,
                    buffers,
                    bars,
                    shared,
                    first,
                    tile,
                    sizes,
                    terms,
                    scale,
                )
        o0, o1, p, m, l, alpha = state

        # The last product of this tile, under the first scores and softmax of the next. When
        # there is no next, what they are made of is stale, and what they give is not used.
        turn += 1
        after, more = told(C, turn, messages, m_full)
        mbarrier.wait(k_full.index(slot(use, C.K_STAGES)), phase(use, C.K_STAGES), pred=more)
        mbarrier.wait(
            q_full.index(c * C.Q_STAGES + slot(turn, C.Q_STAGES)),
            phase(turn, C.Q_STAGES),
            pred=more,
        )
        q0, q1 = queries(C, qs0, qs1, c, turn, use)
        s = slot(use, C.K_STAGES)
        S = issue_scores(C, q0, q1, ks0, ks1, s)
        before = use - 1
        sv = slot(before, C.V_STAGES)
        mbarrier.wait(v_full.index(sv), phase(before, C.V_STAGES))
        o0, o1 = issue_output(C, p, o0, o1, vs0, vs1, sv, True)
        # let go of late, for each of these waits for the four warps
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)
        if C.Q_STAGES > 1:
            mbarrier.arrive(q_empty.index(c * C.Q_STAGES + slot(turn - 1, C.Q_STAGES)), count=1)
        copied = bias_tile(C, c, use, more, shared)
        S = warpgroup_mma_wait(1, deps=[S])
        mbarrier.arrive(k_empty.index(s), count=1, pred=more)
        if C.Q_STAGES == 1:
            mbarrier.arrive(q_empty.index(c), count=1, pred=more & (after[8] + 1 == after[9]))
        m_done = m
        l_done = l
        p, m, l, alpha = first_weights(C, c, S, copied, after, sizes, terms, scale, dtype)
        use += 1
        if C.WARPGROUPS < 3:
            inverse = store_lse(C, c, m_done, l_done, lse, tile, terms, hq, total_q)
        # begins a basic block, as in step
        mbarrier.wait(v_full.index(sv), phase(before, C.V_STAGES))
        o0, o1 = wait_output(C, o0, o1)
        mbarrier.arrive(v_empty.index(sv), count=1)
        bias_done(C, c, use - 1, more, shared)
        if C.WARPGROUPS == 3:
            inverse = store_lse(C, c, m_done, l_done, lse, tile, terms, hq, total_q)
        store_output(C, c, o0, o1, inverse, out, tile, hq)
        tile = after
        live = more
    if C.STAGED:
        tma_store_wait(0)


@gluon.jit
def queries(C: gl.constexpr, qs0, qs1, c: gl.constexpr, turn, use):
    """The buffer of Q. ``use >> 30`` is zero, which the compiler cannot know: an address that
    is the same in two loops ptxas (12.8) may compute on the way to the first alone, and the
    second loop goes without it when the first is empty."""
    i = c * C.Q_STAGES + slot(turn + (use >> 30), C.Q_STAGES)
    q0 = reinterpret(qs0.index(i), qs0.dtype, [64, C.D0], matrix(64, C.D0, qs0.dtype))
    q1 = q0
    if C.D1:
        q1 = reinterpret(qs1.index(i), qs1.dtype, [64, C.D1], matrix(64, C.D1, qs1.dtype))
    return q0, q1


@gluon.jit
def store_lse(C: gl.constexpr, c: gl.constexpr, m, l, lse, tile, terms, hq, total_q):
    """lse = log sum exp of a finished tile, row by row; what O is to be multiplied by."""
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    first = token + c * C.TOKENS
    m = gl.max(m, 1)
    l = gl.sum(l, 1)
    r = gl.arange(0, 64, l.type.layout)
    row = first + r // C.GROUP
    h = head * C.GROUP + r % C.GROUP
    if C.SINK:
        # in natural units, for the sink may be as large as its dtype goes
        if not C.NATURAL:
            m = gl.where(l > 0.0, m * LN2, LOWEST_NATURAL)
        sink = gl.load(terms[7] + h).to(gl.float32)
        top = gl.maximum(m, sink)
        shrink = gl.exp2((m - top) * LOG2E)
        l = l * shrink + gl.exp2((sink - top) * LOG2E)
        m = top
        inverse = gl.where(l > 0.0, shrink / l, 0.0)
    else:
        inverse = gl.where(l > 0.0, 1.0 / l, 0.0)
    if C.SINK or C.NATURAL:
        value = m + gl.log2(l) * LN2
    else:
        value = (m + gl.log2(l)) * LN2
    value = gl.where(l > 0.0, value, float("-inf"))
    if C.VARLEN:
        at = h.to(gl.int64) * total_q + q_row + row
    else:
        at = (b * hq + h).to(gl.int64) * total_q + row
    gl.store(lse + at, value, mask=row < nq)
    return inverse


@gluon.jit
def store_output(C: gl.constexpr, c: gl.constexpr, o0, o1, inverse, out, tile, hq):
    """out = O / l of a finished tile."""
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    first = token + c * C.TOKENS
    pointer, desc, stages = out
    row_0 = q_row + first
    if not C.VARLEN:
        row_0 = row_0 + b * nq
    base = pointer + (row_0.to(gl.int64) * hq + head * C.GROUP) * C.DV_OUT
    if C.STAGED:
        # a packed sequence's rows past its end are the next one's
        part = 0 if C.VARLEN else b
        at = q_row + first if C.VARLEN else first
        whole = first + C.TOKENS <= nq
        if C.VARLEN:
            if whole:
                stage_output(C, c, o0, inverse, desc, stages, part, at, head)
            else:
                store_rows(C, o0, inverse, base, 0, nq - first, hq)
        else:
            stage_output(C, c, o0, inverse, desc, stages, part, at, head)
    else:
        store_rows(C, o0, inverse, base, 0, nq - first, hq)
        if C.DV1:
            store_rows(C, o1, inverse, base, C.DV0, nq - first, hq)


@gluon.jit
def stage_output(C: gl.constexpr, c: gl.constexpr, o, inverse, desc, stages, b, row, head):
    """O / l by way of shared memory, from where the copy engine stores it while work goes on."""
    W: gl.constexpr = C.STAGED
    dtype: gl.constexpr = stages.dtype
    stage = stages.index(c)
    flat = reinterpret(stage, dtype, [64, W], matrix(64, W, dtype))
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout))
    x = (o * inverse[:, None]).to(dtype)
    if C.DV == W:
        tma_store_wait(0)
        flat.store(x)
        fence_async_shared()
        tma_store(desc, [b, row, head, 0, 0], stage)
    else:
        x0, x1 = x.reshape([64, 2, W]).permute((0, 2, 1)).split()
        tma_store_wait(0)
        flat.store(x0)
        fence_async_shared()
        tma_store(desc, [b, row, head, 0, 0], stage)
        tma_store_wait(0)
        flat.store(x1)
        fence_async_shared()
        tma_store(desc, [b, row, head, 0, W], stage)


@gluon.jit
def store_rows(C: gl.constexpr, o, inverse, base, column: gl.constexpr, tokens, hq):
    """O / l by the threads themselves, no further than the sequence goes."""
    WL: gl.constexpr = output_layout(o.shape[1]) if C.TURNED else o.type.layout
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout))
    x = gl.convert_layout((o * inverse[:, None]).to(base.dtype.element_ty), WL)
    r = gl.arange(0, 64, gl.SliceLayout(1, WL))
    d = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, WL))
    at = ((r // C.GROUP) * hq + r % C.GROUP)[:, None] * C.DV_OUT + d[None, :]
    seen = (r // C.GROUP < tokens)[:, None]
    if C.DV_OUT != C.DV:
        seen = seen & (d < C.DV_OUT)[None, :]
    gl.store(base + at, x, mask=seen)
