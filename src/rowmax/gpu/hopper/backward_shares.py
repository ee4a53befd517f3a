"""Choose how many blocks share the query heads of a tile of keys.

A block sums dk and dv over all query heads of a kv head in registers. Few kv heads have few tiles:
one of 2048 keys has 16, for 132 processors. Then a group is divided into shares, each with tiles
of its own. They store float32 parts of dk and dv, which ``sum_parts`` adds in order.

Shares also help the cache. Under a diagonal tiles of keys have different numbers of steps a head.
So after the first head of a group they are at different queries, and more of the group is in use.
"""

from __future__ import annotations

from ...call.problem import Problem
from ..shares import possible_shares
from .backward_tiles import COMPLETE_D, Config, FusedConfig
from .lib.order import OVERHEAD, last_end, touched_tile_count

#: the cost of a tile of a share, in steps: to store its part, and to read it again
PART_STEPS = 2.6
#: the cost of a launch that adds parts, in steps
LAUNCH_STEPS = 10.0
#: (heads of a share, the time of a step by more heads than these), under a diagonal: on an H200
#: 1.05 to 1.10 with 8 heads, 1.02 with 4, none with 7 (docs/performance/hopper_backward.md)
CROWDED = (7, 1.1), (2, 1.02)
#: parts take memory, so that shares must save some time
LEAST_SAVED = 1.02
#: the tiles of a processor that are many: under a diagonal it has the mean work
MANY_TILES = 16


def shares_to_choose(p: Problem) -> list[int]:
    """Return the numbers of shares that a backward may have. A bias has its gradient by groups."""
    return [1] if p.bias is not None else possible_shares(p)


def shares_of(p: Problem, tile: Config, most: int) -> int:
    """Return the number of shares of a group, on ``most`` processors; ``tile`` is one of keys."""
    possible = shares_to_choose(p)
    if len(possible) == 1:
        return 1
    return min(possible, key=lambda shares: _time(p, tile, shares, most))


def _time(p: Problem, tile: Config, shares: int, most: int) -> float:
    """Return when the last block ends, in steps."""
    nq, nk = p.nq, p.nk
    if p.varlen:  # the lengths are on the device
        nq, nk = (-(-total // p.batch) for total in (p.total_q, p.total_k))
    heads = p.group // shares
    sizes = tile.BLOCK_RESIDENT, tile.BLOCK_STREAMED
    steps = touched_tile_count(sizes, nk, nq, p.right, p.left) * heads
    steps = steps + PART_STEPS * (shares > 1)
    each = p.batch * p.hk * shares
    tiles = steps.shape[0] * each
    if bool((steps == steps[0]).all()):
        last = -(-tiles // most) * (float(steps[0]) + OVERHEAD)
    elif tiles > MANY_TILES * most:
        last = max(float((steps + OVERHEAD).sum()) * each / most, float(steps.max()))
    else:
        last = last_end(steps, [each], most)
    last *= _crowding(p, tile, heads)
    return last if shares == 1 else LEAST_SAVED * (last + LAUNCH_STEPS)


def _crowding(p: Problem, tile: Config, heads: int) -> float:
    """Return the time of a step of a share of ``heads`` heads over that of one head."""
    falls = p.right is not None and p.left is None and not (p.deterministic or p.documents)
    if not falls or not isinstance(tile, FusedConfig) or tile.D <= COMPLETE_D:
        return 1.0
    return next((time for most, time in CROWDED if heads > most), 1.0)
