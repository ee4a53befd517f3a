"""Choose how many programs share the query heads of a tile of keys, in a backward.

A program sums dK and dV over all query heads of a kv head. Few kv heads have few tiles, and most
processors would compute nothing. Then a group is divided into shares of as many heads each, with a
program each, and a second kernel adds their parts in order. ``hopper/backward_shares.py`` chooses
for Hopper's kernels, whose blocks are as many as processors.
"""

from __future__ import annotations

from ..call.problem import Problem

#: programs wanted: two for each of 132 processors; the same on every device, so that results are
PROGRAMS = 256
#: the fewest queries of all heads of a share: a part is stored and read in the time of about 170
LEAST_QUERIES = 512


def possible_shares(p: Problem) -> list[int]:
    """Return the numbers of shares that a group may have: those that divide it."""
    return [n for n in range(1, p.group + 1) if p.group % n == 0]


def note(p: Problem, shares: int) -> str | None:
    """Return the sentence that ``explain`` adds to a backward with this number of shares."""
    if shares == 1:
        return None
    return f"{p.group} query heads of a kv head in {shares} shares, parts that a launch adds"


def shares_of(p: Problem, block_k: int) -> int:
    """Return the number of shares of a group, for tiles of ``block_k`` keys."""
    tiles = p.hk * -(-p.total_k // block_k) * (1 if p.varlen else p.batch)
    queries = p.total_q // p.batch if p.varlen else p.nq
    found = 1
    for shares in possible_shares(p):
        if tiles * found >= PROGRAMS or queries * p.group < shares * LEAST_QUERIES:
            break
        found = shares
    return found
