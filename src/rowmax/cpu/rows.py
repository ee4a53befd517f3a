"""The steps of one row of one tile: its scores, their exponentials, dropout's draws.

A row is a stretch of the score tile, -inf where masked: in natural units where
``Problem.natural``, else in base 2, as ``s log2(e)``. Each loop here is over the columns of a row
and becomes vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ..rules.softmax import LOG2E
from . import wide
from .functions import (
    STRICT,
    SUMS,
    array,
    bfloat_to_float,
    choice,
    exp2,
    half_to_float,
    inner,
    number,
    optimised,
)
from .heads import add_head_tangents, add_heads, bend_by_heads
from .rules import any_range, biased, capped, capped_tangent, philox, scaled_tangent
from .vector import W
from .wide import LANES, greatest


def is_wide(dtype) -> bool:
    """Return True if wide.py has the steps of rows of this dtype."""
    return W == LANES and dtype == types.float32


@choice(inline="always")
def ordered(x) -> Any:
    """Return a float's bits as an integer of the same order; its own inverse."""
    if x == types.int64:
        return lambda x: np.int64(x ^ ((x >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF)))
    return lambda x: np.int32(x ^ np.int32(np.int32(x >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@choice
def row_max(row) -> Any:
    """Return the greatest score.

    The compiler vectorises the maximum of integers. It does not vectorise that of floats, which is
    not associative where there is NaN.
    """
    if is_wide(row.dtype):
        return lambda row: greatest(row.ctypes.data, row.size)
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


@inner(fastmath=STRICT)
def power(x, natural):
    """Return ``e^x`` of a difference of natural scores, ``2^x`` of one in base 2."""
    return exp2(x * number(LOG2E, x)) if natural else exp2(x)


@choice
def exponentials(row, shift, natural) -> Any:
    """Replace each score s by ``power(s - shift)`` and return the sum."""
    return _wide_exponentials if is_wide(row.dtype) else _plain_exponentials


def _wide_exponentials(row, shift, natural):
    if natural:
        return wide.natural_exponentials(row.ctypes.data, row.size, shift, np.float32(LOG2E))
    return wide.exponentials(row.ctypes.data, row.size, shift, np.float32(1))


def _plain_exponentials(row, shift, natural):
    return loop_exponentials(row, shift, natural)


@inner(fastmath=SUMS)
def loop_exponentials(row, shift, natural):
    """Compute ``exponentials`` in vectors of the compiler's choice."""
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


@inner(fastmath=STRICT)
def cap(row, y, size):
    """Cap a row of ``scale q.k / c``; keep y for the derivative, if wanted."""
    size = row.dtype.type(size)
    if y.size:
        for j in range(row.size):
            row[j], y[j] = capped(row[j], size)
    else:
        for j in range(row.size):
            row[j], _ = capped(row[j], size)


@inner(fastmath=STRICT)
def scale_tangents(ts, y, scale, cap):
    """Replace x' by s' before the terms after it; y is empty without a softcap."""
    scale, cap = ts.dtype.type(scale), ts.dtype.type(cap)
    if y.size:
        for j in range(ts.size):
            ts[j] = capped_tangent(ts[j], y[j], cap)
    else:
        for j in range(ts.size):
            ts[j] = scaled_tangent(ts[j], scale)


@inner(fastmath=STRICT)
def add_bias(row, address, kind, stride):
    """Add the bias; kind is its dtype, stride 0 where it broadcasts along keys."""
    n = row.size
    reach = max(1, 1 + (n - 1) * stride)
    if kind == 0:
        b32 = array(address, reach, np.float32)
        if stride == 1:
            for j in range(n):
                row[j] = biased(row[j], b32[j])
        else:
            for j in range(n):
                row[j] = biased(row[j], b32[j * stride])
    elif kind == 1:
        b64 = array(address, reach, np.float64)
        for j in range(n):
            row[j] = biased(row[j], row.dtype.type(b64[j * stride]))
    elif kind == 2:
        brain = array(address, reach, np.uint16)
        for j in range(n):
            row[j] = biased(row[j], bfloat_to_float(brain[j * stride]))
    else:
        half = array(address, reach, np.uint16)
        for j in range(n):
            row[j] = biased(row[j], half_to_float(half[j * stride]))


@inner
def bias_address(bias, call, s, h, i, j):
    """Return the address of a pair's number in the bias, or in its tangent."""
    size = 2 if call.bias_kind >= 2 else 4 * (1 + call.bias_kind)
    return bias.address + size * pair_at(bias, s, h, i, j)


@inner
def pair_at(tensor, s, h, i, j):
    """Return the offset of a pair's number in a tensor such as the bias, in elements."""
    return tensor.b * s + tensor.h * h + tensor.i * i + tensor.j * j


@inner
def position(call, seq, i, part):
    """Return the keys from the first column of a part to the position of query i."""
    return i + seq.offset + call.shift - part.j0


@inner(fastmath=STRICT)
def score_row(row, y, call, seq, s, h, i, part):
    """Compute the scores of query i and the columns of a part of a tile, ``[part.width]``.

    On entry the row holds ``q.k`` times ``query_scale``. It may reach past the last key.
    """
    if call.softcap > 0:
        cap(row, y, call.softcap * log_unit(call))
    bend_by_heads(row, y, call, h)
    if call.bias.address:
        address = bias_address(call.bias, call, s, h, i, part.j0)
        add_bias(row[: part.keys], address, call.bias_kind, call.bias.j)
    add_heads(row, call, h, position(call, seq, i, part))
    hide(row, row.dtype.type(-np.inf), call, seq, s, h, i, part)


@inner
def tangent_row(ts, y, call, seq, s, h, i, part):
    """Replace x' by s' of query i and the columns of a part of a tile, natural.

    On entry the row holds ``q'.k + q.k'`` times ``query_scale``. Hidden pairs hold any number.
    """
    scale = 1.0 / log_unit(call)
    scale_tangents(ts, y[: y.size if call.softcap > 0 else 0], scale, call.softcap)
    if call.tbias.address:  # it is added, as a bias is
        address = bias_address(call.tbias, call, s, h, i, part.j0)
        add_bias(ts[: part.keys], address, call.bias_kind, call.tbias.j)
    if call.theads.address:
        add_head_tangents(ts, call, h, position(call, seq, i, part))


@njit(inline="always")
def hide(row, nothing, call, seq, s, h, i, part):
    """Write ``nothing`` where query i may not see the key."""
    low, high = any_range(i, i, seq.offset, call.left, call.right, seq.end, seq.prefix)
    high = max(min(high - part.j0, row.size), 0)
    low = min(max(low - part.j0, 0), high)
    for j in range(low):
        row[j] = nothing
    for j in range(row.size - high):
        row[high + j] = nothing
    if part.partial:
        mask_row(row[low:high], nothing, call, s, h, i, part.j0 + low)


@inner
def mask_row(row, nothing, call, s, h, i, j0):
    """Write ``nothing`` where documents or the boolean tensor forbid."""
    n = row.size
    if call.k_ids.address:
        q_id = array(call.q_ids.address + 4 * (call.q_ids.b * s + i), 1, np.int32)[0]
        k_ids = array(call.k_ids.address + 4 * (call.k_ids.b * s + j0), n, np.int32)
        for j in range(n):
            row[j] = row[j] if k_ids[j] == q_id else nothing
    if call.allowed.address:
        stride = call.allowed.j
        address = call.allowed.address + pair_at(call.allowed, s, h, i, j0)
        allowed = array(address, max(1, n * stride), np.uint8)
        if stride == 1:
            for j in range(n):
                row[j] = row[j] if allowed[j] else nothing
        else:
            for j in range(n):
                row[j] = row[j] if allowed[j * stride] else nothing


@inner
def any_allowed(call, s, h, n, part):
    """Return True if the boolean tensor allows a pair of n queries and a part of a tile."""
    stride, found = call.allowed.j, np.uint8(0)
    for i in range(n):
        address = call.allowed.address + pair_at(call.allowed, s, h, i, part.j0)
        allowed = array(address, max(1, part.keys * stride), np.uint8)
        for j in range(part.keys):
            found |= allowed[j * stride]
    return found != 0


@inner
def log_unit(call):
    """Return the factor from natural units to those of the scores."""
    return 1.0 if call.natural else LOG2E


@inner
def query_scale(call):
    """Return the factor of Q before the product: scores come out in their units, or over c."""
    return call.scale / call.softcap if call.softcap > 0 else call.scale * log_unit(call)


@optimised  # as ``inner``, dropout's forward took 1.4 times as long
def draws(kept, seed, s, h, i, j, threshold):
    """Write 1 or 0 for the 64 keys from j on (see dropout.py); j is a multiple of 64."""
    key = np.uint64(seed) & np.uint64(0xFFFFFFFF), np.uint64(seed) >> np.uint64(32)
    for r in range(8):
        counter = np.uint64(j // 8 + r), np.uint64(i), np.uint64(h), np.uint64(s)
        c0, c1, c2, c3 = philox(counter, key)
        for lane in range(4):
            word = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
            kept[8 * lane + r] = (word & np.uint64(0xFFFF)) >= np.uint64(threshold)
            kept[8 * (lane + 4) + r] = (word >> np.uint64(16)) >= np.uint64(threshold)


@inner
def keep_row(kept, n, call, s, h, i, j0):
    """Return 1 for each of the n keys from j0 on that dropout keeps, else 0; a part of ``kept``."""
    s, h, i = s + call.first_sequence, h + call.first_head, i + call.first_query
    before = (j0 + call.first_key) % 64
    block = j0 + call.first_key - before
    for j in range(0, before + n, 64):
        draws(kept[j : j + 64], call.seed, s, h, i, block + j, call.threshold)
    return kept[before : before + n]
