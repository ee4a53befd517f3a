# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""dbias of a bias that broadcasts over the batch or the heads: a tile of it stays, they pass by.

``dbias_ij = sum dS_ij`` over what broadcasts, in one order, in registers: no memory beyond the
gradient itself. Where all that share a tile see it they pass in one loop that reads without a
condition, so that Triton reads ahead. A step of it reads a part of the columns of Q, K, V and dO:
of a wide head, shared memory has no room for all of them of this step and of the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import dropped, load_bias, load_rest, load_rows, only_seen, weights
from .steps import at_pair, band, keys_in_use, matrix, offset_of, sizes, tile_pointers, vector


@triton.jit
def sharer(i, t, n, c, b0, head0):
    """(b, head, q_start, nq, k_start, nk, used, offset) of the i-th that shares the tile.

    Heads come before sequences: those next to each other share keys and values, too.
    """
    turn = i // c.SHARING
    b = b0 + turn
    head = head0 + i - turn * c.SHARING
    q_start, nq, k_start, nk = sizes(t, n, b, False)
    used = keys_in_use(t, b, nk, n)
    return b, head, q_start, nq, k_start, nk, used, offset_of(nq, nk, used, c)


@triton.jit
def tile_state(t, n, c, b, head, tile_q, tile_k, nq, used, offset):
    """0 where no pair of the tile is seen, 2 where all are, else 1: by a map, or by the band."""
    if t.states is not None:
        stride = n.stride.states
        at = tl.cast(b, tl.int64) * stride[0] + tl.cast(head, tl.int64) * stride[1]
        return tl.load(t.states + at + tile_q * stride[2] + tile_k).to(tl.int32)
    else:
        i0 = tile_q * c.BLOCK_Q
        end = i0 + c.BLOCK_Q
        i1 = tl.minimum(end, nq) - 1
        first, full, full_end, last = band(i0, i1, offset, n.left, n.right, used, c.BLOCK_K)
        some = (i0 < nq) & (tile_k >= first) & (tile_k < last)
        every = some & (end <= nq) & (tile_k >= full) & (tile_k < full_end)
        return some.to(tl.int32) + every.to(tl.int32)


@triton.jit
def load_columns(
    x, ROW: tl.constexpr, i0, end, d0,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """``[ROWS, WIDTH]`` from row i0, column d0; zeros past D and, if ragged, past ``end``."""
    at = tile_pointers(x + d0, i0, ROW, ROWS, WIDTH)
    inside = (i0 + tl.arange(0, ROWS) < end)[:, None]
    within = (tl.arange(0, WIDTH) < D - d0)[None, :]
    if D == WIDTH * PARTS:
        if RAGGED:
            return tl.load(at, mask=inside, other=0.0)
        else:
            return tl.load(at)
    else:
        if RAGGED:
            return tl.load(at, mask=inside & within, other=0.0)
        else:
            return tl.load(at, mask=within, other=0.0)


@triton.jit
def add_sharers(acc, bias, first, end, t, n, c, b0, head0, tile_q, tile_k):
    """acc and dS of the sharers from ``first`` to ``end``."""
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    BLOCK_K: tl.constexpr = c.BLOCK_K
    WIDTH: tl.constexpr = c.BLOCK_D
    PARTS: tl.constexpr = (max(c.D, c.DV) + WIDTH - 1) // WIDTH
    i0 = tile_q * BLOCK_Q
    j0 = tile_k * BLOCK_K
    rows = i0 + tl.arange(0, BLOCK_Q)
    row = rows[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    # From part to part sums go as bits. As numbers Triton would leave the products under way until
    # the branch that uses them, and of products that end in a branch ptxas runs one at a time.
    x_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    dp_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    for step in tl.range(first * PARTS, end * PARTS):
        i = step // PARTS
        part = step - i * PARTS
        d0 = part * WIDTH
        b, head, q_start, nq, k_start, nk, used, offset = sharer(i, t, n, c, b0, head0)
        kv_head = head // c.GROUP
        q = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
        k = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
        v = matrix(t.v, n.stride.v, b, kv_head, k_start, c.ROW_V, PACKED, c.ALIGN)
        do = matrix(t.dout, n.stride.dout, b, head, q_start, c.ROW_DOUT, PACKED, c.ALIGN)
        q = load_columns(q, c.ROW_Q, i0, nq, d0, BLOCK_Q, c.D, WIDTH, PARTS, c.RAGGED_Q)
        k = load_columns(k, c.ROW_K, j0, used, d0, BLOCK_K, c.D, WIDTH, PARTS, c.RAGGED_K)
        do = load_columns(do, c.ROW_DOUT, i0, nq, d0, BLOCK_Q, c.DV, WIDTH, PARTS, c.RAGGED_Q)
        v = load_columns(v, c.ROW_V, j0, used, d0, BLOCK_K, c.DV, WIDTH, PARTS, c.RAGGED_K)
        lse2 = vector(t.lse2, b, head, q_start, n.rows * 16, c.HQ, PACKED)
        lse2 = load_rows(lse2, rows, nq, float("inf"), c.RAGGED_Q)
        delta = vector(t.delta, b, head, q_start, n.rows * 16, c.HQ, PACKED)
        delta = load_rows(delta, rows, nq, 0.0, c.RAGGED_Q)
        x = x_bits.to(tl.float32, bitcast=True)
        x = tl.dot(q, tl.trans(k), x, input_precision=c.PRECISION)
        dp = dp_bits.to(tl.float32, bitcast=True)
        dp = tl.dot(do, tl.trans(v), dp, input_precision=c.PRECISION)
        x_bits = x.to(tl.int32, bitcast=True)
        dp_bits = dp.to(tl.int32, bitcast=True)
        if part == PARTS - 1:
            rest = load_rest(t, n, c, b, head, q_start, row, nq, PACKED, c.RAGGED_Q)
            p, _ = weights(
                x, lse2[:, None], rest, t, n, c, b, head, row, j0 + j, nq, nk, used, offset, False,
                "full", bias,
            )  # fmt: skip
            _, dp = dropped(p, dp, t, n, b, head, row, j0, j, BLOCK_K)
            ds = p * (dp - delta[:, None])
            if c.EDGES:
                partial = tile_state(t, n, c, b, head, tile_q, tile_k, nq, used, offset) < 2
                ds = only_seen(
                    ds, t, n, c, b, head, row, j0 + j, nq, used, offset, partial, "any"
                )  # fmt: skip
            acc += ds
            x_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
            dp_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    return acc


@triton.jit(do_not_specialize=["n"])
def bias_gradient_kernel(t, n, c):
    # some sharers may see the tile and others not
    VARIES: tl.constexpr = t.states is not None or t.lengths is not None or t.cu_q is not None
    HEADS: tl.constexpr = c.HQ // c.SHARING
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    BLOCK_K: tl.constexpr = c.BLOCK_K
    tiles_k = tl.cdiv(n.longest_k, BLOCK_K)
    tile = tl.program_id(0) % n.tiles
    matrix_number = tl.program_id(0) // n.tiles
    tile_q = tile // tiles_k
    tile_k = tile % tiles_k
    b0 = matrix_number // HEADS
    head0 = matrix_number % HEADS
    row = tile_q * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    col = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]

    bias = load_bias(t, n, c, b0, head0, row, col, n.longest_q, n.longest_k)
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    over = c.SHARING * (n.batch // n.bias_batch)
    if VARIES:
        # One by one: of runs of those that see the tile, with a begin that the loop carries along,
        # triton 3.6.0 makes code that begins with the first of all every time.
        for i in tl.range(0, over, num_stages=1):
            b, head, _, nq, _, _, used, offset = sharer(i, t, n, c, b0, head0)
            if tile_state(t, n, c, b, head, tile_q, tile_k, nq, used, offset) > 0:
                acc = add_sharers(acc, bias, i, i + 1, t, n, c, b0, head0, tile_q, tile_k)
    else:
        _, _, _, nq, _, _, used, offset = sharer(0, t, n, c, b0, head0)
        state = tile_state(t, n, c, b0, head0, tile_q, tile_k, nq, used, offset)
        end = tl.where(state > 0, over, 0)
        acc = add_sharers(acc, bias, 0, end, t, n, c, b0, head0, tile_q, tile_k)
    at = at_pair(t.dbias, n.stride.dbias, b0, head0, row, col, c.BIAS_ALIGN)
    inside = (row < n.longest_q) & (col < n.longest_k)
    tl.store(at, acc.to(t.dbias.dtype.element_ty), mask=inside)
