"""The steps of one row of one tile: its scores, their exponentials, what dropout keeps.

A row is a stretch of the score tile, -inf where masked: in natural units where
``Problem.natural``, else in base 2, as ``s log2(e)``. Each loop here is over the columns of a row
and becomes vector code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import (
    carray,  # pyright: ignore[reportPrivateImportUsage]
    njit,
    types,
)
from numba.extending import overload, register_jitable

from ..rules.dropout import INCREMENTS, M0, M1, ROUNDS
from .vector import pointer_to

# ``(2^f - 1) / f`` on [-1/2, 1/2], by the Remez algorithm: relative errors 1.1e-8 and 1.8e-17.
_EXP2_32 = (
    0.69314718792669302455,
    0.24022649794962323386,
    0.055503574336428407857,
    0.0096182374948951896772,
    0.0013390735477510891682,
    0.00015403512372125907769,
)
_EXP2_64 = (
    0.6931471805599453112,
    0.24022650695910097888,
    0.055504108664821236534,
    0.0096181291076070656695,
    0.0013333558146531632846,
    0.00015403530441480679679,
    0.00001525273370121467249,
    1.3215442724231275498e-6,
    1.0178121299157636101e-7,
    7.0725617019006722852e-9,
    4.4455372295661199996e-10,
)

LOG2E = math.log2(math.e)

STRICT = {"contract", "nsz"}  # keeps NaN, inf and the order of additions
SUMS = {"contract", "nsz", "reassoc"}  # lets a sum be kept in the lanes of a vector


def array(address, n, like) -> Any:
    """The n numbers at an address, of ``like``'s dtype."""


@overload(array, inline="always")
def _array(address, n, like):
    return lambda address, n, like: carray(pointer_to(address, like), n)


def number(value, x) -> Any:
    """The constant in the type of x: a bare one would make the arithmetic double."""


@overload(number, inline="always")
def _number(value, x):
    real = np.float64 if x == types.float64 else np.float32
    return lambda value, x: real(value)


def exponential(x) -> Any:
    """(2^r, g) with ``2^x = 2^r + 2^r g``, g = 2^(x - r) - 1 small; 0 from -127 (-1023) down."""


@overload(exponential)
def _exponential(x):
    return _exponential64 if x == types.float64 else _exponential32


@register_jitable
def _exponential32(x):
    x = np.float32(-127) if x < np.float32(-127) else x  # in this order a NaN stays
    x = np.float32(128) if x > np.float32(128) else x
    r = np.floor(x + np.float32(0.5))
    f = x - r
    g = np.float32(_EXP2_32[5])
    g = g * f + np.float32(_EXP2_32[4])
    g = g * f + np.float32(_EXP2_32[3])
    g = g * f + np.float32(_EXP2_32[2])
    g = g * f + np.float32(_EXP2_32[1])
    g = g * f + np.float32(_EXP2_32[0])
    power = np.int32((np.int32(r) + np.int32(127)) << np.int32(23))  # int32 sums are int64 here
    return power.view(np.float32), g * f


@register_jitable
def _exponential64(x):
    x = -1023.0 if x < -1023.0 else x
    x = 1024.0 if x > 1024.0 else x
    r = np.floor(x + 0.5)
    f = x - r
    g = _EXP2_64[10]
    for n in range(9, -1, -1):
        g = g * f + _EXP2_64[n]
    power = np.int64((np.int64(r) + np.int64(1023)) << np.int64(52))
    return power.view(np.float64), g * f


@njit(fastmath=STRICT)
def exp2(x):
    power, g = exponential(x)
    return power + power * g


@njit(fastmath=STRICT)
def tanh(x):
    """Accurate near 0 as well: ``(e^2x - 1) / (e^2x + 1)`` from ``e^2x - 1`` itself."""
    one = number(1, x)
    power, g = exponential(x * number(2 * LOG2E, x))
    minus1 = (power - one) + power * g
    return one if x > number(20, x) else minus1 / (minus1 + number(2, x))


def ordered(x) -> Any:
    """A float as an integer of the same order, and back: it is its own inverse."""


@overload(ordered, inline="always")
def _ordered(x):
    if x == types.int64:
        return lambda x: np.int64(x ^ ((x >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF)))
    return lambda x: np.int32(x ^ np.int32(np.int32(x >> np.int32(31)) & np.int32(0x7FFFFFFF)))


def row_max(row) -> Any:
    """The greatest score. Compared as integers, which the compiler takes a vector at a time
    (it will not do that to floats, whose maximum is not associative where there is NaN)."""


@overload(row_max)
def _row_max(row):
    double = row.dtype == types.float64
    whole, real = (np.int64, np.float64) if double else (np.int32, np.float32)
    least = -(2**63) if double else -(2**31)

    def compute(row):
        bits = row.view(whole)
        m = whole(least)
        for j in range(bits.size):
            x = ordered(bits[j])
            m = x if x > m else m
        return whole(ordered(m)).view(real)

    return compute


@njit(fastmath=STRICT)
def power(x, natural):
    """``e^x`` of a difference of natural scores, ``2^x`` of one in base 2."""
    return exp2(x * number(LOG2E, x)) if natural else exp2(x)


@njit(fastmath=SUMS)
def exponentials(row, shift, natural):
    """Each score s becomes ``power(s - shift)``; returns their sum."""
    total, unit = number(0, shift), number(LOG2E, shift)
    if natural:
        for j in range(row.size):
            p = exp2((row[j] - shift) * unit)
            row[j] = p
            total += p
    else:
        for j in range(row.size):
            p = exp2(row[j] - shift)
            row[j] = p
            total += p
    return total


@njit(fastmath=STRICT)
def cap(row, factor, size):
    """x/c becomes ``size tanh(x/c)``; factor, if wanted, ``1 - tanh^2``."""
    unit = row.dtype.type(size)
    one = row.dtype.type(1)
    if factor.size:
        for j in range(row.size):
            y = tanh(row[j])
            factor[j] = one - y * y
            row[j] = y * unit
    else:
        for j in range(row.size):
            row[j] = tanh(row[j]) * unit


@njit
def bfloat_to_float(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(fastmath=STRICT)
def half_to_float(bits):
    """A float16 by its bits: subnormals come out right, inf and NaN are widened by hand."""
    magnitude = np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13))
    value = magnitude.view(np.float32) * np.float32(2.0**112)
    special = np.uint32(magnitude | np.uint32(0x7F800000)).view(np.float32)
    value = special if magnitude >= np.uint32(0x0F800000) else value
    return -value if bits & np.uint16(0x8000) else value


@njit(fastmath=STRICT)
def add_bias(row, address, kind, step):
    """Adds the bias; kind is its dtype, step 0 where it broadcasts along keys."""
    n = row.size
    reach = max(1, 1 + (n - 1) * step)
    if kind == 0:
        b32 = array(address, reach, np.empty(0, np.float32))
        if step == 1:
            for j in range(n):
                row[j] += b32[j]
        else:
            for j in range(n):
                row[j] += b32[j * step]
    elif kind == 1:
        b64 = array(address, reach, np.empty(0, np.float64))
        for j in range(n):
            row[j] += row.dtype.type(b64[j * step])
    elif kind == 2:
        brain = array(address, reach, np.empty(0, np.uint16))
        for j in range(n):
            row[j] += bfloat_to_float(brain[j * step])
    else:
        half = array(address, reach, np.empty(0, np.uint16))
        for j in range(n):
            row[j] += half_to_float(half[j * step])


@njit(fastmath=STRICT)
def score_row(row, factor, partial, call, seq, s, h, i, j0):
    """The scores of query i of sequence s, head h, and the keys from j0 on.

    On entry the row holds ``q . k`` times ``query_scale``. It may reach past the last key.
    """
    offset = seq[4]
    if call.softcap > 0:
        cap(row, factor, call.softcap * log_unit(call))
    keys = min(row.size, seq[3] - j0)
    if call.bias:
        width = 2 if call.bias_kind >= 2 else 4 * (1 + call.bias_kind)
        at = call.bias_b * s + call.bias_h * h + call.bias_q * i + call.bias_k * j0
        add_bias(row[:keys], call.bias + width * at, call.bias_kind, call.bias_k)
    if call.alibi:
        slope = row.dtype.type(array(call.alibi, call.hq, row)[h] * log_unit(call))
        for j in range(row.size):
            row[j] -= slope * row.dtype.type(abs(i + offset - j0 - j))
    hide(row, row.dtype.type(-np.inf), partial, call, seq, s, h, i, j0)


@njit(inline="always")
def hide(row, nothing, partial, call, seq, s, h, i, j0):
    """Writes ``nothing`` where query i may not see the key; the row may reach past the last."""
    low, high = visible(call, seq, s, i, j0, min(row.size, seq[3] - j0))
    for j in range(low):
        row[j] = nothing
    for j in range(row.size - high):
        row[high + j] = nothing
    if partial:
        mask_row(row[low:high], nothing, call, s, h, i, j0 + low)


@njit
def visible(call, seq, s, i, j0, keys):
    """The columns [low, high) of ``keys`` from j0 on that band and lengths let query i see."""
    at = i + seq[4] - j0  # the column at which the query stands
    high = min(keys, at + call.right + 1)
    if call.lengths:
        high = min(high, array(call.lengths, s + 1, np.empty(0, np.int32))[s] - j0)
    high = max(high, 0)
    return min(max(0, at - call.left), high), high


@njit
def mask_row(row, nothing, call, s, h, i, j0):
    """``nothing`` where documents or the boolean tensor forbid."""
    n = row.size
    if call.k_ids:
        ints = np.empty(0, np.int32)
        q_id = array(call.q_ids + 4 * (call.q_ids_b * s + i), 1, ints)[0]
        k_ids = array(call.k_ids + 4 * (call.k_ids_b * s + j0), n, ints)
        for j in range(n):
            row[j] = row[j] if k_ids[j] == q_id else nothing
    if call.allowed:
        at = call.allowed_b * s + call.allowed_h * h + call.allowed_q * i + call.allowed_k * j0
        step = call.allowed_k
        allowed = array(call.allowed + at, max(1, n * step), np.empty(0, np.uint8))
        if step == 1:
            for j in range(n):
                row[j] = row[j] if allowed[j] else nothing
        else:
            for j in range(n):
                row[j] = row[j] if allowed[j * step] else nothing


@njit
def log_unit(call):
    """The factor from natural units to those of the scores."""
    return 1.0 if call.natural else LOG2E


@njit
def query_scale(call):
    """The factor of Q before the product: scores come out in their units, or over c."""
    return call.scale / call.softcap if call.softcap > 0 else call.scale * log_unit(call)


_M0, _M1 = np.uint64(M0), np.uint64(M1)
_K0, _K1 = np.uint64(INCREMENTS[0]), np.uint64(INCREMENTS[1])
_WORD, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit
def draws(kept, seed, s, h, i, j, threshold):
    """1 or 0 for the 64 keys from j on (see dropout.py); j is a multiple of 64."""
    for r in range(8):
        c0, c1 = np.uint64(j // 8 + r), np.uint64(i)
        c2, c3 = np.uint64(h), np.uint64(s)
        k0, k1 = np.uint64(seed) & _WORD, np.uint64(seed) >> _32
        for _ in range(ROUNDS):
            p0, p1 = _M0 * c0, _M1 * c2
            c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _WORD, (p0 >> _32) ^ c3 ^ k1, p0 & _WORD
            k0, k1 = (k0 + _K0) & _WORD, (k1 + _K1) & _WORD
        for lane in range(4):
            word = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
            kept[8 * lane + r] = (word & np.uint64(0xFFFF)) >= np.uint64(threshold)
            kept[8 * (lane + 4) + r] = (word >> np.uint64(16)) >= np.uint64(threshold)


@njit
def keep_row(kept, n, call, s, h, i, j0):
    """What dropout keeps of the n keys from j0 on, as 1 and 0: a part of the scratch ``kept``."""
    before = j0 % 64
    for j in range(0, before + n, 64):
        draws(kept[j : j + 64], call.seed, s + call.first, h, i, j0 - before + j, call.threshold)
    return kept[before : before + n]
