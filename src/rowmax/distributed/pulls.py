"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

As ``exchange.py``, with the same order of sums: results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exchange import elements, packed, summed
from .groups import Group
from .layout import Layout, Ranges
from .pieces import Packing
from .routes import Route, rows_of
from .shared import Pull, Region


class PulledRows:
    """The rows that a rank needs of each ``[B, n, H, D]``, by stages of heads.

    Own rows of all stages are shown at once, those of a stage together.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        ways: Sequence[Route],
        keys: Layout,
        group: Group,
        region: Region,
    ) -> None:
        self.rank, self.ways, self.keys, self.region = group.rank, ways, keys, region
        self.dtype = tensors[0].dtype
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        row = sum(t.shape[0] * t.shape[2] * t.shape[3] for t in tensors)
        own = region.open(max(keys.lengths) * row * tensors[0].element_size()).view(self.dtype)
        way, n, begin = ways[self.rank], keys.lengths[self.rank], 0
        #: the gathered rows of each stage, [length, B, H, D]; memory from before the copies
        self.rows: list[list[Tensor]] = []
        for part in self.parts:
            for t in part:
                to = own[begin : begin + t.numel()].view(n, t.shape[0], *t.shape[2:])
                to.copy_(t.transpose(0, 1))
                begin += t.numel()
            self.rows.append([t.new_empty((way.length, t.shape[0], *t.shape[2:])) for t in part])
            for to, t in zip(self.rows[-1], part, strict=True):
                _copy_ranges(to, way.received[self.rank], t.transpose(0, 1), way.sent[self.rank])
        region.show()

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage."""
        rows, self.rows[stage] = self.rows[stage], []
        copies = []
        for other in _others(self.rank, len(self.ways)):
            n = self.keys.lengths[other]
            shown = self.region.of(other, self.dtype)
            begin = n * sum(_row(t) for part in self.parts[:stage] for t in part)
            for to, t in zip(rows, self.parts[stage], strict=True):
                size = n * _row(t)
                origin = shown[begin : begin + size].view(n, *to.shape[1:])
                begin += size
                ranges = zip(
                    self.ways[self.rank].received[other], self.ways[other].sent[self.rank],
                    strict=True,
                )  # fmt: skip
                copies += [(to[a:b], origin[c:d]) for (a, b), (c, d) in ranges]
        return PulledStage(rows, self.region.pull(copies))


class PulledStage:
    """The rows of a stage, on their way."""

    def __init__(self, rows: list[Tensor], copy: Pull) -> None:
        self.rows, self.copy = rows, copy

    def wait(self) -> list[Tensor]:
        """Return the rows ``[B, length, H, D]``, in the order of positions."""
        self.copy.wait()
        rows, self.rows = self.rows, []
        return [t.transpose(0, 1) for t in rows]


class PulledPieces:
    """The packed keys of a rank's pieces (``pieces.py``), by stages of heads.

    Only rows that other ranks need are shown. Own rows are packed while others arrive.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        ways: Sequence[Route],
        packing: Packing | None,
        group: Group,
        region: Region,
    ) -> None:
        self.rank, self.ways, self.packing, self.region = group.rank, ways, packing, region
        self.dtype = tensors[0].dtype
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        self.shown = [_length(way.shown) for way in ways]  # rows of each rank
        self.moves = max(self.shown) > 0  # else no rank waits for another
        way = ways[self.rank]
        arriving = sum(_length(way.received[other]) for other in _others(self.rank, len(ways)))
        #: memory for rows of other ranks, from before the copies
        self.rows = [[t.new_empty((arriving, *t.shape[2:])) for t in part] for part in self.parts]
        if self.moves:
            size = max(self.shown) * sum(map(_row, tensors)) * tensors[0].element_size()
            own, begin = region.open(size).view(self.dtype), 0
            for part in self.parts:
                end = begin + elements([t.shape for t in part], way.shown)
                packed(part, [way.shown], own[begin:end])
                begin = end
            region.show()

    def begin(self, stage: int) -> PackedStage:
        """Begin the copies of a stage."""
        rows, self.rows[stage] = self.rows[stage], []
        copies, received = [], self.ways[self.rank].received
        numbers = _numbers(received, self.rank)
        for other in _others(self.rank, len(self.ways)) if self.moves else ():
            n, way = self.shown[other], self.ways[other]
            shown = self.region.of(other, self.dtype)
            begin = n * sum(_row(t) for part in self.parts[:stage] for t in part)
            at = rows_of(way.sent[self.rank], way.shown)
            for to, t in zip(rows, self.parts[stage], strict=True):
                size = n * _row(t)
                origin = shown[begin : begin + size].view(n, *t.shape[2:])
                begin += size
                for (a, b), (c, d) in zip(received[other], at, strict=True):
                    first = numbers[a]
                    copies.append((to[first : first + b - a], origin[c:d]))
        return PackedStage(self.parts[stage], rows, self.packing, self.region.pull(copies))


def _numbers(received: Sequence[Ranges], rank: int) -> dict[int, int]:
    """Return the number of the first row of each range from other ranks, among all such rows."""
    found, row = {}, 0
    for start, stop in sorted(
        pair for other, ranges in enumerate(received) if other != rank for pair in ranges
    ):
        found[start] = row
        row += stop - start
    return found


class PackedStage:
    """The packed keys of a stage, on their way."""

    def __init__(
        self, own: list[Tensor], rows: list[Tensor], packing: Packing | None, copy: Pull
    ) -> None:
        self.own, self.rows, self.packing, self.copy = own, rows, packing, copy

    def wait(self) -> list[Tensor]:
        """Return the keys of all pieces, ``[1, T, H, D]``."""
        packing, own, rows = self.packing, self.own, self.rows
        self.own, self.rows = [], []
        if packing is None:  # no queries
            self.copy.wait()
            return [t[:, :0] for t in own]
        found = [packing.of_own(t[0]) for t in own]
        self.copy.wait()
        for t, arrived in zip(found, rows, strict=True):
            packing.set_others(t, arrived)
        return [t[None] for t in found]


class PulledReturn:
    """Gradients of gathered rows ``[B, length, H, D]``, on their way to the ranks of the rows."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        ways: Sequence[Route],
        rows: int,
        group: Group,
        region: Region,
    ) -> None:
        self.rank, self.ways, self.rows = group.rank, ways, rows
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
        starts = {other: sum(sizes[other][:me]) for other in _others(me, group.size)}
        self.copy = region.pull(
            (self.parts[other], region.of(other, dtype)[begin : begin + sizes[other][me]])
            for other, begin in starts.items()
        )

    def _sent(self, rank: int) -> list[int]:
        """Return how many elements a rank shows for each other."""
        received = self.ways[rank].received
        return [
            0 if other == rank else elements(self.shapes, ranges)
            for other, ranges in enumerate(received)
        ]

    def wait(self) -> list[Tensor]:
        """Return the sums over all ranks for each own row, in the order of ranks."""
        self.copy.wait()
        parts, self.parts = self.parts, []
        return summed(parts, self.ways[self.rank].sent, self.rows, self.shapes)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, from the next one on: each has one reader at a time."""
    return [(rank + step) % size for step in range(1, size)]


def _copy_ranges(to: Tensor, at: Ranges, origin: Tensor, rows: Ranges) -> None:
    for (a, b), (c, d) in zip(at, rows, strict=True):
        to[a:b] = origin[c:d]
