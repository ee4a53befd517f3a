"""Choose into how many parts the keys of a forward's tiles are split.

A block reads all keys of a tile of queries. A part of a long prompt, or a latent cache that all
heads share, has fewer tiles than there are processors. Then each tile's keys are split over
several blocks. They store O, m and l of their part in float32, and ``merge.py`` continues the
recurrence over the parts in order. Triton's kernel takes few queries (``parts.py``) of fewer keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ...call.problem import Problem
from ..parts import MERGED, MOST_PARTS, visible_keys
from .lib.order import OVERHEAD, tile_count
from .tiles import (
    FEW,
    MOST_COLUMNS,
    ROWS,
    TILES,
    Config,
    Tile,
    config_for,
    is_wide,
    packed_heads,
    sizes_of,
)

#: the cost of a tile of a part, in key tiles (1.0 to 1.3 us on an H200, whatever the head size),
#: and of each 2^14 numbers that it stores: 128 rows of 128 columns
PART_STEPS, STORED_STEPS = 1.0, 1.6
#: the cost of the launch that merges parts, in key tiles, and the bytes that it reads in one
LAUNCH_STEPS, BYTES_OF_STEP = 2.0, 2.5e6
#: parts take memory, so that they must save some time; another launch takes the host as long as
#: three key tiles
LEAST_SAVED, LEAST_STEPS = 1.05, 3.0
#: the most tiles of all parts, for each processor
MOST_TILES = 4
#: keys of all kv heads, times the rows of a tile, from which on these blocks are faster than
#: Triton's programs of few queries: 1.01 to 1.7 times, with half as many .73 to 1.0 (an H200)
FEW_PAIRS = 1 << 21
#: rows below which all keys are read in the same time, and their keys: with fewer, copies of keys
#: that are not in a cache take Triton's programs 1 us less
FEW_ROWS, FEW_KEYS = 32, 1 << 19


def may_split(p: Problem) -> bool:
    """Return True if a problem's keys may be split: lengths and masks are known to the host.

    Prefix lengths are not, but parts without keys of a short prefix are merged like any other.
    """
    plain = p.bias is None and not (p.varlen or p.documents or p.dropout_p) and p.gap is None
    some = p.batch and p.hq and p.nq and p.nk
    return bool(some) and plain and (p.dv <= MOST_COLUMNS or is_wide(p, ""))


def takes_few(p: Problem) -> bool:
    """Return True if Triton's kernel of few queries is slower for a problem that it splits.

    With short prefixes its programs end together: .92 of its speed with four of unequal lengths.
    """
    if is_wide(p, ""):
        return may_split(p)
    rows = min(p.nq * p.group, ROWS)
    least = FEW_KEYS if rows < FEW_ROWS else FEW_PAIRS // rows
    keys = p.batch * p.hk * visible_keys(p)
    return may_split(p) and not p.prefix and keys >= least


def tile_of_parts(p: Problem) -> Tile:
    """Return the tile of a problem whose keys are split: there are blocks for all processors."""
    return (FEW if p.nq * p.group <= ROWS else TILES)[sizes_of(p)]


def config_of_parts(C: Config) -> Config:
    """Return the config for parts: rows of float32, and neither a sink nor a second launch."""
    return replace(C, OUT_ROW=C.DV_OUT, STAGED=0, TURNED=False, SINK=False, LAGS=False)


def parts_to_choose(p: Problem, most: int) -> range:
    """Return the numbers of parts that a forward may have on ``most`` processors."""
    if not may_split(p):
        return range(1, 2)
    # however many heads share a tile, it has as many rows
    tiles = p.batch * p.hk * -(-p.nq * p.group // (ROWS * tile_of_parts(p).warpgroups))
    if 2 * tiles > MOST_TILES * most:
        return range(1, 2)
    counts, heads = _tiles(p)
    # a tile has a key tile in each part, or the kernel would have to mask others in full tiles
    least = int(counts.max() if p.prefix else counts.min())
    room = MOST_TILES * most // (counts.shape[0] * heads)
    return range(1, max(1, min(least, MOST_PARTS, room)) + 1)


def parts_of(p: Problem, most: int) -> int:
    """Return the number of parts of the keys, on ``most`` processors.

    Compared are powers of 2, and those that give every processor as many tiles: a decode has other
    sizes at every step.
    """
    possible = parts_to_choose(p, most)
    if len(possible) == 1:
        return 1
    counts, heads = _tiles(p)
    steps = float(counts.min()), float(counts.float().mean()), float(counts.max())
    tiles = counts.shape[0] * heads
    even = (n * most // tiles for n in range(1, MOST_TILES + 1))
    some = {*(2**n for n in range(8)), *even}.intersection(possible)
    return min(sorted(some), key=lambda parts: _time(p, steps, tiles, parts, most))


@lru_cache(maxsize=16)
def _tiles(p: Problem) -> tuple[Tensor, int]:
    """Return (the key tiles of each query tile of a head, heads), where keys are split."""
    tile = tile_of_parts(p)
    C = config_for(p, tile, "", packed_heads(p, tile, ""))
    counts = tile_count(C.TILE, C.BLOCK_K, p.nq, p.nk, p.left, p.right)
    return counts, p.batch * (p.hq // C.GROUP)


def _time(
    p: Problem, steps: tuple[float, float, float], tiles: int, parts: int, most: int
) -> float:
    """Return when all is stored, in key tiles; at least, for blocks have whole tiles.

    ``steps`` are the least, the mean and the most of a tile.
    """
    rows = p.batch * p.hq * p.nq
    stored = PART_STEPS + STORED_STEPS * rows * p.dv / tiles / 2**14
    shortest, mean, longest = (x / parts + OVERHEAD + stored * (parts > 1) for x in steps)
    tiles *= parts
    last = max(longest, mean * tiles / most, shortest * -(-tiles // most))
    read = parts if parts <= MERGED else -(-parts // MERGED) * MERGED
    merged = LAUNCH_STEPS + read * rows * p.dv * 4 / BYTES_OF_STEP
    return last if parts == 1 else LEAST_SAVED * (last + merged) + LEAST_STEPS
