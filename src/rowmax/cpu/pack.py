"""Copies of rows in the order in which the products read them."""

from __future__ import annotations

import numpy as np
from numba import njit

from .products import panel
from .scores import STRICT, SUMS, array


@njit(fastmath=STRICT)
def pack_panels(to, rows, row_step, first, last, n, d, like):
    """Rows [first, last) as panels ``[n / panel, d, panel]``, zero past n.

    ``to`` and ``rows`` are addresses of the whole head's panels and rows. A panel is written
    eight rows at a time: their cache lines stay at hand while its own are filled in turn.
    """
    size, width = like.itemsize, panel(like)
    for j0 in range(first, last, width):
        real = max(0, min(width, n - j0))
        out = array(to + size * j0 * d, width * d, like)
        if real < width:
            out[:] = like.dtype.type(0)
        for j in range(0, real - real % 8, 8):
            pack_eight(out, j, width, rows + size * (j0 + j) * row_step, row_step, d, like)
        for j in range(real - real % 8, real):
            row = array(rows + size * (j0 + j) * row_step, d, like)
            for c in range(d):
                out[c * width + j] = row[c]


@njit(fastmath=STRICT)
def pack_eight(out, j, width, rows, row_step, d, like):
    step = like.itemsize * row_step
    a, b = array(rows, d, like), array(rows + step, d, like)
    e, f = array(rows + 2 * step, d, like), array(rows + 3 * step, d, like)
    g, h = array(rows + 4 * step, d, like), array(rows + 5 * step, d, like)
    k, l = array(rows + 6 * step, d, like), array(rows + 7 * step, d, like)
    for c in range(d):
        at = c * width + j
        out[at], out[at + 1], out[at + 2], out[at + 3] = a[c], b[c], e[c], f[c]
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = g[c], h[c], k[c], l[c]


@njit(fastmath=STRICT)
def pack_columns(to, width, rows, row_step, n, d, factor, like):
    """``[d, width]``: the n rows as columns, times factor, zero past n."""
    size = like.itemsize
    out = array(to, d * width, like)
    zero, scale = like.dtype.type(0), like.dtype.type(factor)
    for i in range(n):
        row = array(rows + size * i * row_step, d, like)
        for c in range(d):
            out[c * width + i] = row[c] * scale
    for i in range(n, width):
        for c in range(d):
            out[c * width + i] = zero


@njit(fastmath=SUMS)
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
