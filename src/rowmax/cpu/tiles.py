"""The places of tiles: rows of a head, keys that a tile of queries sees, scores of a tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..rules.mask import FULL, SKIP
from .call import SEQUENCE
from .functions import array, inner
from .operands import HALF_K, depth, paired, row_size, tile_rows
from .products import from_columns, panel, span
from .rows import pair_at
from .rules import any_range
from .vector import TILE_K, TILE_Q

SUMMED = 128  # columns of a head whose products are added up one after the other


class Place(NamedTuple):
    """A tile of queries: i0 to i0 + n of one head of one sequence."""

    s: int
    h: int
    i0: int
    n: int


class Columns(NamedTuple):
    """The part of a tile of keys that is worked on."""

    tile: int
    j0: int  # first key
    width: int  # whole steps; may extend past the last key
    keys: int  # columns up to the last that some query of the tile sees
    partial: bool  # documents or a boolean tensor forbid some pairs


@inner
def place_of(seq, s, h, tile):
    """Return the Place of a tile of queries."""
    i0 = tile * TILE_Q
    return Place(s, h, i0, min(TILE_Q, seq.queries - i0))


@inner
def row_at(rows, s, n, h):
    """Return the offset of a row, in elements, from its strides."""
    return rows.b * s + rows.n * n + rows.h * h


@inner
def row_address(rows, seq, place, like):
    """Return the address of the caller's first row of a tile of queries; ``like``: operands."""
    return rows.address + row_size(like) * row_at(rows, place.s, seq.query + place.i0, place.h)


@inner
def numbers_at(tensor, size, s, h, n):
    """Return the address of a row's number in a tensor such as lse."""
    return tensor.address + size * (tensor.b * s + tensor.h * h + tensor.n * n)


@inner
def all_sequences(call):
    """Return the array of the sequences of a call."""
    return array(call.sequences, call.batch, SEQUENCE)


@inner
def key_range(call, seq, place):
    """Return the keys [low, high) that some query sees by band and lengths; [0, 0) for none."""
    last = place.i0 + place.n - 1
    band = seq.offset, call.left, call.right, seq.end, seq.prefix
    low, high = any_range(place.i0, last, *band)
    return (low, high) if low < high else (0, 0)


@inner
def tile_range(low, high):
    """Return the tiles that hold keys [low, high)."""
    return range(low // TILE_K, (high + TILE_K - 1) // TILE_K)


@inner
def columns(call, place, low, high, tile, like):
    """Return the part of a tile that holds keys [low, high); without width if none may attend."""
    step = span(like)
    first = tile * TILE_K
    start = 0 if paired(like) else max(low - first, 0)
    start -= start % step
    stop = min(high - first, TILE_K)
    width = (stop - start + step - 1) // step * step
    partial = False
    if call.states.address:
        at = pair_at(call.states, place.s, place.h, place.i0 // TILE_Q, tile)
        state = array(call.states.address + at, 1, np.uint8)[0]
        width, partial = 0 if state == SKIP else width, state != FULL
    return Columns(tile, first + start, width, stop - start, partial)


@inner
def keys_of(seq, tile):
    """Return the number of keys of a tile of keys."""
    return min(TILE_K, seq.keys - TILE_K * tile)


@inner
def packed_row(like, part):
    """Return the row of operands, packed by ``pack_rows``, at which a part of a tile begins."""
    return tile_rows(like, HALF_K) * part.tile if paired(like) else part.j0


@inner
def score_tile(like, to, queries, keys, part, n, d, add):
    """Compute ``Q K^T`` of n queries and a tile's columns ``[n, TILE_K]``, from packed operands.

    add is 1 to add it to the numbers that are there. The error of a sum grows with its length, so
    heads of more than ``SUMMED`` columns are added up in blocks.
    """
    size, step, d = like.itemsize, panel(like), depth(like, d)
    for j in range(0, part.width, step):
        b = keys + size * (part.j0 + j) * d
        c = to + size * j
        for k in range(0, d, SUMMED):
            more = add if k == 0 else 1
            a = queries + size * k * TILE_Q
            each, rows = min(SUMMED, d - k), b + size * k * step
            from_columns(like, n, step, each, c, TILE_K, a, TILE_Q, rows, step, more)
