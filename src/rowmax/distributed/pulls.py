"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

The rows are those of ``exchange.py``. Packed keys of pieces (``pieces.py``) are pulled to their
places; a row of several pieces comes once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ..torch_compat import copy_each
from .exchange import elements, others_of, packed, words
from .groups import Group
from .layout import Layout
from .routes import Part, Route, Sight, length_of, route, rows_of
from .shared import Pull, Region


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


class PulledRows:
    """The rows that a rank needs of each ``[B, n, H, D]``, by stages of heads."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        place: tuple[Layout, Layout, Sight],
        group: Group,
        region: Region,
    ) -> None:
        ways = [route(*place, rank) for rank in range(group.size)]
        self.way, self.moves, self.region = ways[group.rank], moves_of(*place, group.rank), region
        self.dtype = tensors[0].dtype
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        self.shown = [length_of(way.shown) for way in ways]  # rows of each rank
        size = (self.moves.arriving, tensors[0].shape[0])
        #: memory for rows [arriving, B, H, D] of each stage, from before the copies
        self.rows = [[t.new_empty((*size, *t.shape[2:])) for t in part] for part in self.parts]
        if max(self.shown):  # else no rank waits for another
            size = max(self.shown) * sum(map(_row, tensors)) * tensors[0].element_size()
            own, begin = region.open(size).view(self.dtype), 0
            for part in self.parts:
                end = begin + elements([t.shape for t in part], self.way.shown)
                packed(part, [self.way.shown], own[begin:end])
                begin = end
            region.show()

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage. Own rows are copied meanwhile."""
        rows, self.rows[stage] = self.rows[stage], []
        shown = {move.rank: self._shown(move.rank, stage) for move in self._of_others}
        pulls = []
        for moves in (self.moves.first, self.moves.later):
            copies = [
                (to[move.to : move.to + move.rows], t[move.origin : move.origin + move.rows])
                for move in moves
                for to, t in zip(rows, shown[move.rank], strict=True)
            ]
            pulls.append(self.region.pull(copies))
        for to, t in zip(rows, self.parts[stage], strict=True):
            here, own = words(to, t.transpose(0, 1))
            moves = self.moves.own
            copy_each(
                [here[move.to : move.to + move.rows] for move in moves],
                [own[move.origin : move.origin + move.rows] for move in moves],
            )
        return PulledStage(rows, pulls, self.way)

    @property
    def _of_others(self) -> tuple[Move, ...]:
        return self.moves.first + self.moves.later

    def _shown(self, rank: int, stage: int) -> list[Tensor]:
        """Return the rows that a rank shows of each tensor of a stage, ``[rows, B, H, D]``."""
        flat, shown = self.region.of(rank, self.dtype), self.shown[rank]
        begin, found = shown * sum(_row(t) for part in self.parts[:stage] for t in part), []
        for t in self.parts[stage]:
            end = begin + shown * _row(t)
            found.append(flat[begin:end].view(shown, t.shape[0], *t.shape[2:]))
            begin = end
        return found


class PulledStage:
    """The rows of a stage, on their way: first those of the first call."""

    def __init__(self, rows: list[Tensor], pulls: list[Pull], way: Route) -> None:
        self.rows, self.pulls = [t.transpose(0, 1) for t in rows], pulls
        self.first = way.first if way.parts and way.first is not way.parts[-1] else None

    def wait(self, part: Part) -> list[Tensor]:
        """Return the rows ``[B, length, H, D]`` in the order of positions, or packed keys.

        Those that the call reads are there. Others may be on their way.
        """
        for pull in self.pulls[:1] if part is self.first else self.pulls:
            pull.wait()
        return self.rows


@lru_cache(maxsize=256)
def moves_of(queries: Layout, keys: Layout, sight: Sight, rank: int) -> Moves:
    """Return the copies of a rank.

    Under a causal mask the first call needs rows of the ranks before this one. So its copies begin
    with the rank before, the others with the next one: each has one reader at a time.
    """
    way = route(queries, keys, sight, rank)
    packing = way.parts[0].packing if way.parts else None
    first = None if way.first is None else way.first.gathered
    own, now, later = [], [], []
    for other in (rank, *others_of(rank, keys.ranks)):
        there = route(queries, keys, sight, other)
        origins = way.sent[rank] if other == rank else rows_of(there.sent[rank], there.shown)
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


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]
