"""Moves: the copies by which a rank pulls the rows of others that it needs, and puts its own.

A rank shows own rows to others in memory that they share, and gathers rows in memory of its own. Or
it does both in shared memory: then own rows are copied once (``in_place``).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .exchange import others_of
from .layout import Layout
from .pieces import Sight
from .routes import held_rows, length_of, route, rows_of

#: the most bytes of gathered keys and values in shared memory, which stays between calls
MOST_IN_PLACE = 2 << 30


class Move(NamedTuple):
    """Rows that a rank copies from those that another shows, or from its own."""

    rank: int
    to: int  # the first row in its memory
    origin: int
    rows: int


class Moves(NamedTuple):
    """The copies of a rank."""

    arriving: int  # rows in its memory
    own: tuple[Move, ...]
    first: tuple[Move, ...]  # those of others for the first call that waits
    later: tuple[Move, ...]


@lru_cache(maxsize=256)
def in_place(queries: Layout, keys: Layout, sight: Sight, row: int) -> bool:
    """Return True if ranks show own rows where they gather them: the same on every rank.

    ``row``: bytes of a row of k and v. Packed keys are left out: those of others are few, and own
    ones are copied while ranks meet.
    """
    ranks, place = range(keys.ranks), (queries, keys, sight)
    if sight.documents or not any(route(*place, rank).shown for rank in ranks):
        return False
    held = all(held_rows(*place, a, b) is not None for a in ranks for b in ranks if a != b)
    return held and row * max(moves_of(*place, rank).arriving for rank in ranks) <= MOST_IN_PLACE


@lru_cache(maxsize=256)
def shared_rows(queries: Layout, keys: Layout, sight: Sight, row: int) -> tuple[int, ...]:
    """Return the rows of each rank in shared memory: those that it gathers, or that it shows."""
    ranks, place = range(keys.ranks), (queries, keys, sight)
    if in_place(*place, row):
        return tuple(moves_of(*place, rank).arriving for rank in ranks)
    return tuple(length_of(route(*place, rank).shown) for rank in ranks)


@lru_cache(maxsize=256)
def moves_of(
    queries: Layout, keys: Layout, sight: Sight, rank: int, in_place: bool = False
) -> Moves:
    """Return the copies of a rank. The origins of others are rows that they show, or gather.

    Under a causal mask the first call needs rows of the ranks before this one. So its copies begin
    with the rank before, the others with the next one: each has one reader at a time.
    """
    way = route(queries, keys, sight, rank)
    packing = way.parts[0].packing if way.parts else None
    first = None if way.first is None else way.first.gathered
    own, now, later = [], [], []
    for other in (rank, *others_of(rank, keys.ranks)):
        there = route(queries, keys, sight, other)
        if other == rank:
            origins = way.sent[rank]
        elif in_place:
            origins = held_rows(queries, keys, sight, other, rank) or ()
        else:
            origins = rows_of(there.sent[rank], there.shown)
        for (start, stop), (origin, _) in zip(way.received[other], origins, strict=True):
            places = [(start, start, stop)] if packing is None else packing.places(start, stop)
            for to, a, b in places:
                for late, (c, d) in _by_arrival(a, b, None if other == rank else first):
                    move = Move(other, to + c - a, origin + c - start, d - c)
                    (own if other == rank else later if late else now).append(move)
    now.sort(key=lambda move: (move.rank - rank) % keys.ranks, reverse=True)
    length = way.length if packing is None else packing.rows
    return Moves(length, *map(tuple, (own, now, later)))


def _by_arrival(start: int, stop: int, first: slice | None) -> list[tuple[bool, tuple[int, int]]]:
    """Return a range of gathered rows cut where those of the first call end; True for others."""
    if first is None:
        return [(True, (start, stop))]
    ends = sorted({start, stop, *(x for x in (first.start, first.stop) if start < x < stop)})
    return [(not first.start <= a < first.stop, (a, b)) for a, b in pairwise(ends)]
