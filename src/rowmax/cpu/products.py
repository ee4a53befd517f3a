"""The two matrix products of attention, over scratch tiles, in register tiles.

``from_rows``: A lies row by row in a tile of TILE_K columns (P and dS as they were made);
``from_columns``: A lies column by column (Q and dO transposed, or P and dS taken as P^T, dS^T).
B is always read along its rows. Arguments are addresses and steps in elements.

``of`` is an array of the operands' dtype: float32, float64, or uint32 for pairs of bfloat16,
each two steps of k.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import overload, register_jitable

from .vector import MR, NV, TILE_K, W, product


def _kind(dtype) -> tuple[int, ir.Type, ir.Type, int]:
    """Lanes of a vector, LLVM's types of sums and operands, and bytes of either."""
    if dtype == types.float64:
        return max(2, W // 2), ir.DoubleType(), ir.DoubleType(), 8
    return W, ir.FloatType(), ir.IntType(32) if dtype == types.uint32 else ir.FloatType(), 4


def panel(of) -> Any:
    """Columns of a register tile."""


@overload(panel)
def _panel(of):
    nr = NV * _kind(of.dtype)[0]
    return lambda of: nr


def span(of) -> Any:
    """Columns of a tile are worked on in multiples of this: whole register tiles either way."""


@overload(span)
def _span(of):
    step = math.lcm(MR, NV * _kind(of.dtype)[0])
    return lambda of: step


def _tiled(name, full, single, w, size, row_step):
    """``C[m, n] (+)= A[m, k] B[k, n]``; m is rounded up to MR, n is a multiple of a vector.

    The types of its arguments do not tell one from another, so each has a name of its own: Numba
    keeps apart what is compiled in one process, but not what comes from its cache on disk.
    """

    def multiply(m, n, k, c, c_row, a, a_step, b, b_step, add):
        whole = n - n % (NV * w)
        for col in range(0, whole, NV * w):
            for row in range(0, m, MR):
                full(
                    c + size * (row * c_row + col),
                    c_row,
                    a + size * row * row_step,
                    a_step,
                    b + size * col,
                    b_step,
                    k,
                    add,
                )
        for col in range(whole, n, w):
            for row in range(0, m, MR):
                single(
                    c + size * (row * c_row + col),
                    c_row,
                    a + size * row * row_step,
                    a_step,
                    b + size * col,
                    b_step,
                    k,
                    add,
                )

    multiply.__qualname__ = name
    return register_jitable(multiply)


def _multiply(dtype, row_step):
    w, sums, operands, size = _kind(dtype)
    full, single = (product(w, MR, nv, row_step, sums, operands) for nv in (NV, 1))
    return _tiled(f"multiply_{dtype}_{row_step}", full, single, w, size, row_step)


def from_rows(of, m, n, k, c, c_row, a, b, b_step, add) -> Any:
    """C (+)= A B, A[r, i] at ``r TILE_K + i``."""


@overload(from_rows)
def _from_rows(of, m, n, k, c, c_row, a, b, b_step, add):
    multiply = _multiply(of.dtype, TILE_K)
    return lambda of, m, n, k, c, c_row, a, b, b_step, add: multiply(
        m, n, k, c, c_row, a, 1, b, b_step, add
    )


def from_columns(of, m, n, k, c, c_row, a, a_step, b, b_step, add) -> Any:
    """C (+)= A B, A[r, i] at ``r + i a_step``."""


@overload(from_columns)
def _from_columns(of, m, n, k, c, c_row, a, a_step, b, b_step, add):
    multiply = _multiply(of.dtype, 1)
    return lambda of, m, n, k, c, c_row, a, a_step, b, b_step, add: multiply(
        m, n, k, c, c_row, a, a_step, b, b_step, add
    )
