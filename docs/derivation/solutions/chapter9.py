"""Solutions of chapter 9: kernels in Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x, out, rows, cols, x_row, x_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store x ``[rows, cols]``, of any strides, as the contiguous ``out [cols, rows]``.

    Program (a, b) has rows ``a * ROWS`` and columns ``b * COLS`` and on.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (i < rows) & (j < cols)
    tile = tl.load(x + i * x_row + j * x_col, mask=inside)
    tl.store(out + j * rows + i, tile, mask=inside)


@triton.jit
def softmax_kernel(x, out, n, BLOCK: tl.constexpr):
    """Store the softmax of row ``program_id(0)`` of x ``[rows, n]``, by blocks of the row.

    x and out are contiguous. The row is read twice. A row of minus infinity has zeros.
    """
    row = tl.program_id(0) * n
    m = float("-inf")
    l = 0.0
    for j0 in range(0, n, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        s = tl.load(x + row + j, mask=j < n, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp(m - base) + tl.sum(tl.exp(s - base), 0)
        m = m_new
    base = tl.where(m == float("-inf"), 0.0, m)
    divisor = tl.where(l == 0.0, 1.0, l)
    for j0 in range(0, n, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        s = tl.load(x + row + j, mask=j < n, other=float("-inf"))
        tl.store(out + row + j, tl.exp(s - base) / divisor, mask=j < n)


@triton.jit
def forward_kernel(
    q: Any, k: Any, v: Any, out: Any, lse: Any, sizes: Any, limits: Any, scale: Any,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store out ``[nq, D]`` and lse ``[nq]`` of one tile of queries of one head.

    All tensors are contiguous, k and v ``[nk, D]``. sizes is (nq, nk), limits (left, right): query
    i sees key j if ``-left <= j - (i + nk - nq) <= right``. Only tiles of keys that some query of
    the tile sees are loaded: the checks fill all other keys with NaN.
    """
    nq, nk = sizes[0], sizes[1]
    offset = nk - nq
    i0 = tl.program_id(0) * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)[None, :]
    inside = (i < nq)[:, None]
    q_tile = tl.load(q + i[:, None] * D + d, mask=inside, other=0.0)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q, D], tl.float32)
    last = tl.minimum(i0 + BLOCK_Q, nq) - 1
    low = tl.maximum(i0 + offset - limits[0], 0) // BLOCK_K * BLOCK_K
    high = tl.minimum(last + offset + limits[1] + 1, nk)
    for j0 in range(low, high, BLOCK_K):
        j = j0 + tl.arange(0, BLOCK_K)
        at = j[:, None] * D + d
        k_tile = tl.load(k + at, mask=(j < nk)[:, None], other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        ahead = j[None, :] - (i[:, None] + offset)
        seen = (ahead >= -limits[0]) & (ahead <= limits[1]) & (j < nk)[None, :]
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - base[:, None])
        delta = tl.exp(m - base)
        l = l * delta + tl.sum(p, 1)
        v_tile = tl.load(v + at, mask=(j < nk)[:, None], other=0.0)
        total = total * delta[:, None] + tl.dot(p, v_tile, input_precision="ieee")
        m = m_new
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    tl.store(out + i[:, None] * D + d, total / l[:, None], mask=inside)
    tl.store(lse + i, tl.where(empty, float("-inf"), m + tl.log(l)), mask=i < nq)
