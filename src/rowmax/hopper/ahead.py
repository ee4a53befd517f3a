"""A consumer that is one product ahead: for head sizes that leave registers for two score tiles.

While the softmax of a key tile runs, so do the scores of the next and the output of the one
before; no step waits for its own scores. What consumer.py says of the ends of query tiles holds
here too: their last product runs under the first softmax of the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .consumer import (
    first_weights,
    issue_output,
    issue_scores,
    queries,
    scale_rows,
    scores,
    store_lse,
    store_output,
    weights,
)
from .gluon_compat import mbarrier, tma_store_wait, warpgroup_mma_wait
from .layouts import value_layout
from .pipeline import phase, slot, told
from .schedule import full_tiles
from .terms import masked


@gluon.jit
def under(C: gl.constexpr, c: gl.constexpr, turn, use, more, p, o, buffers, bars):
    """Both products that run under the softmax of use ``use``: scores of the next use, and the
    output of the one before. Without a next (not ``more``) its scores are of stale keys."""
    qs0, qs1, ks0, ks1, vs0, vs1 = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    coming = use + 1
    s = slot(coming, C.K_STAGES)
    mbarrier.wait(k_full.index(s), phase(coming, C.K_STAGES), pred=more)
    q0, q1 = queries(C, qs0, qs1, c, turn, use)
    T = issue_scores(C, q0, q1, ks0, ks1, s)
    before = use - 1
    sv = slot(before, C.V_STAGES)
    mbarrier.wait(v_full.index(sv), phase(before, C.V_STAGES))
    o, _ = issue_output(C, p, o, o, vs0, vs1, sv, True)
    return T, o


@gluon.jit
def done(C: gl.constexpr, use, more, T, o, bars):
    """Wait for both products of ``under``, and let go of their keys and values."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    before = use - 1
    sv = slot(before, C.V_STAGES)
    # begins a basic block, as in consumer.step
    mbarrier.wait(v_full.index(sv), phase(before, C.V_STAGES))
    T, o = warpgroup_mma_wait(0, deps=[T, o])
    mbarrier.arrive(k_empty.index(slot(use + 1, C.K_STAGES)), count=1, pred=more)
    mbarrier.arrive(v_empty.index(sv), count=1)
    return T, o


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr,
    j, use, turn, S, state, buffers, bars, first, tile, sizes, terms, scale,
):  # fmt: skip
    """One key tile, not the last of its query tile, whose scores S are there."""
    o, p, m, l, alpha = state
    dtype: gl.constexpr = buffers[4].dtype
    T, o = under(C, c, turn, use, True, p, o, buffers, bars)
    S = scores(C, S, 0, j, first, tile, terms, scale, dtype)
    if MASKED:
        S = masked(C, S, j, first, tile, sizes, terms)
    p, m, l, alpha = weights(C, False, S, m, l, scale, dtype)
    S, o = done(C, use, True, T, o, bars)
    return use + 1, S, (scale_rows(o, alpha), p, m, l, alpha)


@gluon.jit
def work(
    C: gl.constexpr, c: gl.constexpr,
    tile, out, lse, buffers, bars, shared, mail, sizes, terms, rest,
):  # fmt: skip
    qs0, qs1, ks0, ks1, vs0, vs1 = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    messages, m_full, m_empty = mail
    scale, hq, total_q = rest
    dtype: gl.constexpr = vs0.dtype
    turn = 0
    use = 0

    mbarrier.wait(q_full.index(c * C.Q_STAGES), 0)
    mbarrier.wait(k_full.index(0), 0)
    q0, q1 = queries(C, qs0, qs1, c, 0, 0)
    S = warpgroup_mma_wait(0, deps=[issue_scores(C, q0, q1, ks0, ks1, 0)])
    mbarrier.arrive(k_empty.index(0), count=1)
    two = tile[8] + 1 < tile[9]
    s = slot(1, C.K_STAGES)
    mbarrier.wait(k_full.index(s), phase(1, C.K_STAGES), pred=two)
    T = issue_scores(C, q0, q1, ks0, ks1, s)
    p, m, l, alpha = first_weights(C, c, S, 0, tile, sizes, terms, scale, dtype)
    S = warpgroup_mma_wait(0, deps=[T])
    mbarrier.arrive(k_empty.index(s), count=1, pred=two)
    use += 1

    live = True
    while live:
        lo = tile[8]
        hi = tile[9]
        first = tile[0] + c * C.TOKENS
        z, a = full_tiles(C, first, first + C.TOKENS - 1, tile, sizes)
        o = gl.full([64, C.DV], 0.0, gl.float32, value_layout(C.DV))
        state = (o, p, m, l, alpha)
        # all but the first key tile, which is done, and the last, under which the next begins
        a_ = gl.maximum(a, lo + 1)
        z_ = gl.maximum(z, lo + 1)
        if C.RIGHT:
            for i in range(a_, hi - 1):
                use, S, state = step(
                    C, True, c, hi - 2 - i + a_, use, turn,
                    S, state, buffers, bars, first, tile, sizes, terms, scale,
                )  # fmt: skip
        for i in range(z_, a_):
            use, S, state = step(
                C, False, c, a_ - 1 - i + z_, use, turn,
                S, state, buffers, bars, first, tile, sizes, terms, scale,
            )  # fmt: skip
        if C.LEFT:
            for i in range(lo + 1, z_):
                use, S, state = step(
                    C, True, c, z_ - i + lo, use, turn,
                    S, state, buffers, bars, first, tile, sizes, terms, scale,
                )  # fmt: skip
        o, p, m, l, alpha = state

        # the last key tile, and under it the first scores of the next query tile
        mbarrier.arrive(q_empty.index(c * C.Q_STAGES + slot(turn, C.Q_STAGES)), count=1)
        turn += 1
        after, more = told(C, turn, messages, m_full)
        i = c * C.Q_STAGES + slot(turn, C.Q_STAGES)
        mbarrier.wait(q_full.index(i), phase(turn, C.Q_STAGES), pred=more)
        if lo + 1 < hi:
            T, o = under(C, c, turn, use, more, p, o, buffers, bars)
            S = scores(C, S, 0, lo, first, tile, terms, scale, dtype)
            if C.RIGHT or C.LEFT:
                if (lo >= a) | (lo < z):
                    S = masked(C, S, lo, first, tile, sizes, terms)
            p, m, l, alpha = weights(C, False, S, m, l, scale, dtype)
            S, o = done(C, use, more, T, o, bars)
            o = scale_rows(o, alpha)
            use += 1
        else:
            s = slot(use, C.K_STAGES)
            mbarrier.wait(k_full.index(s), phase(use, C.K_STAGES), pred=more)
            q0, q1 = queries(C, qs0, qs1, c, turn, use)
            S = warpgroup_mma_wait(0, deps=[issue_scores(C, q0, q1, ks0, ks1, s)])
            mbarrier.arrive(k_empty.index(s), count=1, pred=more)
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)

        # the last product of this query tile, under the first softmax of the next
        two = more & (after[8] + 1 < after[9])
        T, o = under(C, c, turn, use, two, p, o, buffers, bars)
        m_done = m
        l_done = l
        p, m, l, alpha = first_weights(C, c, S, 0, after, sizes, terms, scale, dtype)
        inverse = store_lse(C, c, m_done, l_done, lse, tile, terms, hq, total_q)
        S, o = done(C, use, two, T, o, bars)
        use += 1
        store_output(C, c, o, o, inverse, out, tile, hq)
        tile = after
        live = more
    if C.STAGED:
        tma_store_wait(0)
