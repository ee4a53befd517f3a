"""Routes: the keys that each rank's queries may see, and the rows that move for them.

Queries that see own keys alone, in one range, read these where they are. For others, keys of all
ranks are gathered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..call.inputs import Gap
from ..rules.band import any_range
from .calls import ShardedCall
from .layout import ALIGNED, Layout, Ranges
from .pieces import Packing, Sight, pieces_of


class Part(NamedTuple):
    """One call: the queries of a chunk with the keys that they may see."""

    rows: slice  # the queries, as rows of this rank
    i: slice  # the queries, as positions
    j: slice  # the keys, as positions
    gathered: slice  # the keys, as rows of the gathered ones
    packing: Packing | None = None  # then ``i`` and ``j`` are not read
    own: slice | None = None  # the keys, as rows of this rank: then none are gathered
    gap: Gap | None = None  # between the queries, in a call of two chunks


class Route(NamedTuple):
    """The calls of a rank and the rows that move for them."""

    parts: tuple[Part, ...]  # first those of own keys, then those of few keys
    length: int  # gathered rows, in the order of positions
    sent: tuple[Ranges, ...]  # to each rank: ranges of own rows
    received: tuple[Ranges, ...]  # from each rank: ranges of gathered rows
    whole: bool  # every rank needs all rows
    shown: Ranges = ()  # the own rows that any other rank needs

    @property
    def first(self) -> Part | None:
        """The first call that reads gathered rows, if one does; those after it do as well."""
        return next((part for part in self.parts if part.own is None), None)

    def rows_of_others(self, rank: int) -> tuple[int, int]:
        """Return the number of rows that this rank sends to others and receives from them."""
        sent, received = (
            sum(length_of(ranges) for other, ranges in enumerate(each) if other != rank)
            for each in (self.sent, self.received)
        )
        return sent, received


class Load(NamedTuple):
    """The work of the mean rank."""

    rows: float  # keys that arrive from other ranks
    pairs: float  # pairs of a query and a key within the band, to a few at its ends
    chunk: float  # the queries of one call


def sight_of(call: ShardedCall) -> Sight:
    """Return the limits of a call; a band that tensors move limits nothing here."""
    options = call.options
    if options.align == "lengths":
        return Sight(None, None)
    left, right = (None if n is None else int(n) for n in (options.left, options.right))
    if call.packs:
        return Sight(left, right, call.place.documents)
    return Sight(left, None if call.tensors.prefix is not None else right)


@lru_cache(maxsize=512)
def route(queries: Layout, keys: Layout, sight: Sight, rank: int) -> Route:
    """Return the route of a rank."""
    needed = _needed(queries, keys, sight)
    mine = needed[rank]
    own, moved = keys.owned[rank], _moved(queries, keys, sight)
    sent = tuple(rows_of(ranges, own) for ranges in moved[rank])
    parts = _packed_parts if sight.documents else _parts
    return Route(
        parts=parts(queries, keys, sight, rank),
        length=length_of(mine),
        sent=sent,
        received=tuple(rows_of(each[rank], mine) for each in moved),
        whole=all(one == ((0, keys.n),) for one in needed),
        shown=union(pair for other, ranges in enumerate(sent) if other != rank for pair in ranges),
    )


@lru_cache(maxsize=256)
def joined(queries: Layout, keys: Layout, sight: Sight, rank: int) -> Part | None:
    """Return the call of both chunks of a rank under a causal mask, or None.

    Tiles of the early chunk are short: blocks end together, where those of the late one alone do
    not. Its keys are the first ones of the late chunk.
    """
    way = route(queries, keys, sight, rank)
    _, arriving = way.rows_of_others(rank)
    if sight != Sight(None, 0) or queries.n != keys.n or len(way.parts) != 2 or not arriving:
        return None
    early, late = way.parts
    n = queries.lengths[rank]
    rows = early.rows, late.rows
    if late.own is not None or rows != (slice(0, early.rows.stop), slice(early.rows.stop, n)):
        return None
    if early.j.start != late.j.start or late.i.stop != late.j.stop or early.i.stop != early.j.stop:
        return None
    i = slice(late.i.stop - n, late.i.stop)
    gap = Gap(early.rows.stop, i.start - early.i.start)
    return late._replace(rows=slice(0, n), i=i, gap=gap)


def _parts(queries: Layout, keys: Layout, sight: Sight, rank: int) -> tuple[Part, ...]:
    """Return a call for each chunk of a rank, or for the parts of a chunk."""
    rows = _Rows(_needed(queries, keys, sight)[rank])
    of_queries, of_keys = (_Rows(one.owned[rank]) for one in (queries, keys))
    found = []
    for one in _calls(queries, keys, sight, rank):
        i, (start, stop) = one.queries, one.keys
        first, own, begin = of_queries.of(i.start), None, 0
        if one.own:
            at = of_keys.of(start) if start < stop else 0
            own = slice(at, at + stop - start)
        else:
            begin = rows.of(start)
        part = Part(
            rows=slice(first, first + len(i)),
            i=slice(i.start, i.stop),
            j=slice(start, stop),
            gathered=slice(begin, begin + (0 if one.own else stop - start)),
            own=own,
        )
        found.append(part)
    return tuple(sorted(found, key=lambda part: part.gathered.stop - part.gathered.start))


class _Call(NamedTuple):
    """Queries of one chunk, the keys that they may see, and True if one own range has these."""

    queries: range
    keys: tuple[int, int]
    own: bool


@lru_cache(maxsize=512)
def _calls(queries: Layout, keys: Layout, sight: Sight, rank: int) -> tuple[_Call, ...]:
    """Return the calls of a rank.

    If half of a chunk or more sees own keys alone, it is a call of its own, for which nothing
    moves: under a window all of a long chunk but its ends.
    """
    found = []
    for chunk in queries.chunks(rank):
        for i in _around(chunk, _within(chunk, keys.owned[rank], queries.n, keys.n, sight)):
            seen = _seen(i, queries.n, keys.n, sight)
            own = seen == (0, 0) or any(a <= seen[0] and seen[1] <= b for a, b in keys.owned[rank])
            found.append(_Call(i, seen, own))
    return tuple(found)


def _within(i: range, own: Ranges, nq: int, nk: int, sight: Sight) -> range:
    """Return the queries, of whole blocks, that see keys of one own range alone."""

    def sees(x: int) -> tuple[int, int]:
        low, high = any_range(x, x, nk - nq, sight.left, sight.right, nk)
        return low // ALIGNED * ALIGNED, high

    best = range(0)
    for a, b in own:  # the ends of what queries see never fall
        begin = bisect_left(i, True, key=lambda x: sees(x)[0] >= a)
        end = bisect_left(i, True, key=lambda x: sees(x)[1] > b)
        start = i.start if begin == 0 else -(-(i.start + begin) // ALIGNED) * ALIGNED
        stop = i.stop if end == len(i) else (i.start + end) // ALIGNED * ALIGNED
        best = max(best, range(start, max(start, stop)), key=len)
    return best


def _around(chunk: range, within: range) -> list[range]:
    """Return a chunk cut around some of it, unless that is less than half."""
    if 2 * len(within) < len(chunk):
        return [chunk]
    each = (range(chunk.start, within.start), within, range(within.stop, chunk.stop))
    return [one for one in each if one]


def _packed_parts(queries: Layout, keys: Layout, sight: Sight, rank: int) -> tuple[Part, ...]:
    """Return one call for all pieces of a rank."""
    pieces = pieces_of(queries, sight, rank)
    if not pieces:
        return ()
    mine = _needed(queries, keys, sight)[rank]
    first = _Rows(mine)
    starts = [first.of(one.keys.start) if one.keys else 0 for one in pieces]
    every, length = slice(0, queries.lengths[rank]), length_of(mine)
    gathered = slice(0, length)
    return (Part(every, every, gathered, gathered, Packing(pieces, starts, length)),)


@lru_cache(maxsize=512)
def load_of(queries: Layout, keys: Layout, sight: Sight) -> Load:
    """Return the load of the mean rank."""
    rows = pairs = chunks = 0
    for rank, needed in enumerate(_needed(queries, keys, sight)):
        rows += length_of(needed) - length_of(_moved(queries, keys, sight)[rank][rank])
        if sight.documents:
            pieces = pieces_of(queries, sight, rank)
            pairs += sum(pairs_of(one.queries, one.keys, sight) for one in pieces)
            chunks += 1
            continue
        for i in queries.chunks(rank):
            pairs += pairs_of(i, range(keys.n), sight, keys.n - queries.n)
            chunks += 1
    return Load(rows / queries.ranks, pairs / queries.ranks, queries.n / max(1, chunks))


def pairs_of(i: range, j: range, sight: Sight, offset: int = 0) -> int:
    """Return the pairs of queries and keys within the band: those of the middle query, each."""
    middle = (i.start + i.stop - 1) // 2
    low, high = any_range(middle, middle, offset, sight.left, sight.right, j.stop)
    return len(i) * max(0, high - max(low, j.start))


@lru_cache(maxsize=512)
def _needed(queries: Layout, keys: Layout, sight: Sight) -> tuple[Ranges, ...]:
    """Return the positions of the keys that each rank gathers for its queries."""
    if sight.documents:
        return tuple(
            union((one.keys.start, one.keys.stop) for one in pieces_of(queries, sight, rank))
            for rank in range(queries.ranks)
        )
    return tuple(
        union(one.keys for one in _calls(queries, keys, sight, rank) if not one.own)
        for rank in range(queries.ranks)
    )


@lru_cache(maxsize=256)
def _moved(queries: Layout, keys: Layout, sight: Sight) -> tuple[tuple[Ranges, ...], ...]:
    """Return the positions of the keys of each rank that each rank needs, by both."""
    needed = _needed(queries, keys, sight)
    return tuple(tuple(common(own, theirs) for theirs in needed) for own in keys.owned)


def held_rows(queries: Layout, keys: Layout, sight: Sight, holder: int, rank: int) -> Ranges | None:
    """Return the rows of a holder's own keys that a rank needs, among those that it gathers itself.

    None if the holder does not gather all of them.
    """
    needed, moved = _needed(queries, keys, sight), _moved(queries, keys, sight)
    wanted = moved[holder][rank]
    return rows_of(wanted, needed[holder]) if common(wanted, needed[holder]) == wanted else None


def length_of(ranges: Ranges) -> int:
    """Return the number of positions of disjoint ranges."""
    return sum(stop - start for start, stop in ranges)


def _seen(i: range, nq: int, nk: int, sight: Sight) -> tuple[int, int]:
    """Return the range of keys that queries may see, from a whole block on."""
    low, high = any_range(i.start, i.stop - 1, nk - nq, sight.left, sight.right, nk)
    low = low // ALIGNED * ALIGNED
    return (low, high) if low < high else (0, 0)


def union(ranges: Sequence[tuple[int, int]] | object) -> Ranges:
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


def common(a: Ranges, b: Ranges) -> Ranges:
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


def gaps(rows: tuple[int, int], taken: Ranges) -> list[tuple[int, int]]:
    """Return what is left of rows without ascending ranges of them."""
    ends = [rows[0], *(x for pair in taken for x in pair), rows[1]]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


class _Rows:
    """The rows of positions among those of some ranges."""

    def __init__(self, held: Ranges) -> None:
        self.starts = [start for start, _ in held]
        self.before = [0, *accumulate(stop - start for start, stop in held)]

    def of(self, position: int) -> int:
        at = bisect_right(self.starts, position) - 1
        return self.before[at] + position - self.starts[at]


def rows_of(ranges: Ranges, held: Ranges) -> Ranges:
    """Return the rows of ranges of positions among those of ``held``, in one pass."""
    found, row, x = [], 0, 0
    for start, stop in ranges:
        while held[x][1] <= start:
            row += held[x][1] - held[x][0]
            x += 1
        first = row + start - held[x][0]
        found.append((first, first + stop - start))
    return tuple(found)
