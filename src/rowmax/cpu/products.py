"""The two matrix products of attention, over scratch tiles, in register tiles.

``from_rows``: A is stored row by row in a tile of TILE_K columns (P and dS).
``from_columns``: A is stored column by column (Q and dO transposed, or P^T and dS^T).
B is always read along its rows. Arguments are addresses and strides in elements.

``like`` is an array of the operands' dtype: float32, float64, or uint32 for pairs of
bfloat16, each two terms of the sum over k. Those of uint16 are bfloat16 for amx.py.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from .amx import STRIP
from .functions import choice, inner, of_dtype
from .vector import MR, NV, TILE_K, W, product


def _kind(dtype) -> tuple[int, ir.Type, ir.Type, int]:
    """Return lanes of a vector, LLVM's types of sums and operands, and bytes of either."""
    if dtype == types.float64:
        return max(2, W // 2), ir.DoubleType(), ir.DoubleType(), 8
    return W, ir.FloatType(), ir.IntType(32) if dtype == types.uint32 else ir.FloatType(), 4


def _panel(dtype) -> int:
    return STRIP if dtype == types.uint16 else NV * _kind(dtype)[0]


#: columns of a register tile
panel = of_dtype(_panel)
#: columns of which a step is a multiple: whole register tiles
span = of_dtype(lambda d: STRIP if d == types.uint16 else math.lcm(MR, _panel(d)))


def _tiled(name, full, single, w, size, a_row):
    """Return ``C[m, n] (+)= A[m, k] B[k, n]``; m is rounded up to MR, n is whole vectors.

    Each has its own name: Numba's cache on disk distinguishes functions by name and types, and the
    types are the same.
    """

    def multiply(m, n, k, c, c_row, a, a_stride, b, b_stride, add):
        whole = n - n % (NV * w)
        for col in range(0, whole, NV * w):
            for row in range(0, m, MR):
                c_at, a_at = c + size * (row * c_row + col), a + size * row * a_row
                full(c_at, c_row, a_at, a_stride, b + size * col, b_stride, k, add)
        for col in range(whole, n, w):
            for row in range(0, m, MR):
                c_at, a_at = c + size * (row * c_row + col), a + size * row * a_row
                single(c_at, c_row, a_at, a_stride, b + size * col, b_stride, k, add)

    multiply.__qualname__ = name
    return inner(multiply)


def _multiply(dtype, a_row):
    w, sums, operands, size = _kind(dtype)
    full, single = (product(w, MR, nv, a_row, sums, operands) for nv in (NV, 1))
    return _tiled(f"multiply_{dtype}_{a_row}", full, single, w, size, a_row)


@choice
def from_rows(like, m, n, k, c, c_row, a, b, b_stride, add) -> Any:
    """Compute ``C (+)= A B`` with A[r, i] at ``r TILE_K + i``."""
    multiply = _multiply(like.dtype, TILE_K)
    return lambda like, m, n, k, c, c_row, a, b, b_stride, add: multiply(
        m, n, k, c, c_row, a, 1, b, b_stride, add
    )


@choice
def from_columns(like, m, n, k, c, c_row, a, a_stride, b, b_stride, add) -> Any:
    """Compute ``C (+)= A B`` with A[r, i] at ``r + i a_stride``."""
    multiply = _multiply(like.dtype, 1)
    return lambda like, m, n, k, c, c_row, a, a_stride, b, b_stride, add: multiply(
        m, n, k, c, c_row, a, a_stride, b, b_stride, add
    )
