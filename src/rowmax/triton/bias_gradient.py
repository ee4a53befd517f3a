# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""dbias of a bias that broadcasts over the batch or the heads: a tile of it stays, they pass by.

``dbias_ij = sum dS_ij`` over what broadcasts, in one order, in registers: no memory beyond the
gradient itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import dropped, load_rows, seen, weights
from .steps import at_pair, band, keys_in_use, load_tile, matrix, sizes, vector


@triton.jit
def tile_is_seen(t, n, c, b, head, tile_q, tile_k, i0, nq, used, offset):
    """Whether the tile has a pair to be seen: by its state in a map, or by the band."""
    if t.states is not None:
        stride = n.stride.states
        at = tl.cast(b, tl.int64) * stride[0] + tl.cast(head, tl.int64) * stride[1]
        return tl.load(t.states + at + tile_q * stride[2] + tile_k) > 0
    else:
        i1 = tl.minimum(i0 + c.BLOCK_Q, nq) - 1
        first, _, _, last = band(i0, i1, offset, n.left, n.right, used, c.BLOCK_K)
        return (i0 < nq) & (tile_k >= first) & (tile_k < last)


@triton.jit
def score_gradient(t, n, c, b, head, i0, j0, q_start, nq, k_start, nk, used, offset):
    """dS of one tile, 0 where nothing is seen."""
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    BLOCK_K: tl.constexpr = c.BLOCK_K
    kv_head = head // c.GROUP
    q = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
    k = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
    v = matrix(t.v, n.stride.v, b, kv_head, k_start, c.ROW_V, PACKED, c.ALIGN)
    do = matrix(t.dout, n.stride.dout, b, head, q_start, c.ROW_DOUT, PACKED, c.ALIGN)
    q = load_tile(q, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
    k = load_tile(k, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, True)
    x = tl.dot(q, tl.trans(k), input_precision=c.PRECISION)
    v = load_tile(v, c.ROW_V, j0, used, BLOCK_K, c.DV, c.BLOCK_DV, True)
    do = load_tile(do, c.ROW_DOUT, i0, nq, BLOCK_Q, c.DV, c.BLOCK_DV, True)
    dp = tl.dot(do, tl.trans(v), input_precision=c.PRECISION)
    row = i0 + tl.arange(0, BLOCK_Q)
    j = tl.arange(0, BLOCK_K)[None, :]
    lse2 = vector(t.lse2, b, head, q_start, n.rows * 16, c.HQ, PACKED)
    lse2 = load_rows(lse2, row, nq, float("inf"), True)
    delta = vector(t.delta, b, head, q_start, n.rows * 16, c.HQ, PACKED)
    delta = load_rows(delta, row, nq, 0.0, True)
    row = row[:, None]
    p, _ = weights(
        x, lse2[:, None], t, n, c, b, head, row, j0 + j, nq, nk, used, offset, False, "full"
    )  # fmt: skip
    _, dp = dropped(p, dp, t, n, b, head, row, j0, j, BLOCK_K)
    ok = seen(t, n, b, head, row, j0 + j, nq, used, offset)
    return tl.where(ok, p * (dp - delta[:, None]), 0.0)


@triton.jit(do_not_specialize=["n"])
def bias_gradient_kernel(t, n, c):
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    BLOCK_K: tl.constexpr = c.BLOCK_K
    tiles_k = tl.cdiv(n.longest_k, BLOCK_K)
    tile = tl.program_id(0) % n.tiles
    matrix_number = tl.program_id(0) // n.tiles
    tile_q = tile // tiles_k
    tile_k = tile % tiles_k
    b0 = matrix_number // n.bias_heads
    head0 = matrix_number % n.bias_heads
    i0 = tile_q * BLOCK_Q
    j0 = tile_k * BLOCK_K

    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    over_heads = c.HQ // n.bias_heads
    over = over_heads * (n.batch // n.bias_batch)
    for i in tl.range(0, over, num_stages=1):
        b = b0 + i // over_heads
        head = head0 + i % over_heads
        q_start, nq, k_start, nk = sizes(t, n, b, False)
        used = keys_in_use(t, b, nk, n)
        offset = nk - nq
        if tile_is_seen(t, n, c, b, head, tile_q, tile_k, i0, nq, used, offset):
            acc += score_gradient(t, n, c, b, head, i0, j0, q_start, nq, k_start, nk, used, offset)
    row = i0 + tl.arange(0, BLOCK_Q)[:, None]
    col = j0 + tl.arange(0, BLOCK_K)[None, :]
    at = at_pair(t.dbias, n.stride.dbias, b0, head0, row, col, c.BIAS_ALIGN)
    inside = (row < n.longest_q) & (col < n.longest_k)
    tl.store(at, acc.to(t.dbias.dtype.element_ty), mask=inside)
