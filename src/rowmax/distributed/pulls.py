"""Copies of rows between ranks that share memory (``shared.py``): each pulls what it needs.

The rows are those of ``exchange.py``. Packed keys of pieces (``pieces.py``) are pulled to their
places; a row of several pieces comes once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Arrivals
from .arrivals import Copy, Ordered, come_by_heads, ordered
from .layout import Layout
from .moves import in_place, moves_of, shared_rows
from .pieces import Sight
from .routes import Part, route
from .row_places import Moved, RowPlaces, put
from .shared import Copies, Pull, Regions
from .streams import OnStream

#: bytes of own rows from which on their copy is worth a second stream, about 25 us of the host
LEAST_OWN = 16 << 20
#: memory of a stage begins at multiples of so many elements
ALIGNED = 128

Steps = Sequence[tuple[int, Copies]]  # copies that are counted together, with the count


class _Copies(NamedTuple):
    """Copies from shared memory to flat memory of a size: their sources, and where they go.

    Views take 3 us each, and some calls have a hundred copies.
    """

    sources: list[Tensor]
    sizes: list[int]  # parts of the memory
    parts: list[int]  # by copy, which part it goes to
    steps: list[tuple[int, slice]]  # copies that are counted together, with the count

    def to(self, flat: Tensor) -> Steps:
        """Return the copies to this memory, each with its source, in steps."""
        if not self.sources:
            return []
        parts = flat.split(self.sizes)
        both = [(parts[n], source) for n, source in zip(self.parts, self.sources, strict=True)]
        return [(count, both[some]) for count, some in self.steps]


def _copies(
    places: Sequence[tuple[int, int]], sources: list[Tensor], size: int, steps: Sequence[int]
) -> _Copies:
    """Return copies to places (first element, elements) of flat memory, counted in steps."""
    sizes, parts, end = [], [0] * len(places), 0
    for n, (begin, count) in sorted(enumerate(places), key=lambda one: one[1]):
        sizes.append(begin - end)
        parts[n] = len(sizes)
        sizes.append(count)
        end = begin + count
    each = len(places) // steps[-1] if steps else 1  # k and v, or rows of both
    ends = pairwise([0, *steps])
    counted = [(b, slice(a * each, b * each)) for a, b in ends]
    return _Copies(sources, [*sizes, size - end], parts, counted)


class PullPlan:
    """Plan how a rank shows its rows, and gets those that it needs, in calls of one kind.

    Args:
        tensors: k and v ``[B, n, H, D]``, for their sizes.
        stages: the heads of each stage.
        place: the layouts of queries and of keys, and the limits of the mask.
        rank: this rank of the group.
        arriving: kernels can wait for the rows of the single stage themselves (``arrivals.py``).
        counts: they do.
        one: both chunks of this rank are one call.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stages: Sequence[slice],
        place: tuple[Layout, Layout, Sight],
        rank: int,
        arriving: bool,
        counts: bool,
        one: bool,
    ) -> None:
        self.way, self.rank, self.stages = route(*place, rank), rank, stages
        b, _, heads, _ = tensors[0].shape
        widths = [t.shape[3] for t in tensors]
        bytes_of_head = b * sum(widths) * tensors[0].element_size()
        size = heads * bytes_of_head
        #: rows of each rank in shared memory
        self.shared = shared_rows(*place, size)
        self.in_place = in_place(*place, size)
        self.moves = moves_of(*place, rank, self.in_place)
        self.own: Moved = tuple((x.to, x.origin, x.rows) for x in self.moves.own)
        starts = accumulate((stop - start for start, stop in self.way.shown), initial=0)
        pairs = zip(starts, self.way.shown, strict=False)
        self.shown: Moved = tuple((to, start, stop - start) for to, (start, stop) in pairs)
        self.ordered: Ordered | None = None
        by_heads = arriving and come_by_heads(*place, heads, bytes_of_head)
        if counts:
            self.ordered = ordered(*place, rank, heads, bytes_of_head, self.in_place, one)
        sizes = [[(b, kv.stop - kv.start, d) for d in widths] for kv in stages]
        #: gathered rows, by stage
        self.gathered = [RowPlaces((k, v), self.moves.arriving, by_heads) for k, v in sizes]
        #: rows in shared memory, by stage and rank
        self.there = [[RowPlaces((k, v), n, by_heads) for n in self.shared] for k, v in sizes]
        each = [
            [-(-one.rows * one.width // ALIGNED) * ALIGNED for one in stage] for stage in self.there
        ]
        #: the first element of a stage, by stage and rank
        self.begins = list(accumulate(each, _added, initial=[0] * len(self.shared)))
        #: bytes of shared memory, the same on all ranks
        self.bytes = max(self.shared) * size
        self.bytes += len(stages) * ALIGNED * tensors[0].element_size()
        own = 0 if self.in_place else sum(move.rows for move in self.moves.own)
        #: calls have two streams
        self.abreast = self.ordered is not None and gains_by_two_streams(self.way.parts, own * size)


def _added(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


class PulledRows:
    """The rows that a rank needs of k and v ``[B, n, H, D]``, by stages of heads."""

    def __init__(self, tensors: Sequence[Tensor], plan: PullPlan, regions: Regions) -> None:
        self.plan, self.region = plan, regions.rows[0]
        heads = tensors[0].shape[2]
        whole = plan.stages == [slice(0, heads)]
        self.parts = [tensors if whole else [t[:, :, kv] for t in tensors] for kv in plan.stages]
        self.count: Tensor | None = None
        self.second: torch.cuda.Stream | None = None
        #: the rows of each stage, in memory from before the copies
        self.rows: list[Tensor | None] = [] if plan.in_place else [
            tensors[0].new_empty(one.rows * one.width) for one in plan.gathered
        ]  # fmt: skip
        if max(plan.shared):  # else no rank waits for another
            self.region, meets = regions.turn(plan.bytes)
            self._show(meets)

    def _show(self, meets: bool) -> None:
        """Let other ranks read own rows, where they read none any more."""
        plan, region = self.plan, self.region
        if not plan.abreast or region.device.type != "cuda":
            self._write(meets)
            region.show()
            return
        # a first call of own keys waits for no rank, but begins after the copies of rows: they need
        # multiprocessors
        alone = plan.way.parts[0].own is not None
        second = self.second = region.own_stream("calls" if alone else "rows", urgent=alone)
        here = _current(second)
        second.wait_stream(here)
        if not plan.in_place:
            with OnStream(here if alone else second):
                self._put_own(0)
        with OnStream(second if alone else here):
            self._write(meets)
            written = _current(second).record_event()
            region.show()
        if alone:
            here.wait_event(written)

    def _write(self, meets: bool) -> None:
        """Copy own rows to where other ranks read them."""
        plan, region = self.plan, self.region
        stages = range(len(self.parts))
        region.open(plan.bytes, meets=meets)
        if plan.in_place:
            self.rows = [self._shared(plan.rank, stage) for stage in stages]
            for stage in stages:
                self._put_own(stage)
        else:
            for stage in stages:
                flat, places = self._shared(plan.rank, stage), plan.there[stage][plan.rank]
                put(flat, places, self.parts[stage], plan.shown)
        if plan.ordered is not None:
            self.count = region.restart()

    def _put_own(self, stage: int) -> None:
        flat = self.rows[stage]
        assert flat is not None
        put(flat, self.plan.gathered[stage], self.parts[stage], self.plan.own)

    def begin(self, stage: int) -> PulledStage:
        """Begin the copies of a stage. Own rows are copied meanwhile."""
        plan, flat, places = self.plan, self.rows[stage], self.plan.gathered[stage]
        assert flat is not None
        if plan.ordered is not None:
            order = plan.ordered
            steps = self._steps(flat, stage, "all", lambda: (order.copies, order.steps))
            pulls = [self.region.pull_counted(steps)]
        else:
            pulls = [self.region.pull(self._plain(flat, stage, x)) for x in ("first", "later")]
        if self.second is None and not plan.in_place:
            self._put_own(stage)
        elif self.second is not None and plan.way.parts[0].own is None:
            _current(self.second).wait_stream(self.second)
        self.rows[stage] = None
        return PulledStage(places.tensors(flat), pulls, plan, self.count, self.second)

    def _plain(self, flat: Tensor, stage: int, name: str) -> Copies:
        """Return the copies for the first call that waits, or for later ones."""
        places = self.plan.gathered[stage]

        def found() -> tuple[Sequence[Copy], Sequence[int]]:
            heads = range(len(places.units)) if places.by_heads else (None,)
            moves = getattr(self.plan.moves, name)
            copies = [Copy(head, move) for head in heads for move in moves]
            return copies, [len(copies)] if copies else []

        steps = self._steps(flat, stage, name, found)
        return steps[0][1] if steps else []

    def _steps(
        self,
        flat: Tensor,
        stage: int,
        name: str,
        find: Callable[[], tuple[Sequence[Copy], Sequence[int]]],
    ) -> Steps:
        """Return some copies to this memory, and the numbers after which they are counted."""
        size = flat.numel()

        def made() -> _Copies:
            copies, steps = find()
            places, to, sources = self.plan.gathered[stage], [], []
            for head, move in copies:
                to += places.of(head, move.to, move.rows)
                there = self.plan.there[stage][move.rank].of(head, move.origin, move.rows)
                shared = self._shared(move.rank, stage)
                sources += [shared[begin : begin + n] for begin, n in there]
            return _copies(to, sources, size, steps)

        key = self.plan, stage, name, size, flat.dtype
        return self.region.kept(key, made).to(flat)

    def _shared(self, rank: int, stage: int) -> Tensor:
        """Return the memory of a rank that others read, from a stage on."""
        begin, dtype = self.plan.begins[stage][rank], self.parts[0][0].dtype

        def made() -> Tensor:
            return self.region.of(rank, dtype)[begin:]

        return self.region.kept((rank, dtype, begin), made)


def gains_by_two_streams(parts: Sequence[Part], own: int) -> bool:
    """Return True for a long call of own keys before others, or one call with many own bytes.

    Calls that all wait for keys have one stream: blocks of a later call would wait where those of
    the first could compute.
    """
    if len(parts) == 1:
        return own >= LEAST_OWN
    rows = [part.rows.stop - part.rows.start for part in parts]
    return len(parts) > 1 and parts[0].own is not None and 2 * rows[0] > sum(rows)


class PulledStage:
    """The rows of a stage, on their way: first those of the first call."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        pulls: list[Pull],
        plan: PullPlan,
        count: Tensor | None,
        second: torch.cuda.Stream | None,
    ) -> None:
        self._rows, self.pulls = rows, pulls
        way = plan.way
        self.first = way.first if way.parts and way.first is not way.parts[-1] else None
        self._ordered, self._count = plan.ordered, count
        self.second = second  # the stream of all calls but the first, or None

    def rows(self, part: Part) -> Sequence[Tensor]:
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
