"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

As ``exchange.py``, with the same order of sums: results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..torch_compat import copy_each
from .exchange import Sums, elements, others_of, packed, summed, words
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

        Of the first stage, the former are read if nothing computes meanwhile.
        """
        first, parts = self.ways[self.rank].first, self.ways[self.rank].parts
        now, later = self._copies(stage, rows, first)
        idle = stage == 0 and first is not None and first is parts[0]
        begun = self.region.read(now) if idle else self.region.pull(now)
        return [begun, self.region.pull(later)]

    def _copies(self, stage: int, rows: list[Tensor], first: Part | None) -> tuple[Copies, Copies]:
        """Return the copies of a stage: those for the first call that waits, and all others."""
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
        return found

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


class PulledReturn:
    """Gradients of gathered rows ``[B, length, H, D]``, on their way to the ranks of the rows.

    ``idle`` is True if nothing computes until ``wait``, which then adds the parts where they are.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        ways: Sequence[Route],
        group: Group,
        region: Region,
        idle: bool,
    ) -> None:
        self.rank, self.ways = group.rank, ways
        self.shapes = [t.shape for t in tensors]
        me, way = group.rank, ways[group.rank]
        dtype = tensors[0].dtype
        sizes = [self._sent(rank) for rank in range(group.size)]  # elements of each rank for each
        most = max(map(sum, sizes))
        own = tensors[0].new_empty(0)
        if most:  # else no rank waits for another
            own = region.open(most * tensors[0].element_size()).view(dtype)
        others = [() if rank == me else ranges for rank, ranges in enumerate(way.received)]
        packed(tensors, others, own)
        #: own rows need no copy
        self.parts = [own.new_empty(each[me]) for each in sizes]
        self.parts[me] = packed(tensors, [way.received[me]])
        if most:
            region.show()
        shown = {}
        for other in others_of(me, group.size) if most else ():
            begin = sum(sizes[other][:me])
            shown[other] = region.of(other, dtype)[begin : begin + sizes[other][me]]
        if idle:
            for other, part in shown.items():
                self.parts[other] = part
            shown = {}
        self.copy = region.pull([(self.parts[other], part) for other, part in shown.items()])

    def _sent(self, rank: int) -> list[int]:
        """Return how many elements a rank shows for each other."""
        received = self.ways[rank].received
        return [
            0 if other == rank else elements(self.shapes, ranges)
            for other, ranges in enumerate(received)
        ]

    def wait(self) -> Sums:
        """Return the sums over all ranks."""
        self.copy.wait()
        parts, self.parts = self.parts, []
        return summed(parts, self.ways[self.rank].sent, self.shapes, self.rank)


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]
