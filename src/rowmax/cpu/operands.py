"""Operands of the products that are not the caller's rows: transposed copies, and pairs.

On processors with a dot product of bfloat16 pairs, bfloat16 inputs stay as they are: an operand is
then a uint32 of two numbers, two terms of the sum over k. Along a head these are neighbours; along
the keys and queries of a tile, numbers j and ``j + half_of(n)`` of n, so that a pair of rows gives
a row of pairs.

On processors with tile instructions (amx.py) an operand is a bfloat16 of rows as they are, or of
pairs of neighbouring rows.

``like`` is an array of the operands' dtype: uint32 for pairs, uint16 for tile instructions, else
that of the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from .amx import STRIP, configure, release
from .few_vector import narrow
from .functions import STRICT, SUMS, array, choice, inner, of_dtype, optimised
from .products import panel, span
from .vector import MR, TILE_K, TILE_Q, W, ends, fetch_add
from .wide import (
    LANES,
    STEP,
    finite,
    multiply,
    pair_rows,
    pair_rows_with_zeros,
    shorten,
    some_turned_floats,
    some_turned_pairs,
    transpose,
    turned_floats,
    turned_pairs,
    weave,
)

HALF_K, HALF_Q = TILE_K // 2, TILE_Q // 2
_BFLOATS = (types.uint16, types.uint32)


#: True if operands are pairs
paired = of_dtype(lambda dtype: dtype == types.uint32)
#: True if operands are those of tile instructions
in_strips = of_dtype(lambda dtype: dtype == types.uint16)
#: True if operands are bfloat16
bfloats = of_dtype(lambda dtype: dtype in _BFLOATS)
#: bytes of a sum; a pair has as many
sum_size = of_dtype(lambda dtype: 4 if dtype in _BFLOATS else dtype.bitwidth // 8)
#: bytes of a number of the caller's rows
row_size = of_dtype(lambda dtype: 2 if dtype in _BFLOATS else dtype.bitwidth // 8)


@inner
def depth(like, d):
    """Return the number of operands along a head."""
    return d // 2 if paired(like) else d


@inner
def half_of(n):
    """Return half the keys or queries of a tile, rounded up to a whole vector."""
    return (n + 2 * W - 1) // (2 * W) * W


@inner
def tile_depth(like, count, n):
    """Return the number of operands along the first ``count`` of n keys or queries of a tile."""
    return min(count, half_of(n)) if paired(like) else count


@inner
def tile_rows(like, half):
    """Return how many rows of operands a tile of ``2 half`` keys or queries has."""
    return half if bfloats(like) else 2 * half


# --- transposed copies -------------------------------------------------------------------------


@choice
def pack_panels(like, to, rows, row_bytes, first, n, d) -> Any:
    """Write the tile of rows that begins at first as panels ``[rows / panel, d, panel]``.

    They are zero past n, as far as a step of columns reaches. Pairs along a head stay together, and
    d counts them. ``to`` and ``rows`` are addresses of the whole head's panels and rows.
    """
    return _strip_panels if like.dtype == types.uint16 else _plain_panels


def _strip_panels(like, to, rows, row_bytes, first, n, d):
    in_use = 0  # the copy of the last strip has to live until it is packed
    for j0 in range(first, min(first + TILE_K, n), STRIP):
        panel_at, at, step = to + 2 * j0 * d, rows + row_bytes * j0, row_bytes
        room = np.empty(0 if j0 + STRIP <= n else STRIP * d, np.uint16)
        if room.size:
            at, step = room.ctypes.data, 2 * d
            copy_rows(like, at, rows + row_bytes * j0, row_bytes, n - j0, STRIP, d)
        for j in range(0, STRIP, LANES):
            for c in range(0, d // 2, LANES):
                block = panel_at + 4 * (STRIP * c + j)
                transpose(block, 4 * STRIP, at + step * j + 4 * c, step)
        in_use += room.size
    return in_use


def _plain_panels(like, to, rows, row_bytes, first, n, d):
    """Write panels eight rows at a time: their cache lines stay in the first cache."""
    size, width, d = like.itemsize, panel(like), depth(like, d)
    step = span(like)
    last = min(first + TILE_K, (n + step - 1) // step * step)
    for j0 in range(first, last, width):
        real = max(0, min(width, n - j0))
        out = array(to + size * j0 * d, width * d, like)
        if real < width:
            out[:] = like.dtype.type(0)
        done = turn(like, to + size * j0 * d, width, rows + row_bytes * j0, row_bytes, real, d, 1.0)
        for j in range(done, real - real % 8, 8):
            _pack_eight(like, out, j, width, rows + row_bytes * (j0 + j), row_bytes, d)
        for j in range(max(done, real - real % 8), real):
            row = array(rows + row_bytes * (j0 + j), d, like)
            for c in range(d):
                out[c * width + j] = row[c]


@choice
def turn(like, to, to_row, rows, row_bytes, n, d, factor) -> Any:
    """Write n rows as columns, ``to_row`` numbers apart, times factor, except pairs. Return n.

    Columns past n are zero as far as a whole vector. Return 0, with nothing written, where rows are
    not whole vectors.
    """
    if like.dtype not in (types.float32, types.uint32):
        return lambda like, to, to_row, rows, row_bytes, n, d, factor: 0
    real = like.dtype == types.float32
    whole, some = (turned_floats, some_turned_floats) if real else (turned_pairs, some_turned_pairs)

    def compute(like, to, to_row, rows, row_bytes, n, d, factor):
        if d % W:
            return 0
        times = np.float32(factor)
        for j in range(0, n, W):
            for c in range(0, d, W):
                block, at = to + 4 * (to_row * c + j), rows + row_bytes * j + 4 * c
                if n - j >= W:
                    whole(block, 4 * to_row, at, row_bytes, W, times)
                else:
                    some(block, 4 * to_row, at, row_bytes, n - j, times)
        return n

    return compute


@inner
def _pack_eight(like, out, j, width, rows, row_bytes, d):
    a, b = array(rows, d, like), array(rows + row_bytes, d, like)
    e, f = array(rows + 2 * row_bytes, d, like), array(rows + 3 * row_bytes, d, like)
    g, h = array(rows + 4 * row_bytes, d, like), array(rows + 5 * row_bytes, d, like)
    k, l = array(rows + 6 * row_bytes, d, like), array(rows + 7 * row_bytes, d, like)
    for c in range(d):
        at = c * width + j
        out[at], out[at + 1], out[at + 2], out[at + 3] = a[c], b[c], e[c], f[c]
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = g[c], h[c], k[c], l[c]


@choice(inline="always")
def _times(x, factor) -> Any:
    """Return x times factor, pairs as they are."""
    if x == types.uint32:
        return lambda x, factor: x
    if x == types.float32:
        return lambda x, factor: x * np.float32(factor)
    return lambda x, factor: x * factor


@inner(fastmath=STRICT)
def pack_columns(like, to, rows, row_bytes, n, d, factor):
    """Write n rows as columns ``[d, TILE_Q]``, times factor, except pairs.

    Columns past n are zero as far as products read.
    """
    d = depth(like, d)
    out = array(to, d * TILE_Q, like)
    zero = like.dtype.type(0)
    written = turn(like, to, TILE_Q, rows, row_bytes, n, d, factor)
    for i in range(written, n):
        row = array(rows + row_bytes * i, d, like)
        for c in range(d):
            out[c * TILE_Q + i] = _times(row[c], factor)
    written = (written + W - 1) // W * W if written else n
    whole = (n + MR - 1) // MR * MR  # rows of the products
    for c in range(d if written < whole else 0):
        for i in range(written, whole):
            out[c * TILE_Q + i] = zero


# --- pairs -------------------------------------------------------------------------------------


@inner
def _bfloat(x):
    """Return a float32 rounded to a bfloat16 (to nearest, ties to even), as bits."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))


@inner
def _pair(low, high):
    return np.uint32(np.uint32(high << np.uint32(16)) | low)


@choice
def fold_row(like, to, row, n) -> Any:
    """Write a row of weights of a tile of n keys as pairs of keys, to the address ``to``."""
    if like.dtype != types.uint32:
        return lambda like, to, row, n: None

    def fold(like, to, row, n):
        half = half_of(n)
        first, both = row.ctypes.data, max(0, row.size - half)
        alone = min(row.size, half) - both
        if both:
            pair_rows(to, first, first + 4 * half, both)
        if alone:
            pair_rows_with_zeros(to + 4 * both, first + 4 * both, alone)

    return fold


@choice
def fold_rows(like, tile, n, width) -> Any:
    """Fold n rows of weights into pairs of queries, in place."""
    if like.dtype != types.uint32:
        return lambda like, tile, n, width: None

    def fold(like, tile, n, width):
        half = half_of(n)
        for i in range(min(n, half)):
            row = tile + 4 * TILE_K * i
            if i + half < n:
                pair_rows(row, row, row + 4 * TILE_K * half, width)
            else:
                pair_rows_with_zeros(row, row, width)

    return fold


@choice
def pack_rows(like, to, padded, rows, row_bytes, n, d) -> Any:
    """Write contiguous rows of a tile; those of bfloat16 as pairs ``[half_of(n), padded]``.

    Pairs are zero past n and d. Rows of one head lie H D apart, which uses few sets of a cache, and
    products read them often.
    """
    if like.dtype == types.uint16:
        return lambda like, to, padded, rows, row_bytes, n, d: pack_neighbours(
            like, to, rows, row_bytes, n, padded
        )
    if like.dtype != types.uint32:

        def copy(like, to, padded, rows, row_bytes, n, d):
            for i in range(n):
                out = array(to + like.itemsize * padded * i, padded, like)
                row = array(rows + row_bytes * i, padded, like)
                for c in range(padded):
                    out[c] = row[c]

        return copy

    def pack(like, to, padded, rows, row_bytes, n, d):
        half = half_of(n)
        for i in range(min(n, half)):
            out = array(to + 4 * padded * i, padded, like)
            row = array(rows + row_bytes * i, d, np.uint16)
            if i + half < n:
                second = array(rows + row_bytes * (i + half), d, np.uint16)
                for c in range(d):
                    out[c] = _pair(np.uint32(row[c]), np.uint32(second[c]))
            else:
                for c in range(d):
                    out[c] = np.uint32(row[c])
            for c in range(d, padded):  # Numba drops an assignment to a slice of an inlined array
                out[c] = np.uint32(0)

    return pack


@inner
def pack_tiles(like, to, rows, row_bytes, n, half, d):
    """Write n rows of d, whole vectors, by ``pack_rows``: tiles of ``2 half`` of them."""
    for tile in range((n + 2 * half - 1) // (2 * half)):
        first = 2 * half * tile
        at = to + sum_size(like) * d * tile_rows(like, half) * tile
        count = min(n - first, 2 * half)
        pack_rows(like, at, d, rows + row_bytes * first, row_bytes, count, d)


# --- operands of tile instructions ---------------------------------------------------------------


@choice
def begin_tiles(like) -> Any:
    """Configure the tile registers of a thread that uses them."""
    return (lambda like: configure()) if like.dtype == types.uint16 else (lambda like: 0)


@choice
def end_tiles(like) -> Any:
    """Release the tile registers of a thread that used them."""
    return (lambda like: release()) if like.dtype == types.uint16 else (lambda like: None)


@optimised  # as ``inner``, forwards in bfloat16 took 1.1 times as long
def copy_rows(like, to, rows, row_bytes, n, count, d):
    """Write n rows of d bfloat16 to contiguous rows, zero from n to count."""
    out = array(to, count * d, like)
    for i in range(min(n, count)):
        row = array(rows + row_bytes * i, d, like)
        for c in range(d):
            out[i * d + c] = row[c]
    for c in range(min(n, count) * d, count * d):
        out[c] = np.uint16(0)


@inner
def pack_neighbours(like, to, rows, row_bytes, n, d):
    """Write n rows as pairs of neighbouring rows ``[n / 2, d]``, zero up to a whole strip."""
    in_use = 0
    for i0 in range(0, n, STRIP):
        at, step = rows + row_bytes * i0, row_bytes
        room = np.empty(0 if i0 + STRIP <= n else STRIP * d, np.uint16)
        if room.size:
            at, step = room.ctypes.data, 2 * d
            copy_rows(like, at, rows + row_bytes * i0, row_bytes, n - i0, STRIP, d)
        for i in range(0, STRIP, 2):
            weave(to + 2 * d * (i0 + i), at + step * i, at + step * (i + 1), d)
        in_use += room.size
    return in_use


@inner
def pack_transposed(to, pairs, count, d):
    """Write pairs of neighbouring rows ``[count / 2, d]`` as d rows of ``count`` bfloat16."""
    for i in range(0, count // 2, LANES):
        for c in range(0, d, LANES):
            transpose(to + 2 * (count * c + 2 * i), 2 * count, pairs + 4 * (d * i + c), 4 * d)


# --- inf and NaN -------------------------------------------------------------------------------


@choice
def count_infinite(like, rows, row_bytes, n, d, counter) -> Any:
    """Add 1 to the counter at an address if rows of bfloat16 operands hold inf or NaN.

    Products of such rows skip no pair, so the call is computed again in float32.
    """
    if like.dtype not in _BFLOATS:
        return lambda like, rows, row_bytes, n, d, counter: None

    def count(like, rows, row_bytes, n, d, counter):
        if not _bfloats_are_finite(rows, row_bytes, n, d):
            fetch_add(counter, 1)

    return count


@inner
def _bfloats_are_finite(rows, row_bytes, n, d):
    """Return True if no exponent is that of inf and NaN."""
    whole, good = d // STEP * STEP, True
    for i in range(n):
        at = rows + row_bytes * i
        if whole:
            good &= finite(at, whole)
        if whole < d:
            rest = array(at + 2 * whole, d - whole, np.uint16)
            for c in range(d - whole):
                good &= (rest[c] & np.uint16(0x7F80)) != np.uint16(0x7F80)
    return good


@choice
def rows_are_finite(like, rows, row_bytes, n, d) -> Any:
    """Return True if the caller's rows hold neither inf nor NaN; operands of bfloat16 never do."""
    if like.dtype in _BFLOATS:
        return lambda like, rows, row_bytes, n, d: True
    return lambda like, rows, row_bytes, n, d: _plain_rows_are_finite(like, rows, row_bytes, n, d)


@inner(fastmath=SUMS)
def _plain_rows_are_finite(like, rows, row_bytes, n, d):
    zero = like.dtype.type(0)
    probe = zero
    for i in range(n):
        row = array(rows + row_bytes * i, d, like)
        for c in range(d):
            probe += row[c] * zero
    return probe == zero


# --- rows as they are --------------------------------------------------------------------------


@choice
def rescale(like, row, factor) -> Any:
    """Scale the scores of bfloat16 operands: scaling the queries instead would round them."""
    if like.dtype not in _BFLOATS:
        return lambda like, row, factor: None
    return lambda like, row, factor: multiply(row.ctypes.data, row.size, np.float32(factor))


@choice
def store(like, to, row, factor) -> Any:
    """Write a row of sums, times factor, in the caller's dtype, to the address ``to``."""
    if like.dtype == types.int16:  # float16

        def half(like, to, row, factor):
            for c in range(row.size):
                row[c] *= factor
            narrow(like, to, row.ctypes.data, row.size)

        return half

    if like.dtype not in _BFLOATS:

        def plain(like, to, row, factor):
            out = array(to, row.size, like)
            for c in range(row.size):
                out[c] = row[c] * factor

        return plain

    def rounded(like, to, row, factor):
        if in_strips(like) and row.size % STEP == 0:
            shorten(to, row.ctypes.data, row.size, np.float32(factor))
            return
        out = array(to, row.size, np.uint16)
        for c in range(row.size):
            out[c] = np.uint16(_bfloat(row[c] * factor))

    return rounded


@inner(fastmath=STRICT)
def sparse_product(c, c_row, m, weights, k, b, b_row, n, skip, like):
    """Add ``A B`` to C without the weights equal to ``skip``, whose rows of B may be NaN or inf.

    It is slow: only for tiles in which B is not finite. ``weights`` is (address, row, stride), with
    A[r, i] at ``r row + i stride``.
    """
    size = like.itemsize
    address, a_row, a_stride = weights
    A = array(address, (m - 1) * a_row + (k - 1) * a_stride + 1, like)
    for r in range(m):
        out = array(c + size * r * c_row, n, like)
        for i in range(k):
            weight = A[r * a_row + i * a_stride]
            if weight != skip:
                row = array(b + size * i * b_row, n, like)
                for x in range(n):
                    out[x] += weight * row[x]


@inner
def memory_of(like, rows, columns):
    """Return scratch memory: (the array that owns it, the address of each part in it).

    Parts have ``rows`` rows of so many numbers; the first begins on a cache line.
    """
    row = like.itemsize * rows
    owner = np.empty(ends(0, row, columns)[-1] + 64, np.uint8)
    return owner, ends((owner.ctypes.data + 63) // 64 * 64, row, columns)[:-1]


@inner
def unowned(x):
    """Return the numbers of an array that outlives them, without its count of references.

    A call with a counted array adds to the count and subtracts: two locked instructions.
    """
    return array(x.ctypes.data, x.size, x)
