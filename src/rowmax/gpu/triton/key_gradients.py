# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""dK and dV: a tile of keys stays, tiles of queries pass by it, for each head of its group.

``dV_j = sum_i P_ij R_ij dO_i`` and ``dK_j = scale sum_i dX_ij q_i``. Scores are held with keys
down and queries across, so that P and dS are left operands as they lie. No atomics: one program
makes the whole of its rows, in one order. A launch makes both, or one where ``t.dk`` or ``t.dv``
is None: wide heads have no registers for the sums of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import dropped, load_rest, load_rows, only_seen, seen, weights
from .steps import (
    count_tiles,
    has_nan,
    keys_in_use,
    load_row,
    load_tile,
    matrix,
    nth_program,
    nth_tile,
    offset_of,
    plan_tiles,
    sequence_of_slot,
    sizes,
    store_tile,
    times_row,
    vector,
)


@triton.jit
def add_queries(
    dk, dv, cols, k, v, q_base, do_base, lse2_base, delta_base, t, n, c, b, head, q_start, j0, plan,
    nq, nk, used, offset, KIND: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    SCORES: tl.constexpr = t.dk is not None or t.dbias_cols is not None  # whether dS is wanted
    j = tl.arange(0, c.BLOCK_K)[:, None]
    cut = j0 + c.BLOCK_K > used  # the tile of keys has some that are not in use
    for i in tl.range(0, count_tiles(plan, KIND)):
        tile, partial = nth_tile(i, t, plan, KIND)
        if t.lengths is not None:
            partial = partial | cut
        i0 = tile * BLOCK_Q
        rows = i0 + tl.arange(0, BLOCK_Q)
        row = rows[None, :]
        q = load_tile(q_base, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, c.RAGGED_Q)
        x = tl.dot(k, tl.trans(q), input_precision=c.PRECISION)
        lse2 = load_rows(lse2_base, rows, nq, float("inf"), c.RAGGED_Q)[None, :]
        rest = load_rest(t, n, c, b, head, q_start, row, nq, t.cu_q is not None, c.RAGGED_Q)
        p, y = weights(
            x, lse2, rest, t, n, c, b, head, row, j0 + j, nq, nk, used, offset, partial, KIND
        )
        do = load_tile(
            do_base, c.ROW_DOUT, i0, nq, BLOCK_Q, c.DV, c.BLOCK_DV, c.RAGGED_Q
        )  # fmt: skip
        dp = p
        if SCORES:
            dp = tl.dot(v, tl.trans(do), input_precision=c.PRECISION)
        pr, dp = dropped(p, dp, t, n, b, head, row, j0, j, c.BLOCK_K)
        if t.dv is not None:
            dv = tl.dot(pr.to(do.dtype), do, dv, input_precision=c.PRECISION)
        if SCORES:
            ds = p * (dp - load_rows(delta_base, rows, nq, 0.0, c.RAGGED_Q)[None, :])
            if t.dbias_cols is not None:
                ds = only_seen(ds, t, n, c, b, head, row, j0 + j, nq, used, offset, partial, KIND)
                cols += tl.sum(ds, 1)
            if n.cap2 is not None:
                ds = ds * (1.0 - y * y)
            if t.dk is not None:
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=c.PRECISION)
    return dk, dv, cols


@triton.jit
def add_query_by_query(
    dk, dv, k, v, q_base, do_base, lse2_base, delta_base, t, n, c, b, head, q_start, j0, nq, nk,
    used, offset,
):  # fmt: skip
    """The same, of the queries that see each key and no others."""
    j = tl.arange(0, c.BLOCK_K)[:, None]
    for i in tl.range(0, nq, num_stages=1):
        row = tl.full([1, 1], 0, tl.int32) + i
        q = load_row(q_base, c.ROW_Q, i, c.D, c.BLOCK_D)
        do = load_row(do_base, c.ROW_DOUT, i, c.DV, c.BLOCK_DV)
        rest = load_rest(t, n, c, b, head, q_start, row, nq, t.cu_q is not None, False)
        p, y = weights(
            times_row(k, q), tl.load(lse2_base + i), rest, t, n, c, b, head, row, j0 + j, nq, nk,
            used, offset, False, "full",
        )  # fmt: skip
        ok = seen(t, n, b, head, row, j0 + j, nq, used, offset)
        dp = times_row(v, do)
        pr, dp = dropped(p, dp, t, n, b, head, row, j0, j, c.BLOCK_K)
        ds = p * (dp - tl.load(delta_base + i))
        if n.cap2 is not None:
            ds = ds * (1.0 - y * y)
        if t.dv is not None:
            dv += tl.where(ok, pr * do, 0.0)
        if t.dk is not None:
            dk += tl.where(ok, ds * q, 0.0)
    return dk, dv


@triton.jit(do_not_specialize=["n"])
def key_gradients_kernel(t, n, c):
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_K: tl.constexpr = c.BLOCK_K
    HK: tl.constexpr = c.HQ // c.GROUP
    tile, kv_head = nth_program(n.tiles, n.together)
    b = kv_head // HK
    kv_head = kv_head % HK
    if PACKED:
        b, tile = sequence_of_slot(t.cu_k, tile, n.batch, n.total_k, BLOCK_K)
    q_start, nq, k_start, nk = sizes(t, n, b, True)
    j0 = tile * BLOCK_K
    if j0 >= nk:
        return
    used = keys_in_use(t, b, nk, n)
    k_base = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
    v_base = matrix(t.v, n.stride.v, b, kv_head, k_start, c.ROW_V, PACKED, c.ALIGN)
    k = load_tile(k_base, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, True)
    v = load_tile(v_base, c.ROW_V, j0, used, BLOCK_K, c.DV, c.BLOCK_DV, True)
    offset = offset_of(nq, nk, used, c)
    j1 = tl.minimum(j0 + BLOCK_K, used) - 1

    dk = tl.zeros([BLOCK_K, c.BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, c.BLOCK_DV], tl.float32)
    for g in tl.range(0, c.GROUP, num_stages=1):
        head = kv_head * c.GROUP + g
        q_base = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
        do_base = matrix(t.dout, n.stride.dout, b, head, q_start, c.ROW_DOUT, PACKED, c.ALIGN)
        lse2 = vector(t.lse2, b, head, q_start, n.rows * 16, c.HQ, PACKED)
        delta = vector(t.delta, b, head, q_start, n.rows * 16, c.HQ, PACKED)
        end = nq if t.lengths is None else tl.where(j0 < used, nq, 0)
        plan = plan_tiles(
            t, n, b, head, tile, j0, j1, -offset, n.right, n.left, end, c.BLOCK_Q
        )  # fmt: skip
        cols = tl.zeros([BLOCK_K], tl.float32)
        if c.SPLIT:
            dk, dv, cols = add_queries(
                dk, dv, cols, k, v, q_base, do_base, lse2, delta, t, n, c, b, head, q_start,
                j0, plan, nq, nk, used, offset, "full",
            )  # fmt: skip
            dk, dv, cols = add_queries(
                dk, dv, cols, k, v, q_base, do_base, lse2, delta, t, n, c, b, head, q_start,
                j0, plan, nq, nk, used, offset, "partial",
            )  # fmt: skip
        else:
            dk, dv, cols = add_queries(
                dk, dv, cols, k, v, q_base, do_base, lse2, delta, t, n, c, b, head, q_start,
                j0, plan, nq, nk, used, offset, "any",
            )  # fmt: skip
        if t.dbias_cols is not None:
            col = j0 + tl.arange(0, BLOCK_K)
            to = vector(t.dbias_cols, b, head, 0, n.longest_k, c.HQ, False)
            tl.store(to + col, cols, mask=col < tl.where(b < n.batch, nk, 0))
    if c.MASKS:
        if has_nan(dk) | has_nan(dv):
            # loaded again: kept in registers until here, they would cost the loop its own
            k = load_tile(k_base, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, True)
            v = load_tile(v_base, c.ROW_V, j0, used, BLOCK_K, c.DV, c.BLOCK_DV, True)
            dk = tl.zeros([BLOCK_K, c.BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_K, c.BLOCK_DV], tl.float32)
            for g in tl.range(0, c.GROUP, num_stages=1):
                head = kv_head * c.GROUP + g
                q_base = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
                do_base = matrix(
                    t.dout, n.stride.dout, b, head, q_start, c.ROW_DOUT, PACKED, c.ALIGN
                )
                lse2 = vector(t.lse2, b, head, q_start, n.rows * 16, c.HQ, PACKED)
                delta = vector(t.delta, b, head, q_start, n.rows * 16, c.HQ, PACKED)
                dk, dv = add_query_by_query(
                    dk, dv, k, v, q_base, do_base, lse2, delta, t, n, c, b, head, q_start, j0, nq,
                    nk, used, offset,
                )  # fmt: skip
    if t.dk is not None:
        to = matrix(t.dk, n.stride.dk, b, kv_head, k_start, c.ROW_DK, PACKED, c.OUT_ALIGN)
        store_tile(to, c.ROW_DK, j0, nk, dk * n.scale, BLOCK_K, c.D, c.BLOCK_D)
    if t.dv is not None:
        if t.seed is not None:
            dv = dv * n.keep_scale
        to = matrix(t.dv, n.stride.dv, b, kv_head, k_start, c.ROW_DV, PACKED, c.OUT_ALIGN)
        store_tile(to, c.ROW_DV, j0, nk, dv, BLOCK_K, c.DV, c.BLOCK_DV)
