"""Copies of rows in the order in which the products read them."""

from __future__ import annotations

import numpy as np
from numba import njit

from .products import panel
from .scores import STRICT, array


@njit(fastmath=STRICT)
def pack_panels(to, rows, row_step, first, last, n, d, like):
    """Rows [first, last) as panels ``[n / panel, d, panel]``, zero past n: returns finiteness.

    ``to`` and ``rows`` are addresses of the whole head's panels and rows.
    """
    size, width = like.itemsize, panel(like)
    zero = like.dtype.type(0)
    probe = zero
    for j0 in range(first, last, width):
        out = array(to + size * j0 * d, width * d, like)
        real = max(0, min(width, n - j0))
        for j in range(real):
            row = array(rows + size * (j0 + j) * row_step, d, like)
            for c in range(d):
                out[c * width + j] = row[c]
                probe += row[c] * zero
        for j in range(real, width):
            for c in range(d):
                out[c * width + j] = zero
    return probe == zero


@njit(fastmath=STRICT)
def pack_columns(to, width, rows, row_step, n, d, factor, like):
    """``[d, width]``, the n rows as columns, times factor, zero past n: returns finiteness."""
    size = like.itemsize
    out = array(to, d * width, like)
    zero = like.dtype.type(0)
    scale = like.dtype.type(factor)
    probe = zero
    for i in range(n):
        row = array(rows + size * i * row_step, d, like)
        for c in range(d):
            out[c * width + i] = row[c] * scale
            probe += row[c] * zero
    for i in range(n, width):
        for c in range(d):
            out[c * width + i] = zero
    return probe == zero


@njit(fastmath=STRICT)
def rows_are_finite(rows, row_step, n, d, like):
    zero = like.dtype.type(0)
    probe = zero
    for i in range(n):
        row = array(rows + like.itemsize * i * row_step, d, like)
        for c in range(d):
            probe += row[c] * zero
    return probe == zero


@njit(fastmath=STRICT)
def sparse_product(c, c_row, m, a, a_row, a_step, k, b, b_row, n, like):
    """``C += A B`` in which a weight of exactly 0 takes nothing, not even NaN or inf, from B.

    The slow way, for tiles in which B is not finite: A[r, i] at ``r a_row + i a_step``.
    """
    size = like.itemsize
    weights = array(a, (m - 1) * a_row + (k - 1) * a_step + 1, like)
    for r in range(m):
        out = array(c + size * r * c_row, n, like)
        for i in range(k):
            weight = weights[r * a_row + i * a_step]
            if weight != 0:
                row = array(b + size * i * b_row, n, like)
                for x in range(n):
                    out[x] += weight * row[x]


@njit
def aligned(numbers, like):
    """Scratch memory: (the array that owns it, an address in it on a cache line)."""
    owner = np.empty(numbers + 64 // like.itemsize, like.dtype)
    return owner, (owner.ctypes.data + 63) // 64 * 64
