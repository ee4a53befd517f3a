"""Exercises of chapter 9: kernels in Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x, out, rows, cols, x_row, x_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store x ``[rows, cols]``, of any strides, as the contiguous ``out [cols, rows]``.

    Program (a, b) has rows ``a * ROWS`` and columns ``b * COLS`` and on.
    """
    raise NotImplementedError


@triton.jit
def softmax_kernel(x, out, n, BLOCK: tl.constexpr):
    """Store the softmax of row ``program_id(0)`` of x ``[rows, n]``, by blocks of the row.

    x and out are contiguous. The row is read twice. A row of minus infinity has zeros.
    """
    raise NotImplementedError


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
    raise NotImplementedError
