"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

The rows are those of ``exchange.py``. Packed keys of pieces (``pieces.py``) are pulled to their
places; a row of several pieces comes once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Arrivals
from ..torch_compat import copy_each
from .arrivals import Copy, Ordered, come_by_heads, may_count, ordered
from .exchange import words
from .groups import Group
from .layout import Layout, Ranges
from .moves import Moves, in_place, moves_of, shared_rows
from .pieces import Sight
from .routes import Part, Route, route
from .shared import Pull, Regions
from .streams import OnStream

#: bytes of own rows from which on their copy is worth a second stream, about 25 us of the host
LEAST_OWN = 16 << 20
#: memory of a stage begins at multiples of so many elements
ALIGNED = 128


class Rows:
    """Rows of k and v in flat memory.

    Those of one tensor, then of the next: ``[rows, B, H, D]``. Or by kv heads, each row of k next
    to that of v: ``[H, rows, B, D + Dv]``.
    """

    def __init__(self, flat: Tensor, rows: int, like: Sequence[Tensor], *, by_heads: bool) -> None:
        self.flat, self.rows, self.like, self.by_heads = flat, rows, like, by_heads

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """Memory in which a range of rows is one copy: its first element, the elements of a row."""
        sizes = [_row(t) for t in self.like]
        if self.by_heads:
            sizes = [sum(sizes) // self.like[0].shape[2]] * self.like[0].shape[2]
        starts = accumulate((self.rows * size for size in sizes), initial=0)
        return list(zip(starts, sizes, strict=False))

    @cached_property
    def views(self) -> Sequence[Tensor]:
        """The rows of each tensor, ``[rows, B, H, D]``."""
        flat, rows, like = self.flat[: self.rows * sum(map(_row, self.like))], self.rows, self.like
        each = [(t.shape[0], *t.shape[2:]) for t in like]
        if self.by_heads:
            (b, heads, _), widths = each[0], [d for _, _, d in each]
            memory = flat.view(heads, rows, b, sum(widths))
            return [part.permute(1, 2, 0, 3) for part in memory.split(widths, 3)]
        parts = flat.split([rows * _row(t) for t in like])
        return [x.view(rows, *sizes) for x, sizes in zip(parts, each, strict=True)]

    def places(self, head: int | None, first: int, count: int) -> list[tuple[int, int]]:
        """Return (first element, elements) of rows of the unit of a head, or of all units."""
        units = self.units if head is None else self.units[head : head + 1]
        return [(start + first * size, count * size) for start, size in units]

    def ranges(self, head: int | None, first: int, count: int) -> list[Tensor]:
        """Return some rows of the unit of a head, or those of all units, each as it lies."""
        return [self.flat[begin : begin + n] for begin, n in self.places(head, first, count)]

    def put(self, moves: tuple[tuple[int, int, int], ...]) -> None:
        """Copy (to, from, rows) of the tensors, in one launch or by words where it can be."""
        if self.flat.is_cuda and _by_kernel(self, moves):
            return
        to: list[Tensor] = []
        origins: list[Tensor] = []
        for view, t in zip(self.views, self.like, strict=True):
            here, own = words(view, t.transpose(0, 1))
            to += [here[a : a + n] for a, _, n in moves]
            origins += [own[b : b + n] for _, b, n in moves]
        copy_each(to, origins)

    def distances(self) -> tuple[tuple[int, int], ...]:
        """Return the elements from row to row of k and of v, batch to batch, head to head.

        Then come those of the first row.
        """
        (b, heads, d), (_, _, dv) = ((t.shape[0], *t.shape[2:]) for t in self.like)
        if self.by_heads:
            both = d + dv
            return (b * both,) * 2, (both,) * 2, (self.rows * b * both,) * 2, (0, d)
        row = b * heads
        return (row * d, row * dv), (heads * d, heads * dv), (d, dv), (0, self.rows * row * d)


def _by_kernel(rows: Rows, moves: tuple[tuple[int, int, int], ...]) -> bool:
    """Copy rows of k and v in one launch; return False without Triton."""
    try:
        from ..gpu.row_copies import Placement, copy_rows
    except ImportError:
        return False
    k, v = rows.like
    if k.stride(3) != 1 or v.stride(3) != 1:
        return False
    copy_rows(k, v, rows.flat, Placement(*rows.distances()), moves)
    return True


class _Copies(NamedTuple):
    """Copies from shared memory to flat memory of a size: their sources, and where they go.

    Views take 3 us each, and some calls have a hundred copies.
    """

    sources: list[Tensor]
    sizes: list[int]  # parts of the memory
    parts: list[int]  # by copy, which part it goes to

    def to(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the copies to this memory, each with its source."""
        parts = flat.split(self.sizes)
        return [(parts[n], source) for n, source in zip(self.parts, self.sources, strict=True)]


def _copies(pairs: Sequence[tuple[tuple[int, int], Tensor]], size: int) -> _Copies:
    """Return copies to places (first element, elements) of flat memory, each from its source."""
    sizes, parts, end = [], [0] * len(pairs), 0
    for n, ((begin, count), _) in sorted(enumerate(pairs), key=lambda one: one[1][0]):
        sizes.append(begin - end)
        parts[n] = len(sizes)
        sizes.append(count)
        end = begin + count
    return _Copies([source for _, source in pairs], [*sizes, size - end], parts)


class PulledRows:
    """The rows that a rank needs of each ``[B, n, H, D]``, by stages of heads.

    ``arriving``: kernels may wait for the rows of a single stage themselves (``arrivals.py``).
    ``one``: both chunks of this rank are one call.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        place: tuple[Layout, Layout, Sight],
        group: Group,
        regions: Regions,
        arriving: bool = False,
        one: bool = False,
    ) -> None:
        self.way, self.rank = route(*place, group.rank), group.rank
        self.parts = [[t[:, :, heads] for t in tensors] for heads in stages]
        self.widths = [sum(map(_row, part)) for part in self.parts]
        size = sum(self.widths) * tensors[0].element_size()
        #: rows of each rank in shared memory
        self.shared = shared_rows(*place, size)
        self.in_place = in_place(*place, size)
        self.moves = moves_of(*place, group.rank, self.in_place)
        self.count: Tensor | None = None
        self.ordered: Ordered | None = None
        self.by_heads = False
        if arriving and len(stages) == 1:
            heads = tensors[0].shape[2]
            row = heads, size // heads
            self.by_heads = come_by_heads(*place, *row)
            if may_count(tensors[0].device):
                self.ordered = ordered(*place, group.rank, *row, self.in_place, one)
        self.second: torch.cuda.Stream | None = None
        #: the rows of each stage, in memory from before the copies
        self.rows: list[Rows | None] = [] if self.in_place else [
            Rows(part[0].new_empty(self.moves.arriving * width), self.moves.arriving, part,
                 by_heads=self.by_heads)
            for part, width in zip(self.parts, self.widths, strict=True)
        ]  # fmt: skip
        self.region = regions.rows[0]
        if max(self.shared):  # else no rank waits for another
            size = max(self.shared) * size + len(stages) * ALIGNED * tensors[0].element_size()
            self.region, meets = regions.turn(size)
            self._show(size, meets)

    def _show(self, size: int, meets: bool) -> None:
        """Let other ranks read own rows, where they read none any more."""
        stages, region = range(len(self.parts)), self.region
        self.second = self._second_stream()
        before: Any = None if self.second is None else _current(self.second).record_event()
        region.open(size, meets=meets)
        if self.in_place:
            self.rows = [self._shown(self.rank, stage) for stage in stages]
            for stage in stages:
                self._put_own(stage)
        else:
            if self.second is not None:
                self.second.wait_event(before)
                with OnStream(self.second):
                    self._put_own(0)
            shown = _shown_moves(self.way.shown)
            for stage in stages:
                self._shown(self.rank, stage).put(shown)
        if self.ordered is not None:
            self.count = region.restart()
        region.show()

    def _second_stream(self) -> torch.cuda.Stream | None:
        """Return the stream of own rows, and of all calls but the first, or None."""
        if self.ordered is None or self.region.device.type != "cuda":
            return None
        rows = 0 if self.in_place else sum(move.rows for move in self.moves.own)
        own = rows * self.widths[0]
        used = gains_by_two_streams(self.way.parts, own * self.parts[0][0].element_size())
        return self.region.own_stream("calls") if used else None

    def _put_own(self, stage: int) -> None:
        rows = self.rows[stage]
        assert rows is not None
        rows.put(_own_moves(self.moves))

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage. Own rows are copied meanwhile."""
        moves, rows = self.moves, self.rows[stage]
        assert rows is not None
        if self.ordered is not None:
            group = 1 if self.by_heads else len(rows.units)
            pulls = [self.region.pull(self._ordered_copies(rows, stage).to(rows.flat), group)]
        else:
            heads = range(len(rows.units)) if self.by_heads else (None,)
            pulls = [
                self._pull(rows, stage, [Copy(head, move) for head in heads for move in each])
                for each in (moves.first, moves.later)
            ]
        if self.second is None and not self.in_place:
            self._put_own(stage)
        elif self.second is not None and self.way.parts[0].own is None:
            _current(self.second).wait_stream(self.second)
        self.rows[stage] = None
        return PulledStage(rows.views, pulls, self.way, self.ordered, self.count, self.second)

    def _ordered_copies(self, rows: Rows, stage: int) -> _Copies:
        """Return the copies that are counted, in their order."""
        assert self.ordered is not None
        flat, copies = rows.flat, self.ordered.copies
        shapes = tuple(t.shape for t in rows.like)
        key = self.ordered, flat.dtype, flat.numel(), shapes

        def made() -> _Copies:
            sources = self._sources(stage, copies)
            places = [at for head, move in copies for at in rows.places(head, move.to, move.rows)]
            return _copies(list(zip(places, sources, strict=True)), flat.numel())

        return self.region.kept(key, made)

    def _sources(self, stage: int, copies: Sequence[Copy]) -> list[Tensor]:
        """Return what copies read."""
        shown = {rank: self._shown(rank, stage) for rank in {move.rank for _, move in copies}}
        each = [shown[move.rank].ranges(head, move.origin, move.rows) for head, move in copies]
        return [part for parts in each for part in parts]

    def _pull(self, rows: Rows, stage: int, copies: Sequence[Copy]) -> Pull:
        """Begin copies."""
        each = [rows.ranges(head, move.to, move.rows) for head, move in copies]
        to = [part for parts in each for part in parts]
        return self.region.pull(list(zip(to, self._sources(stage, copies), strict=True)))

    def _shown(self, rank: int, stage: int) -> Rows:
        """Return the rows of a rank in shared memory, of a stage."""
        part, rows = self.parts[stage], self.shared[rank]
        begin = sum(-(-rows * width // ALIGNED) * ALIGNED for width in self.widths[:stage])
        flat = self.region.of(rank, part[0].dtype)[begin:]
        return Rows(flat, rows, part, by_heads=self.by_heads)


def gains_by_two_streams(parts: Sequence[Part], own: int) -> bool:
    """Return True for a long call of own keys before others, or one call with many own bytes.

    Calls that all wait for keys have one stream: blocks of a later call would wait where those of
    the first could compute.
    """
    if len(parts) == 1:
        return own >= LEAST_OWN
    rows = [part.rows.stop - part.rows.start for part in parts]
    return len(parts) > 1 and parts[0].own is not None and 2 * rows[0] > sum(rows)


@lru_cache(maxsize=256)
def _shown_moves(ranges: Ranges) -> tuple[tuple[int, int, int], ...]:
    """Return (to, from, rows) of ranges of own rows, one after the other."""
    starts = accumulate((stop - start for start, stop in ranges), initial=0)
    pairs = zip(starts, ranges, strict=False)
    return tuple((to, start, stop - start) for to, (start, stop) in pairs)


@lru_cache(maxsize=256)
def _own_moves(moves: Moves) -> tuple[tuple[int, int, int], ...]:
    """Return (to, from, rows) of own rows."""
    return tuple((move.to, move.origin, move.rows) for move in moves.own)


class PulledStage:
    """The rows of a stage, on their way: first those of the first call."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        pulls: list[Pull],
        way: Route,
        ordered: Ordered | None = None,
        count: Tensor | None = None,
        second: torch.cuda.Stream | None = None,
    ) -> None:
        self._rows, self.pulls, self.way = [t.transpose(0, 1) for t in rows], pulls, way
        self.first = way.first if way.parts and way.first is not way.parts[-1] else None
        self._ordered, self._count = ordered, count
        self.second = second  # the stream of all calls but the first, or None

    def rows(self, part: Part) -> list[Tensor]:
        """Return memory ``[B, length, H, D]`` in the order of positions, or for packed keys."""
        return self._rows

    def wait(self, part: Part) -> None:
        """Let the current stream wait for the rows that a call reads."""
        if part.own is not None:
            return
        several = part is self.first and len(self.pulls) > 1
        for pull in self.pulls[:1] if several else self.pulls:
            pull.wait()

    def arrivals(self, part: int) -> Arrivals | None:
        """Return what a call may wait for in its kernel, or None: then ``wait``."""
        if self._ordered is None or self._count is None:
            return None
        return self._ordered.arrivals(part, self._count)


def _current(other: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.current_stream(other.device)


def _row(t: Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]
