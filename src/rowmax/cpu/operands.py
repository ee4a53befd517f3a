"""What the products read, where it is not what the caller gave: transposed copies, and pairs.

On processors with a dot product of bfloat16 pairs, bfloat16 inputs stay what they are: an
operand is then a uint32 of two numbers that are two steps of k apart from each other. Along a
head these are neighbours; along keys and queries, number j of a tile's first half and number j
of its second, so that making pairs is a matter of whole rows.

``of`` is an array of the operands' dtype: uint32 for pairs, else the dtype of the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from .kernel import kernel
from .products import panel, span
from .scores import STRICT, SUMS, array, bfloat_to_float
from .vector import TILE_K, TILE_Q

HALF_K, HALF_Q = TILE_K // 2, TILE_Q // 2


def paired(of) -> Any:
    """Whether operands are pairs."""


@overload(paired, inline="always")
def _paired(of):
    pairs = of.dtype == types.uint32
    return lambda of: pairs


@njit
def row_size(of):
    """Bytes of a number in the caller's rows."""
    return 2 if paired(of) else of.itemsize


@njit
def depth(of, d):
    """Steps of k along a head."""
    return d // 2 if paired(of) else d


@njit
def steps(of, count, half):
    """Steps of k along ``count`` keys or queries of a tile whose half is ``half``."""
    return min(count, half) if paired(of) else count


# --- transposed copies -------------------------------------------------------------------------


@njit
def pack_panels(of, to, rows, row_bytes, first, n, d):
    """The tile of rows that begins at first as panels ``[rows / panel, d, panel]``, zero past n,
    as far as a step of columns reaches.

    ``to`` and ``rows`` are addresses of the whole head's panels and rows. A panel is written
    eight rows at a time: their cache lines stay at hand while its own are filled in turn.
    """
    size, width, d = of.itemsize, panel(of), depth(of, d)
    step = span(of)
    last = min(first + TILE_K, (n + step - 1) // step * step)
    for j0 in range(first, last, width):
        real = max(0, min(width, n - j0))
        out = array(to + size * j0 * d, width * d, of)
        if real < width:
            out[:] = of.dtype.type(0)
        for j in range(0, real - real % 8, 8):
            _pack_eight(of, out, j, width, rows + row_bytes * (j0 + j), row_bytes, d)
        for j in range(real - real % 8, real):
            row = array(rows + row_bytes * (j0 + j), d, of)
            for c in range(d):
                out[c * width + j] = row[c]


@njit
def _pack_eight(of, out, j, width, rows, step, d):
    a, b = array(rows, d, of), array(rows + step, d, of)
    e, f = array(rows + 2 * step, d, of), array(rows + 3 * step, d, of)
    g, h = array(rows + 4 * step, d, of), array(rows + 5 * step, d, of)
    k, l = array(rows + 6 * step, d, of), array(rows + 7 * step, d, of)
    for c in range(d):
        at = c * width + j
        out[at], out[at + 1], out[at + 2], out[at + 3] = a[c], b[c], e[c], f[c]
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = g[c], h[c], k[c], l[c]


def _times(x, factor) -> Any: ...


@overload(_times, inline="always")
def _times_impl(x, factor):
    if x == types.uint32:
        return lambda x, factor: x
    if x == types.float32:
        return lambda x, factor: x * np.float32(factor)
    return lambda x, factor: x * factor


@njit(fastmath=STRICT)
def pack_columns(of, to, rows, row_bytes, n, d, factor):
    """``[d, TILE_Q]``: the n rows as columns, zero past n; times factor, but for pairs."""
    d = depth(of, d)
    out = array(to, d * TILE_Q, of)
    zero = of.dtype.type(0)
    for i in range(n):
        row = array(rows + row_bytes * i, d, of)
        for c in range(d):
            out[c * TILE_Q + i] = _times(row[c], factor)
    for i in range(n, TILE_Q):
        for c in range(d):
            out[c * TILE_Q + i] = zero


# --- pairs -------------------------------------------------------------------------------------


@njit
def _bfloat(x):
    """The bits of a float32, rounded to those of a bfloat16 (to nearest, ties to even)."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))


@njit
def _pair(low, high):
    return np.uint32(np.uint32(high << np.uint32(16)) | low)


def fold_row(of, to, row) -> Any:
    """A row of weights as pairs of keys, (j, j + HALF_K), at the address ``to``."""


@overload(fold_row)
def _fold_row(of, to, row):
    if of.dtype != types.uint32:
        return lambda of, to, row: None

    def fold(of, to, row):
        out = array(to, HALF_K, of)
        second = row[HALF_K:]
        for j in range(second.size):
            out[j] = _pair(_bfloat(row[j]), _bfloat(second[j]))
        for j in range(min(row.size, HALF_K) - second.size):
            out[second.size + j] = _bfloat(row[second.size + j])

    return fold


def fold_rows(of, tile, n, width) -> Any:
    """n rows of weights as pairs of queries, (i, i + HALF_Q), in place."""


@overload(fold_rows)
def _fold_rows(of, tile, n, width):
    if of.dtype != types.uint32:
        return lambda of, tile, n, width: None

    floats = np.float32

    def fold(of, tile, n, width):
        like = np.empty(0, floats)
        for i in range(min(n, HALF_Q)):
            row = array(tile + 4 * TILE_K * i, width, like)
            out = row.view(np.uint32)
            if i + HALF_Q < n:
                second = array(tile + 4 * TILE_K * (i + HALF_Q), width, like)
                for j in range(width):
                    out[j] = _pair(_bfloat(row[j]), _bfloat(second[j]))
            else:
                for j in range(width):
                    out[j] = _bfloat(row[j])

    return fold


def pack_pairs(of, to, wide, rows, row_bytes, n, half, d) -> Any:
    """Rows of bfloat16 as pairs ``[half, wide]`` of (i, i + half), zero past n and past d."""


@overload(pack_pairs)
def _pack_pairs(of, to, wide, rows, row_bytes, n, half, d):
    if of.dtype != types.uint32:
        return lambda of, to, wide, rows, row_bytes, n, half, d: None

    def pack(of, to, wide, rows, row_bytes, n, half, d):
        bits = np.empty(0, np.uint16)
        for i in range(min(n, half)):
            out = array(to + 4 * wide * i, wide, of)
            row = array(rows + row_bytes * i, d, bits)
            second = array(rows + row_bytes * (i + half), d if i + half < n else 0, bits)
            for c in range(second.size):
                out[c] = _pair(np.uint32(row[c]), np.uint32(second[c]))
            for c in range(d - second.size):
                out[second.size + c] = np.uint32(row[second.size + c])
            out[d:] = np.uint32(0)

    return pack


@kernel
def bfloats_are_finite(address, sizes, step_b, step_n, step_h):
    """Of rows ``[b, n, h, d]`` of bfloat16: no exponent is the one of inf and NaN."""
    b, n, h, d = sizes
    bits = np.empty(0, np.uint16)
    bad = np.uint16(0)
    for i in range(b):
        for j in range(n):
            for k in range(h):
                row = array(address + 2 * (i * step_b + j * step_n + k * step_h), d, bits)
                for c in range(d):
                    bad |= np.uint16((row[c] & np.uint16(0x7F80)) == np.uint16(0x7F80))
    return bad == 0


# --- rows as they are --------------------------------------------------------------------------


def rescale(of, row, factor) -> Any:
    """Scores of pairs, whose queries could not be scaled beforehand without rounding."""


@overload(rescale)
def _rescale(of, row, factor):
    if of.dtype != types.uint32:
        return lambda of, row, factor: None

    def scale(of, row, factor):
        for j in range(row.size):
            row[j] *= np.float32(factor)

    return scale


def dot(of, a, b, n) -> Any:
    """``a . b`` of two of the caller's rows, by their addresses."""


@overload(dot)
def _dot(of, a, b, n):
    if of.dtype == types.uint32:
        return lambda of, a, b, n: _dot_pairs(a, b, n)
    return lambda of, a, b, n: _dot_plain(of, a, b, n)


@njit(fastmath=SUMS)
def _dot_plain(of, a, b, n):
    x, y = array(a, n, of), array(b, n, of)
    total = of.dtype.type(0)
    for c in range(n):
        total += x[c] * y[c]
    return total


@njit(fastmath=SUMS)
def _dot_pairs(a, b, n):
    bits = np.empty(0, np.uint16)
    x, y = array(a, n, bits), array(b, n, bits)
    total = np.float32(0)
    for c in range(n):
        total += bfloat_to_float(x[c]) * bfloat_to_float(y[c])
    return total


def store(of, to, row, factor) -> Any:
    """A row of sums, times factor, in the caller's dtype, at the address ``to``."""


@overload(store)
def _store(of, to, row, factor):
    if of.dtype != types.uint32:

        def plain(of, to, row, factor):
            out = array(to, row.size, of)
            for c in range(row.size):
                out[c] = row[c] * factor

        return plain

    def rounded(of, to, row, factor):
        out = array(to, row.size, np.empty(0, np.uint16))
        for c in range(row.size):
            out[c] = np.uint16(_bfloat(row[c] * factor))

    return rounded


def rows_are_finite(of, rows, row_bytes, n, d) -> Any:
    """Whether the caller's rows hold neither inf nor NaN; of pairs this is known beforehand."""


@overload(rows_are_finite)
def _rows_are_finite(of, rows, row_bytes, n, d):
    if of.dtype == types.uint32:
        return lambda of, rows, row_bytes, n, d: True
    return lambda of, rows, row_bytes, n, d: _plain_rows_are_finite(of, rows, row_bytes, n, d)


@njit(fastmath=SUMS)
def _plain_rows_are_finite(of, rows, row_bytes, n, d):
    zero = of.dtype.type(0)
    probe = zero
    for i in range(n):
        row = array(rows + row_bytes * i, d, of)
        for c in range(d):
            probe += row[c] * zero
    return probe == zero


@njit(fastmath=STRICT)
def sparse_product(c, c_row, m, a, a_row, a_step, k, b, b_row, n, skip, like):
    """``C += A B`` in which a weight of ``skip`` takes nothing, not even NaN or inf, from B.

    The slow way, for tiles in which B is not finite: A[r, i] at ``r a_row + i a_step``.
    """
    size = like.itemsize
    weights = array(a, (m - 1) * a_row + (k - 1) * a_step + 1, like)
    for r in range(m):
        out = array(c + size * r * c_row, n, like)
        for i in range(k):
            weight = weights[r * a_row + i * a_step]
            if weight != skip:
                row = array(b + size * i * b_row, n, like)
                for x in range(n):
                    out[x] += weight * row[x]


@njit
def aligned(numbers, like):
    """Scratch memory: (the array that owns it, an address in it on a cache line)."""
    owner = np.empty(numbers + 64 // like.itemsize, like.dtype)
    return owner, (owner.ctypes.data + 63) // 64 * 64
