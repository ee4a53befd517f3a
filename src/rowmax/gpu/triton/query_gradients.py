# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""Delta and dQ: a tile of queries stays, tiles of keys pass by it.

``Delta_i = dO_i . o_i`` and ``dQ_i = scale sum_j dX_ij k_j``. Here too the gradient of a bias
that broadcasts over nothing is stored, tile by tile, and that of one that broadcasts over keys
is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import LOG2E, dropped, load_rest, load_rows, only_seen, seen, weights
from .steps import (
    at_pair,
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


@triton.jit(do_not_specialize=["n"])
def delta_kernel(t, n, c):
    """``Delta_i - dLSE_i`` of a tile of rows, and the tile's part of the sink's gradient.

    Also LSE in the units of the scores. It is +inf, so that weights come out as 0, for a row that
    sees nothing: of -inf, or of a sink that is too low for units of log 2.
    Sequences play no part: packed rows are one sequence here.
    """
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    tile, head = nth_program(n.tiles, n.together)
    part = head * n.tiles + tile
    b = head // c.HQ
    head = head % c.HQ
    i0 = tile * BLOCK_Q
    row = i0 + tl.arange(0, BLOCK_Q)
    end = n.total_q
    o = matrix(t.out, n.stride.out, b, head, 0, c.ROW_OUT, False, c.OUT_ALIGN)
    o = load_tile(o, c.ROW_OUT, i0, end, BLOCK_Q, c.DV, c.BLOCK_DV, True)
    do = matrix(t.dout, n.stride.dout, b, head, 0, c.ROW_DOUT, False, c.ALIGN)
    do = load_tile(do, c.ROW_DOUT, i0, end, BLOCK_Q, c.DV, c.BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if t.dlse is not None:
        delta -= load_rows(vector(t.dlse, b, head, 0, end, c.HQ, False), row, end, 0.0, True)
    lse = load_rows(vector(t.lse, b, head, 0, end, c.HQ, False), row, end, float("inf"), True)
    lse2 = lse
    if not c.NATURAL:
        lse2 = lse * LOG2E
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    tl.store(vector(t.lse2, b, head, 0, n.rows * 16, c.HQ, False) + row, lse2, mask=row < end)
    tl.store(vector(t.delta, b, head, 0, n.rows * 16, c.HQ, False) + row, delta, mask=row < end)
    if t.dsink is not None:
        # in natural units, for the sink may be as large as its dtype goes
        sink = tl.load(t.sink + head).to(tl.float32)
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        rest = load_rest(t, n, c, b, head, 0, row, end, False, True)
        p = tl.exp2((sink - lse) * LOG2E - rest)
        dsink = -tl.sum(tl.where(row < end, p * delta, 0.0), 0)
        tl.store(t.dsink + part, dsink)


@triton.jit
def add_keys(
    dq, sums, q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row, inside, plan, nq, nk,
    used, offset, KIND: tl.constexpr,
):  # fmt: skip
    BLOCK_K: tl.constexpr = c.BLOCK_K
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, count_tiles(plan, KIND)):
        tile, partial = nth_tile(i, t, plan, KIND)
        j0 = tile * BLOCK_K
        k = load_tile(k_base, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, c.RAGGED_K)
        x = tl.dot(q, tl.trans(k), input_precision=c.PRECISION)
        v = load_tile(v_base, c.ROW_V, j0, used, BLOCK_K, c.DV, c.BLOCK_DV, c.RAGGED_K)
        dp = tl.dot(do, tl.trans(v), input_precision=c.PRECISION)
        p, y = weights(
            x, lse2[:, None], rest, t, n, c, b, head, row, j0 + j, nq, nk, used, offset, partial,
            KIND,
        )  # fmt: skip
        _, dp = dropped(p, dp, t, n, b, head, row, j0, j, BLOCK_K)
        ds = p * (dp - delta[:, None])
        if t.dbias is not None:
            ds = only_seen(ds, t, n, c, b, head, row, j0 + j, nq, used, offset, partial, KIND)
            at = at_pair(t.dbias, n.stride.dbias, b, head, row, j0 + j, c.BIAS_ALIGN)
            if c.RAGGED_K:
                tl.store(at, ds.to(t.dbias.dtype.element_ty), mask=inside & (j0 + j < nk))
            else:
                tl.store(at, ds.to(t.dbias.dtype.element_ty), mask=inside)
        if t.dbias_rows is not None:
            ds = only_seen(ds, t, n, c, b, head, row, j0 + j, nq, used, offset, partial, KIND)
            sums += tl.sum(ds, 1)
        if n.cap2 is not None:
            ds = ds * (1.0 - y * y)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=c.PRECISION)
    return dq, sums


@triton.jit
def sum_key_by_key(
    q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row, nq, nk, used, offset
):  # fmt: skip
    """dQ of the keys that each row sees and no others."""
    dq = tl.zeros([c.BLOCK_Q, c.BLOCK_D], tl.float32)
    for j in tl.range(0, used, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        k = load_row(k_base, c.ROW_K, j, c.D, c.BLOCK_D)
        v = load_row(v_base, c.ROW_V, j, c.DV, c.BLOCK_DV)
        p, y = weights(
            times_row(q, k), lse2[:, None], rest, t, n, c, b, head, row, j0 + column, nq, nk,
            used, offset, False, "full",
        )  # fmt: skip
        _, dp = dropped(p, times_row(do, v), t, n, b, head, row, j0, column, 16)
        ds = p * (dp - delta[:, None])
        if n.cap2 is not None:
            ds = ds * (1.0 - y * y)
        ok = seen(t, n, b, head, row, j0 + column, nq, used, offset)
        dq += tl.where(ok, ds * k, 0.0)
    return dq


@triton.jit(do_not_specialize=["n"])
def query_gradients_kernel(t, n, c):
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    tile, head = nth_program(n.tiles, n.together)
    b = head // c.HQ
    head = head % c.HQ
    if PACKED:
        b, tile = sequence_of_slot(t.cu_q, tile, n.batch, n.total_q, BLOCK_Q)
    elif n.right is not None:
        tile = n.tiles - 1 - tile  # the longest first
    q_start, nq, k_start, nk = sizes(t, n, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= nq:
        return
    used = keys_in_use(t, b, nk, n)
    offset = offset_of(nq, nk, used, c)
    kv_head = head // c.GROUP
    q_base = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
    do_base = matrix(t.dout, n.stride.dout, b, head, q_start, c.ROW_DOUT, PACKED, c.ALIGN)
    k_base = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
    v_base = matrix(t.v, n.stride.v, b, kv_head, k_start, c.ROW_V, PACKED, c.ALIGN)

    row = i0 + tl.arange(0, BLOCK_Q)
    q = load_tile(q_base, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
    do = load_tile(do_base, c.ROW_DOUT, i0, nq, BLOCK_Q, c.DV, c.BLOCK_DV, True)
    lse2 = vector(t.lse2, b, head, q_start, n.rows * 16, c.HQ, PACKED)
    lse2 = load_rows(lse2, row, nq, float("inf"), True)
    delta = vector(t.delta, b, head, q_start, n.rows * 16, c.HQ, PACKED)
    delta = load_rows(delta, row, nq, 0.0, True)
    rest = load_rest(t, n, c, b, head, q_start, row[:, None], nq, PACKED, True)
    inside = row < nq  # what follows may compute rows past the end, as copies of the last one
    row = tl.minimum(row, nq - 1)
    i1 = tl.minimum(i0 + BLOCK_Q, nq) - 1
    plan = plan_tiles(
        t, n, b, head, tile, i0, i1, offset, n.left, n.right, used, c.BLOCK_K
    )  # fmt: skip

    dq = tl.zeros([BLOCK_Q, c.BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_Q], tl.float32)
    if c.SPLIT:
        dq, sums = add_keys(
            dq, sums, q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row[:, None],
            inside[:, None], plan, nq, nk, used, offset, "full",
        )  # fmt: skip
        dq, sums = add_keys(
            dq, sums, q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row[:, None],
            inside[:, None], plan, nq, nk, used, offset, "partial",
        )  # fmt: skip
    else:
        dq, sums = add_keys(
            dq, sums, q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row[:, None],
            inside[:, None], plan, nq, nk, used, offset, "any",
        )  # fmt: skip
    if c.MASKS:
        if has_nan(dq):
            # loaded again: kept in registers until here, they would cost the loop its own
            q = load_tile(q_base, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
            do = load_tile(
                do_base, c.ROW_DOUT, i0, nq, BLOCK_Q, c.DV, c.BLOCK_DV, True
            )  # fmt: skip
            dq = sum_key_by_key(
                q, do, lse2, rest, delta, k_base, v_base, t, n, c, b, head, row[:, None], nq, nk,
                used, offset,
            )  # fmt: skip
    to = matrix(t.dq, n.stride.dq, b, head, q_start, c.ROW_DQ, PACKED, c.OUT_ALIGN)
    store_tile(to, c.ROW_DQ, i0, nq, dq * n.scale, BLOCK_Q, c.D, c.BLOCK_D)
    if t.dbias_rows is not None:
        to = vector(t.dbias_rows, b, head, 0, n.longest_q, c.HQ, False)
        row = i0 + tl.arange(0, BLOCK_Q)
        tl.store(to + row, sums, mask=row < tl.where(b < n.batch, nq, 0))
