"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

The rows are those of ``exchange.py``. Packed keys of pieces (``pieces.py``) are pulled to their
places; a row of several pieces comes once for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..call.inputs import Arrivals
from ..torch_compat import copy_each
from .arrivals import MOST_BYTES, Ordered, ordered
from .exchange import elements, packed, words
from .groups import Group
from .layout import Layout
from .moves import Move, moves_of
from .routes import Part, Route, Sight, length_of, route
from .shared import Pull, Region


class PulledRows:
    """The rows that a rank needs of each ``[B, n, H, D]``, by stages of heads."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        place: tuple[Layout, Layout, Sight],
        group: Group,
        region: Region,
        counted: bool = False,
    ) -> None:
        ways = [route(*place, rank) for rank in range(group.size)]
        self.way, self.moves, self.region = ways[group.rank], moves_of(*place, group.rank), region
        self.dtype = tensors[0].dtype
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        self.shown = [length_of(way.shown) for way in ways]  # rows of each rank
        b, row = tensors[0].shape[0], max(map(_row, tensors)) * tensors[0].element_size()
        self.count: Tensor | None = None
        self.ordered: Ordered | None = None
        if counted and len(stages) == 1:
            heads, most = b * tensors[0].shape[2], max(1, MOST_BYTES // row)
            self.ordered = ordered(*place, group.rank, heads, most)
        size = (self.moves.arriving, b)
        #: memory for rows [arriving, B, H, D] of each stage, from before the copies
        self.rows = [[t.new_empty((*size, *t.shape[2:])) for t in part] for part in self.parts]
        if max(self.shown):  # else no rank waits for another
            size = max(self.shown) * sum(map(_row, tensors)) * tensors[0].element_size()
            own, begin = region.open(size).view(self.dtype), 0
            for part in self.parts:
                end = begin + elements([t.shape for t in part], self.way.shown)
                packed(part, [self.way.shown], own[begin:end])
                begin = end
            if self.ordered is not None:
                self.count = region.restart()
            region.show()

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage. Own rows are copied meanwhile."""
        rows, self.rows[stage] = self.rows[stage], []
        if self.ordered is not None:
            pulls = [self._pull(rows, stage, self.ordered.moves, counted=True)]
        else:
            each = (self.moves.first, self.moves.later)
            pulls = [self._pull(rows, stage, moves) for moves in each]
        for to, t in zip(rows, self.parts[stage], strict=True):
            here, own = words(to, t.transpose(0, 1))
            moves = self.moves.own
            copy_each(
                [here[move.to : move.to + move.rows] for move in moves],
                [own[move.origin : move.origin + move.rows] for move in moves],
            )
        return PulledStage(rows, pulls, self.way, self.ordered, self.count)

    def _pull(
        self, rows: list[Tensor], stage: int, moves: Sequence[Move], counted: bool = False
    ) -> Pull:
        """Begin the copies of some moves, and count them."""
        shown = {rank: self._shown(rank, stage) for rank in {move.rank for move in moves}}
        copies = [
            (to[move.to : move.to + move.rows], t[move.origin : move.origin + move.rows])
            for move in moves
            for to, t in zip(rows, shown[move.rank], strict=True)
        ]
        return self.region.pull(copies, len(rows) * counted)

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

    def __init__(
        self,
        rows: list[Tensor],
        pulls: list[Pull],
        way: Route,
        ordered: Ordered | None = None,
        count: Tensor | None = None,
    ) -> None:
        self._rows, self.pulls, self.way = [t.transpose(0, 1) for t in rows], pulls, way
        self.first = way.first if way.parts and way.first is not way.parts[-1] else None
        self._ordered, self._count = ordered, count

    def rows(self, part: Part) -> list[Tensor]:
        """Return memory ``[B, length, H, D]`` in the order of positions, or for packed keys."""
        return self._rows

    def wait(self, part: Part) -> None:
        """Let the current stream wait for the rows that a call reads."""
        several = part is self.first and len(self.pulls) > 1
        for pull in self.pulls[:1] if several else self.pulls:
            pull.wait()

    def arrivals(self, part: int) -> Arrivals | None:
        """Return what a call may wait for in its kernel, or None: then ``wait``."""
        if self._ordered is None or self._count is None:
            return None
        return self._ordered.arrivals(part, self._count)


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]
