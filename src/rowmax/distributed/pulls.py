"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

As ``exchange.py``, with the same order of sums: results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exchange import elements, packed, unpacked
from .groups import Group
from .layout import Layout, Ranges
from .routes import Route
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
        own = region.open(max(map(sum, sizes)) * tensors[0].element_size()).view(dtype)
        others = [() if rank == me else ranges for rank, ranges in enumerate(way.received)]
        packed(tensors, others, own)
        #: own rows need no copy
        self.parts: list[Tensor | None] = [None] * group.size
        self.parts[me] = packed(tensors, [way.received[me]])
        copies = []
        for other in _others(me, group.size):
            begin = sum(sizes[other][:me])
            part = own.new_empty(sizes[other][me])
            self.parts[other] = part
            copies.append((part, begin, other))
        region.show()
        self.copy = region.pull(
            (part, region.of(other, dtype)[begin : begin + part.numel()])
            for part, begin, other in copies
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
        first = parts[0]
        assert first is not None
        sums = [first.new_zeros((self.rows, b, *rest)) for b, _, *rest in self.shapes]
        for part, ranges in zip(parts, self.ways[self.rank].sent, strict=True):
            assert part is not None
            for total, each in zip(sums, unpacked(part, self.shapes, ranges), strict=True):
                for (start, stop), (_, piece) in zip(ranges, each, strict=True):
                    total[start:stop] += piece
        return [total.transpose(0, 1) for total in sums]


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, from the next one on: each has one reader at a time."""
    return [(rank + step) % size for step in range(1, size)]


def _copy_ranges(to: Tensor, at: Ranges, origin: Tensor, rows: Ranges) -> None:
    for (a, b), (c, d) in zip(at, rows, strict=True):
        to[a:b] = origin[c:d]
