"""Where tiles lie: a head's rows, the keys that a tile of queries sees, the scores of a tile."""

from __future__ import annotations

import numpy as np
from numba import njit

from .call import UNLIMITED
from .operands import depth, paired
from .products import from_columns, panel, span
from .scores import array
from .vector import TILE_K, TILE_Q


@njit
def tile_row(states, s, h, tile):
    """The states of the tiles of keys for one tile of queries; empty when there is no map."""
    if states.size == 0:
        return states.reshape(0)
    return states[min(s, states.shape[0] - 1), min(h, states.shape[1] - 1), tile]


@njit
def key_range(call, seq, s, i0, i1):
    """Keys [low, high) that band and lengths let any of queries [i0, i1) see; [0, 0) for none."""
    offset = seq[4]
    high = min(seq[3], i1 + offset + call.right) if call.right < UNLIMITED else seq[3]
    if call.lengths:
        high = min(high, array(call.lengths, s + 1, np.empty(0, np.int32))[s])
    low = max(0, i0 + offset - call.left) if call.left < UNLIMITED else 0
    return (low, high) if low < high else (0, 0)


@njit
def columns(of, low, high, tile):
    """(first key, width) of the part of a tile that holds keys [low, high), in whole steps."""
    step = span(of)
    first = tile * TILE_K
    start = 0 if paired(of) else max(low - first, 0)
    start -= start % step
    stop = min(high - first, TILE_K)
    return first + start, (stop - start + step - 1) // step * step


@njit
def score_tile(of, to, queries, keys, j0, width, n, d):
    """``Q K^T`` of n queries and ``width`` keys from j0 on, from packed operands."""
    size, step, d = of.itemsize, panel(of), depth(of, d)
    for j in range(0, width, step):
        b = keys + size * (j0 + j) * d
        from_columns(of, n, step, d, to + size * j, TILE_K, queries, TILE_Q, b, step, 0)
