"""Routes: the keys that each rank's queries may see, and the rows that move for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..call.inputs import Options, Tensors
from ..rules.band import any_range
from .layout import ALIGNED, Layout, Ranges


class Sight(NamedTuple):
    """The limits of a mask that the host knows: those of ``rules.band.any_range``."""

    left: int | None
    right: int | None


class Part(NamedTuple):
    """One call: the queries of a chunk with the keys that they may see."""

    rows: slice  # the queries, as rows of this rank
    i: slice  # the queries, as positions
    j: slice  # the keys, as positions
    gathered: slice  # the keys, as rows of the gathered ones


class Route(NamedTuple):
    """The calls of a rank and the rows that move for them."""

    parts: tuple[Part, ...]
    length: int  # gathered rows, in the order of positions
    sent: tuple[Ranges, ...]  # to each rank: ranges of own rows
    received: tuple[Ranges, ...]  # from each rank: ranges of gathered rows
    whole: bool  # every rank needs all rows

    def rows_of_others(self, rank: int) -> tuple[int, int]:
        """Return the number of rows that this rank sends to others and receives from them."""
        sent, received = (
            sum(_length(ranges) for other, ranges in enumerate(each) if other != rank)
            for each in (self.sent, self.received)
        )
        return sent, received


class Load(NamedTuple):
    """The work of the mean rank."""

    rows: float  # keys that arrive from other ranks
    pairs: float  # pairs of a query and a key within the band, to a few at its ends
    chunk: float  # the queries of one call


def sight_of(tensors: Tensors, options: Options) -> Sight:
    """Return the limits of a call; a band that tensors move limits nothing here."""
    if options.align == "lengths":
        return Sight(None, None)
    left, right = (None if n is None else int(n) for n in (options.left, options.right))
    return Sight(left, None if tensors.prefix is not None else right)


@lru_cache(maxsize=512)
def route(queries: Layout, keys: Layout, sight: Sight, rank: int) -> Route:
    """Return the route of a rank."""
    needed = _needed(queries, keys, sight)
    mine = needed[rank]
    own = keys.owned[rank]
    parts, row = [], 0
    for i in queries.chunks(rank):
        start, stop = _seen(i, queries.n, keys.n, sight)
        begin = _row_of(start, mine) if start < stop else 0
        parts.append(
            Part(
                rows=slice(row, row + len(i)),
                i=slice(i.start, i.stop),
                j=slice(start, stop),
                gathered=slice(begin, begin + stop - start),
            )
        )
        row += len(i)
    return Route(
        parts=tuple(parts),
        length=_length(mine),
        sent=tuple(_rows_of(_common(own, theirs), own) for theirs in needed),
        received=tuple(_rows_of(_common(mine, held), mine) for held in keys.owned),
        whole=all(one == ((0, keys.n),) for one in needed),
    )


@lru_cache(maxsize=512)
def load_of(queries: Layout, keys: Layout, sight: Sight) -> Load:
    """Return the load of the mean rank."""
    rows = pairs = chunks = 0
    for rank, needed in enumerate(_needed(queries, keys, sight)):
        rows += _length(needed) - _length(_common(needed, keys.owned[rank]))
        for i in queries.chunks(rank):
            middle = (i.start + i.stop - 1) // 2  # a band sees as many keys on average
            low, high = any_range(middle, middle, keys.n - queries.n, *sight, keys.n)
            pairs += len(i) * max(0, high - low)
            chunks += 1
    return Load(rows / queries.ranks, pairs / queries.ranks, queries.n / max(1, chunks))


@lru_cache(maxsize=512)
def _needed(queries: Layout, keys: Layout, sight: Sight) -> tuple[Ranges, ...]:
    """Return the positions of the keys that each rank's queries may see."""
    return tuple(
        _union(_seen(i, queries.n, keys.n, sight) for i in queries.chunks(rank))
        for rank in range(queries.ranks)
    )


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _seen(i: range, nq: int, nk: int, sight: Sight) -> tuple[int, int]:
    """Return the range of keys that queries may see, from a whole block on."""
    low, high = any_range(i.start, i.stop - 1, nk - nq, sight.left, sight.right, nk)
    low = low // ALIGNED * ALIGNED
    return (low, high) if low < high else (0, 0)


def _union(ranges: Sequence[tuple[int, int]] | object) -> Ranges:
    """Return the positions of some ranges as disjoint ascending ones."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):  # pyright: ignore
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            first, last = found.pop()
            start, stop = first, max(last, stop)
        found.append((start, stop))
    return tuple(found)


def _common(a: Ranges, b: Ranges) -> Ranges:
    """Return the positions that are in both of two ascending lists of ranges."""
    found, x, y = [], 0, 0
    while x < len(a) and y < len(b):
        start, stop = max(a[x][0], b[y][0]), min(a[x][1], b[y][1])
        if start < stop:
            found.append((start, stop))
        if a[x][1] <= b[y][1]:
            x += 1
        else:
            y += 1
    return tuple(found)


def _row_of(position: int, held: Ranges) -> int:
    """Return the row of a position among those of some ranges."""
    row = 0
    for start, stop in held:
        if position < stop:
            return row + position - start
        row += stop - start
    raise AssertionError(position)


def _rows_of(ranges: Ranges, held: Ranges) -> Ranges:
    """Return the rows of ranges of positions among those of ``held``, in one pass."""
    found, row, x = [], 0, 0
    for start, stop in ranges:
        while held[x][1] <= start:
            row += held[x][1] - held[x][0]
            x += 1
        first = row + start - held[x][0]
        found.append((first, first + stop - start))
    return tuple(found)
