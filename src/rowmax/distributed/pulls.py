"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

The rows are those of ``exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..torch_compat import copy_each
from .exchange import elements, others_of, packed, words
from .groups import Group
from .pieces import Packing
from .routes import Part, Route, length_of, rows_of
from .shared import Pull, Region

Copies = list[tuple[Tensor, Tensor]]  # (to, from)


class _Shown:
    """Own rows that other ranks need, of all stages at once, where others can read them."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        ways: Sequence[Route],
        group: Group,
        region: Region,
    ) -> None:
        self.rank, self.ways, self.region = group.rank, ways, region
        self.dtype = tensors[0].dtype
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        self.shown = [length_of(way.shown) for way in ways]  # rows of each rank
        self.moves = max(self.shown) > 0  # else no rank waits for another
        #: memory for rows [length, B, H, D] of each stage, from before the copies
        self.rows = [
            [t.new_empty((self.arriving(), t.shape[0], *t.shape[2:])) for t in part]
            for part in self.parts
        ]
        if self.moves:
            size = max(self.shown) * sum(map(_row, tensors)) * tensors[0].element_size()
            own, begin = region.open(size).view(self.dtype), 0
            shown = ways[self.rank].shown
            for part in self.parts:
                end = begin + elements([t.shape for t in part], shown)
                packed(part, [shown], own[begin:end])
                begin = end
            region.show()

    def arriving(self) -> int:
        """Return the number of rows to make memory for."""
        raise NotImplementedError

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (first row of memory, start, stop) of the places of a range of gathered rows."""
        raise NotImplementedError

    def pulls(self, stage: int, rows: list[Tensor]) -> list[Pull]:
        """Begin the copies of a stage: those for the first call that waits, then all others.

        Under a causal mask the former come from the ranks before this one. So they begin with the
        rank before, the others with the next one: each has one reader at a time.
        """
        first = self.ways[self.rank].first
        found: tuple[Copies, Copies] = ([], [])
        for other in others_of(self.rank, len(self.ways)) if self.moves else ():
            way = self.ways[other]
            shown = self.region.of(other, self.dtype)
            begin = self.shown[other] * sum(_row(t) for part in self.parts[:stage] for t in part)
            origins = rows_of(way.sent[self.rank], way.shown)
            ranges = list(zip(self.ways[self.rank].received[other], origins, strict=True))
            for to, t in zip(rows, self.parts[stage], strict=True):
                size = self.shown[other] * _row(t)
                origin = shown[begin : begin + size].view(-1, *to.shape[1:])
                begin += size
                for (start, stop), (row, _) in ranges:
                    for x, a, b in self.places(start, stop):
                        for late, (c, d) in _by_arrival(a, b, first.gathered if first else None):
                            here, there = to[x + c - a :], origin[row + c - start :]
                            found[late].append((here[: d - c], there[: d - c]))
        found[0].reverse()
        return [self.region.pull(each) for each in found]

    def copy_own(self, stage: int, rows: list[Tensor]) -> None:
        """Copy own rows to their places, while others arrive."""
        way = self.ways[self.rank]
        own = list(zip(way.received[self.rank], way.sent[self.rank], strict=True))
        pairs = [
            words(to[x : x + b - a], t.transpose(0, 1)[row + a - start : row + b - start])
            for to, t in zip(rows, self.parts[stage], strict=True)
            for (start, stop), (row, _) in own
            for x, a, b in self.places(start, stop)
        ]
        copy_each([here for here, _ in pairs], [there for _, there in pairs])


class PulledRows(_Shown):
    """The rows that a rank needs of each ``[B, n, H, D]``, by stages of heads."""

    def arriving(self) -> int:
        """Return the number of gathered rows."""
        return self.ways[self.rank].length

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the range itself."""
        return [(start, start, stop)]

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage. Own rows are copied meanwhile."""
        rows, self.rows[stage] = self.rows[stage], []
        pulls = self.pulls(stage, rows)
        self.copy_own(stage, rows)
        return PulledStage(rows, pulls, self.ways[self.rank])


class PulledStage:
    """The rows of a stage, on their way: first those of the first call."""

    def __init__(self, rows: list[Tensor], pulls: list[Pull], way: Route) -> None:
        self.rows, self.pulls = [t.transpose(0, 1) for t in rows], pulls
        self.first = way.first if way.parts and way.first is not way.parts[-1] else None

    def wait(self, part: Part) -> list[Tensor]:
        """Return the rows ``[B, length, H, D]``, in the order of positions.

        Those that the call reads are there. Others may be on their way.
        """
        for pull in self.pulls[:1] if part is self.first else self.pulls:
            pull.wait()
        return self.rows


class PulledPieces(_Shown):
    """The packed keys of a rank's pieces (``pieces.py``), by stages of heads."""

    @property
    def packing(self) -> Packing | None:
        """The packing of this rank; None without queries."""
        parts = self.ways[self.rank].parts
        return parts[0].packing if parts else None

    def arriving(self) -> int:
        """Return the number of packed keys."""
        return self.packing.rows if self.packing else 0

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the packed keys of each piece that has some of the range."""
        return self.packing.places(start, stop) if self.packing else []

    def begin(self, stage: int) -> PackedStage:
        """Begin the copies of a stage. Own rows are packed meanwhile."""
        rows, self.rows[stage] = self.rows[stage], []
        pulls = self.pulls(stage, rows)
        self.copy_own(stage, rows)
        return PackedStage([t[:, 0] for t in rows], pulls)


def _by_arrival(start: int, stop: int, first: slice | None) -> list[tuple[bool, tuple[int, int]]]:
    """Return a range of gathered rows cut where those of the first call end; True for others."""
    if first is None:
        return [(True, (start, stop))]
    ends = sorted({start, stop, *(x for x in (first.start, first.stop) if start < x < stop)})
    return [(not first.start <= a < first.stop, (a, b)) for a, b in pairwise(ends)]


class PackedStage:
    """The packed keys of a stage, on their way."""

    def __init__(self, packed: list[Tensor], pulls: list[Pull]) -> None:
        self.packed, self.pulls = packed, pulls

    def wait(self, part: Part) -> list[Tensor]:
        """Return the keys of all pieces, ``[1, T, H, D]``."""
        for pull in self.pulls:
            pull.wait()
        return [t[None] for t in self.packed]


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]
