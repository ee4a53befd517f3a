"""Few queries of many keys: which calls they are, and into how many parts their keys are split.

A tile of queries reads its keys in one program. Few queries have few tiles: most processors would
read nothing. So programs share the keys of a tile, each a part, and a second kernel merges the
parts in their order. The query heads of a kv head are rows of one tile: keys are read once.

The numbers below are the same on every device, so that results are, too.
"""

from __future__ import annotations

from torch import Tensor

from ..call.problem import Problem

#: the most rows of a kv head, queries times heads of the group, and the fewest keys that they see
MOST_ROWS = 128
LEAST_KEYS = 256
#: fewer keys stay in one part: the host takes longer for a second launch than one program for them.
#: 1024 keys, 32 heads on 8 of 128 (an H200): 16 us by Hopper's one program, 32 us in 16 parts
LEAST_SPLIT = 2048
#: rows of a program: the height of a wgmma
TILE_ROWS = 64
#: programs wanted: two for each of 132 processors, whose memory holds two. With more tiles than
#: processors four times as many, so that the last programs to start are a small share
PROGRAMS = 256
MANY_PROGRAMS = 4 * PROGRAMS
#: the fewest keys of a part. A part of 512 keys writes and reads 1.6 % of what it reads of K and V
#: (four heads of 128, 16 bits), one of 64 keys 12 %: shorter parts only where processors would idle
LEAST_OF_PART = 64
LEAST_OF_MANY = 512
#: keys for each row of a part: a part writes as many sums as it has rows
KEYS_FOR_ROW = 2
MOST_PARTS = 128
#: the most parts that a program of the second kernel reads at once: 64 numbers a thread
MERGED = 64


def splits(problem: Problem) -> bool:
    """Return True if the forward of a problem reads keys once a group, or in parts."""
    rows = problem.nq * problem.group
    if not 0 < rows <= MOST_ROWS or visible_keys(problem) < LEAST_KEYS:
        return False
    return problem.group > 1 or parts_of(problem) > 1


def parts_of(problem: Problem) -> int:
    """Return the number of parts of the keys of a tile."""
    if visible_keys(problem) < LEAST_SPLIT:
        return 1
    rows = problem.nq * problem.group
    tiles = max(1, problem.batch * problem.hk * -(-rows // TILE_ROWS))
    wanted, least = PROGRAMS // tiles, LEAST_OF_PART
    if wanted < 2:
        wanted, least = -(-MANY_PROGRAMS // tiles), LEAST_OF_MANY
    least = max(least, KEYS_FOR_ROW * rows)
    return max(1, min(wanted, visible_keys(problem) // least, MOST_PARTS))


def visible_keys(problem: Problem) -> int:
    """Return the keys between the first and the last that some query may see by its band."""
    low, high = 0, problem.nk
    if problem.left is not None:
        low = max(0, problem.nk - problem.nq - problem.left)
    if problem.right is not None and not problem.bidirectional:
        high = min(problem.nk, problem.nk + problem.right)
    return max(0, high - low)


def parts_for(problem: Problem, lse: Tensor, count: int) -> dict[str, Tensor]:
    """Return memory for the sums of ``count`` parts: ``part_out`` and ``part_rows``."""
    size = lse.numel() * count
    # one tensor: an allocation takes 3 us of the host
    both = lse.new_empty(size * (problem.dv + 2))
    b, n, h, d = problem.out_shape
    return {
        "part_out": both[: size * problem.dv].view(count * b, n, h, d),
        "part_rows": both[size * problem.dv :].view(2 * count, lse.numel()),
    }
