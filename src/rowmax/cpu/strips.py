"""The forward's tiles for tile instructions: 32 queries at a time, whose scores stay in a cache.

A strip of scores ``[32, TILE_K]`` takes 32 KB. Its weights are rows of bfloat16, and values are
pairs of neighbouring rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..rules.softmax import LOG2E
from .amx import STRIP, product
from .functions import array, inner
from .operands import HALF_K, copy_rows, rescale
from .rows import hide, keep_row, power, query_scale, score_row
from .rules import any_range, moved
from .tiles import Place, columns, key_range, row_address, tile_range
from .vector import TILE_K
from .wide import bfloat_exponentials, greatest, multiply, natural_bfloat_exponentials


class Strip(NamedTuple):
    """Addresses of a strip's scores and weights, within the memory of a tile of scores."""

    S: int  # [32, TILE_K], float32
    P: int  # [32, TILE_K], bfloat16
    kept: int  # [TILE_K + 64], bytes: 1 where dropout keeps the pair


@inner
def strip_of(place, r):
    """Return the place of the strip of queries from row r of a tile on."""
    return Place(place.s, place.h, place.i0 + r, min(STRIP, place.n - r))


@inner
def part_of_strip(call, seq, strip, tile, operand_like):
    """Return the columns of a tile of keys that a strip sees; their width may be 0 or less."""
    low, high = key_range(call, seq, strip)
    return columns(call, strip, low, high, tile, operand_like)


@inner
def covered(call, seq, strip, part):
    """Return True if every query of a strip sees every column of the part."""
    band = seq.offset, call.left, call.right, seq.end, seq.prefix
    _, high = any_range(strip.i0, strip.i0, *band)
    last = strip.i0 + strip.n - 1
    low, end = any_range(last, last, *band)
    stop = part.j0 + part.width
    return not part.partial and low <= part.j0 and stop <= min(high, end)


@inner
def score_factor(call):
    """Return (True if scores are made before their exponentials, the factor of those that are not).

    Scores that are only scaled become exponentials in one step.
    """
    factor = np.float32(query_scale(call))
    bent = call.softcap > 0 or call.bias.address or call.heads.address
    return bent or call.natural or not factor > 0, factor


@inner
def strip_scores(S, rows, panels, part, d):
    """Compute ``A B^T`` of 32 contiguous rows and a part of a tile of keys, from panels."""
    for j in range(0, part.width, STRIP):
        b = panels + 2 * d * (part.j0 + j)
        product(S + 4 * j, 4 * TILE_K, rows, 2 * d, b, 4 * STRIP, d // STRIP, 0)


def add_strips(call, seq, finite, place, head, scratch, m, l, like, operand_like):
    """Add the keys that a tile of queries sees to m, l and O: a choice of ``add_keys``."""
    n = place.n
    d, padded = call.d_operand, call.value_d_padded
    count = (n + STRIP - 1) // STRIP * STRIP
    q = row_address(call.q, seq, place, operand_like)
    copy_rows(operand_like, scratch.queries, q, 2 * call.q.n, n, count, d)
    weights = scratch.S + 4 * STRIP * TILE_K
    memory = Strip(scratch.S, weights, weights + 2 * STRIP * TILE_K)
    kept = array(memory.kept, TILE_K + 64, np.uint8)
    low, high = key_range(call, seq, place)
    for tile in tile_range(low, high):
        for r in range(0, n, STRIP):
            strip = strip_of(place, r)
            part = part_of_strip(call, seq, strip, tile, operand_like)
            if part.width <= 0:
                continue
            strip_scores(memory.S, scratch.queries + 2 * d * r, head.keys, part, d)
            O = scratch.O + 4 * padded * r
            weigh_strip(call, seq, strip, part, memory, m[r:], l[r:], O, kept, like, operand_like)
            inside = tile * HALF_K + (part.j0 - tile * TILE_K) // 2
            values, steps = head.values + 4 * padded * inside, part.width // STRIP
            for c in range(0, padded, STRIP):
                to, b = O + 4 * c, values + 4 * c
                product(to, 4 * padded, memory.P, 2 * TILE_K, b, 4 * padded, steps, 1)


@inner
def weigh_strip(call, seq, strip, part, memory, m, l, O, kept, like, operand_like):
    """Replace a strip's products by weights; move m, l and O to the new maxima.

    All maxima come before the first exponential, so that their chains of operations overlap.
    """
    s, h, i0, n = strip
    width, padded, unit = part.width, call.value_d_padded, np.float32(LOG2E)
    apart, factor = score_factor(call)
    whole = covered(call, seq, strip, part)
    for r in range(n):
        at = memory.S + 4 * TILE_K * r
        if apart:
            row = array(at, width, like)
            rescale(operand_like, row, factor)
            score_row(row, row[:0], call, seq, s, h, i0 + r, part)
        elif not whole:
            hide(array(at, width, like), np.float32(-np.inf), call, seq, s, h, i0 + r, part)
        peak = greatest(at, width) * (np.float32(1) if apart else factor)
        m_new, base = moved(m[r], peak)
        if m_new != m[r] and m_new != -np.inf:
            alpha = power(m[r] - base, call.natural)
            l[r] *= alpha
            multiply(O + 4 * padded * r, padded, alpha)
            m[r] = m_new
    factor = np.float32(1) if apart else factor
    for r in range(n):
        at, to = memory.S + 4 * TILE_K * r, memory.P + 2 * TILE_K * r
        base = np.float32(0) if m[r] == -np.inf else m[r]
        if call.natural:
            l[r] += natural_bfloat_exponentials(at, to, width, factor, base, unit)
        else:
            l[r] += bfloat_exponentials(at, to, width, factor, base, unit)
        if call.threshold:
            keep = keep_row(kept, width, call, s, h, i0 + r, part.j0)
            weights = array(to, width, operand_like)
            for j in range(width):
                weights[j] = weights[j] if keep[j] else np.uint16(0)
