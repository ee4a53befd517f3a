"""Keys and values are gathered in the order of positions; a call for each chunk of own queries.

A chunk of queries stands at its place of the whole call. So bands, distances, ids and dropout are
those of one device, and no results are merged. The backward gathers again and saves nothing. Of
documents that the host knows, all chunks are one packed call (``pieces.py``).

Stages of kv heads hide the copies (``stages.py``): while a stage computes, the keys and values of
the next one arrive. Gradients of keys go to the memory of their ranks (``pushes.py``) or, by
collectives, return while the next stage computes (``returns.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.blocks import Block, block_of
from ...call.dispatch import prepared
from ...call.inputs import Gradients, Options, Tensors, Wanted, part_of
from ..abreast import Abreast
from ..arrivals import arrives, joined_of, may_count
from ..calls import ShardedCall
from ..collectives import UnderWay
from ..exchange import Gather, words
from ..pieces import Packing, Sight
from ..pulls import PulledRows, PulledStage, PullPlan
from ..pushes import Pushed
from ..returns import Returned
from ..routes import Part, Route, route, sight_of
from ..shared import regions_of, without_regions
from .shares import reduced
from .stages import stages_of


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""
    plan, found = _planned(call, returns=False), None

    def compute(heads: Heads, arriving: Arriving) -> None:
        nonlocal found
        # without room for shared memory rows come by a collective, and each chunk is a call
        shared = isinstance(arriving, PulledStage)
        parts = (plan.one,) if plan.one is not None and shared else plan.way.parts
        found = found or _Results(call, len(parts) * len(plan.stages))
        with Abreast(arriving.second if len(parts) > 1 else None) as streams:
            for n, part in enumerate(parts):
                with streams.call():
                    tensors, options = _part(call, heads, part, arriving)
                    job, into = prepared(tensors, options), found.place(heads, part)
                    arrivals = arriving.arrivals(n)
                    if arrivals is not None and job.takes_arrivals:
                        results = job.forward(tensors, into, arrivals=arrivals, gap=part.gap)
                    else:
                        arriving.wait(part)
                        results = job.forward(tensors, into, gap=part.gap)
                    found.add(heads, part, results, into)

    with UnderWay() as under_way:
        _by_stages(call, plan, under_way, compute)
    return found.total() if found is not None else call.new_results()


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    plan = _planned(call, returns=True)
    sums = _Sums(call, plan.way, len(plan.stages), wanted)

    def compute(heads: Heads, arriving: Arriving) -> None:
        for n, part in enumerate(plan.way.parts):
            tensors, options = _part(call, heads, part, arriving)
            arriving.wait(part)
            rows, h = part.rows, heads.q
            of_rows = _dense(out[:, rows, h]), _dense(lse[:, h, rows])
            of_lse = None if dlse is None else _dense(dlse[:, h, rows])
            given = (*of_rows, dout[:, rows, h], of_lse)
            # partial sums: rounding each would add to the error
            job = prepared(tensors, options)
            into, places = sums.place(heads, part), sums.keys.places(heads.kv, n)
            made = job.backward(tensors, *given, wanted, wide=True, into=into, places=places)
            sums.add(heads, part, made, into)
            of_keys = [t for t in (made.k, made.v) if t is not None]
            sums.keys.add(heads.kv, n, of_keys, under_way)
            del made, of_keys  # the next call makes others
        sums.keys.send(heads.kv, under_way)

    with UnderWay() as under_way:
        _by_stages(call, plan, under_way, compute)
        return sums.total()


class Heads(NamedTuple):
    """The heads of a stage."""

    q: slice
    kv: slice


class _Plan(NamedTuple):
    """Hold what calls of a kind have in common on a rank."""

    way: Route
    sight: Sight
    stages: tuple[Heads, ...]
    one: Part | None  # both chunks are this call
    arriving: bool  # kernels wait for the rows of the single stage (``arrivals.py``)


def _by_stages(
    call: ShardedCall,
    plan: _Plan,
    under_way: UnderWay,
    compute: Callable[[Heads, Arriving], None],
) -> None:
    """Call ``compute(heads, arriving)`` for each stage, with the rows of the next on their way.

    A copy begins before the kernels that hide it: persistent ones leave no multiprocessor to a
    later kernel. No reference to a stage's k and v outlives its turn.
    """
    gathers = _gathers(call, plan)

    def begin(stage: int) -> Arriving:
        gather = gathers(stage)
        under_way.extend(gather.pulls)
        return gather

    following = begin(0)
    for stage, heads in enumerate(plan.stages):
        gather = following
        if stage + 1 < len(plan.stages):
            following = begin(stage + 1)
        compute(heads, gather)
        waited = plan.way.first is not None and not plan.arriving
        for copy in () if waited else gather.pulls:  # none outlives its memory
            copy.wait()


def _gathers(call: ShardedCall, plan: _Plan) -> Callable[[int], Arriving]:
    """Return what begins the copies of a stage."""
    own, group = (call.tensors.k, call.tensors.v), call.group
    regions = regions_of(group, call.tensors.q.device)
    if regions is not None:
        counts = plan.arriving and may_count(own[0].device)

        def made() -> PullPlan:
            place, slices = (call.queries, call.keys, plan.sight), [one.kv for one in plan.stages]
            flags = plan.arriving, counts, plan.one is not None
            return PullPlan(own, slices, place, group.rank, *flags)

        with _or_collectives(call):
            return PulledRows(own, call.planned(("pulls", counts), made), regions).begin

    def begin(stage: int) -> Arriving:
        some = [t[:, :, plan.stages[stage].kv] for t in own]
        return _Gathered(Gather(some, plan.way, call.keys, group))

    return begin


class _Gathered:
    """The rows of a stage, on their way by a collective."""

    second = None  # one stream has all calls

    def __init__(self, gather: Gather) -> None:
        self.gather, self.pulls = gather, [gather.copy]
        self.found: list[Tensor] | None = None

    def rows(self, part: Part) -> list[Tensor]:
        """Return the rows ``[B, length, H, D]``, or the keys of all pieces, ``[1, T, H, D]``."""
        if self.found is None:
            self.found = self.gather.wait()
            if part.packing is not None:
                self.found = [part.packing.packed(t) for t in self.found]
        return self.found

    def wait(self, part: Part) -> None:
        """Do nothing: ``rows`` has waited."""

    def arrivals(self, part: int) -> None:
        """Return None: no kernel waits for a collective."""


#: gathered keys and values of a stage, on their way
Arriving = PulledStage | _Gathered


def _key_gradients(call: ShardedCall, way: Route, wanted: Wanted) -> Pushed | Returned:
    """Return what adds up the gradients of keys over calls and ranks."""
    regions = regions_of(call.group, call.tensors.q.device)
    if regions is not None:
        with _or_collectives(call):
            return Pushed(call, wanted, regions.gradients)
    return Returned(call, wanted, way)


@contextlib.contextmanager
def _or_collectives(call: ShardedCall) -> Iterator[None]:
    """Let the call go on with collectives where no rank can share so much memory."""
    try:
        yield
    except MemoryError:
        without_regions(call.group, call.tensors.q.device)


def _planned(call: ShardedCall, returns: bool) -> _Plan:
    """Return the plan of this rank; ranks agree first on the way of copies."""
    shares = regions_of(call.group, call.tensors.q.device) is not None

    def made() -> _Plan:
        sight = sight_of(call)
        way = route(call.queries, call.keys, sight, call.group.rank)
        group = call.tensors.q.shape[2] // call.tensors.k.shape[2]
        stages = tuple(
            Heads(slice(group * one.start, group * one.stop), slice(one.start, one.stop))
            for one in stages_of(call, returns=returns)
        )
        arriving = not returns and len(stages) == 1 and arrives(call)
        return _Plan(way, sight, stages, joined_of(call) if arriving else None, arriving)

    return call.planned(("keys", shares), made)


def _part(
    call: ShardedCall, heads: Heads, part: Part, arriving: Arriving
) -> tuple[Tensors, Options]:
    """Return the call of a part: the inputs of the whole that its queries and keys read."""
    if part.packing is not None:
        return _packed_part(call, heads, part.packing, arriving.rows(part))
    own = call.tensors
    if part.own is not None:
        k, v = (t[:, part.own, heads.kv] for t in (own.k, own.v))
    else:
        k, v = (within(t, part.gathered) for t in arriving.rows(part))
    block = call.options, Block(h=heads.q, i=part.i, j=part.j)
    if all(getattr(own, name) is None for name in _CUT):  # 20 us, and 75 by a block
        ends = tuple((x.start, x.stop) for x in (heads.q, part.i, part.j))
        tensors = own
        options = call.planned(("options", ends), lambda: block_of(call.whole(), *block)[1])
    else:
        tensors, options = block_of(call.whole(), *block)
    mine = {"i": part.rows, "j": part.j, "h": heads.q}
    given = ((name, getattr(own, name)) for name in _PAIRS)
    # a block without the first key leaves the sink to another
    cut = {name: part_of(name, t, **mine) for name, t in given if t is not None}
    q = within(within(own.q, part.rows), heads.q, 2)
    return tensors._replace(q=q, k=k, v=v, **cut), options


def within(t: Tensor, some: slice, axis: int = 1) -> Tensor:
    """Return some of a tensor along an axis: itself, without the time of a view, if it is all."""
    if some.start == 0 and some.stop == t.shape[axis]:
        return t
    return t.narrow(axis, some.start, some.stop - some.start)


def _packed_part(
    call: ShardedCall, heads: Heads, packing: Packing, packed: Sequence[Tensor]
) -> tuple[Tensors, Options]:
    """Return the packed call of a rank's pieces."""
    (k, v), own, tables = packed, call.tensors, packing.on(packed[0].device)
    terms = {name: part_of(name, getattr(own, name), h=heads.q) for name in ("q", "sink", "heads")}
    offsets = {"cu_seqlens_q": tables.cu_q, "cu_seqlens_k": tables.cu_k}
    most_q, most_k = packing.longest
    return (
        own._replace(**terms, k=k, v=v, **offsets),
        call.options._replace(max_q=most_q, max_k=most_k),
    )


#: inputs of the whole that a block cuts
_CUT = ("heads", "q_ids", "k_ids", "lengths", "prefix")
#: inputs of own queries, and the sink
_PAIRS = ("bias", "allowed", "sink")


class _Results:
    """The results of a rank. Each call writes its heads and rows; those of a single one are kept.

    Of several calls this is one copy of the results, unless kernels write them in place.
    """

    def __init__(self, call: ShardedCall, calls: int) -> None:
        self.found = None if calls == 1 else call.new_results()

    def place(self, heads: Heads, part: Part) -> Tensor | None:
        """Return the memory of a call's output."""
        return None if self.found is None else _place(self.found[0], heads, part)

    def add(
        self, heads: Heads, part: Part, found: tuple[Tensor, Tensor], place: Tensor | None
    ) -> None:
        """Add the results of a call."""
        if self.found is None:
            self.found = found
            return
        _store(found[0], place)
        self.found[1][:, heads.q, part.rows] = found[1]

    def total(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        assert self.found is not None
        return self.found


class _Sums:
    """The gradients of a rank, added up over all calls; ``keys`` has those of keys."""

    def __init__(self, call: ShardedCall, way: Route, stages: int, wanted: Wanted) -> None:
        self.call, self.wanted, self.wide = call, wanted, call.accumulator
        own = call.tensors
        self.alone = len(way.parts) * stages == 1
        several = wanted.q and not self.alone
        self.q = torch.empty_like(own.q, memory_format=_DENSE) if several else None
        self.keys = _key_gradients(call, way, wanted)
        self.sink, self.heads = (
            torch.zeros_like(t) if want and t is not None else None
            for t, want in ((own.sink, wanted.sink), (own.heads, wanted.heads))
        )
        self.bias: Tensor | None = None
        self.adds_bias = False  # else each call has its own rows and heads of the gradient
        bias = own.bias
        if wanted.bias and bias is not None:
            # a row that parts share is a sum, and a head that stages or other ranks share
            self.adds_bias = bias.shape[2] == 1 or (
                bias.shape[1] == 1 and (stages > 1 or call.wide)
            )
            if self.adds_bias:
                self.bias = torch.zeros_like(bias, dtype=self.wide, memory_format=_DENSE)
            elif not self.alone:
                self.bias = torch.empty_like(bias, memory_format=_DENSE)

    def place(self, heads: Heads, part: Part) -> Tensor | None:
        """Return the memory of a call's gradient of q."""
        return None if self.q is None else _place(self.q, heads, part)

    def add(self, heads: Heads, part: Part, found: Gradients, place: Tensor | None) -> None:
        """Add the gradients of a call, but those of keys."""
        if self.alone:
            self.q = found.q
        elif found.q is not None:
            _store(found.q, place)
        for name in ("sink", "heads"):
            total = part_of(name, getattr(self, name), h=heads.q)
            if total is not None:
                total += getattr(found, name)
        if found.bias is not None:
            self._add_bias(heads, part, found.bias)

    def _add_bias(self, heads: Heads, part: Part, found: Tensor) -> None:
        """Add the gradient of a call's bias: of keys that it does not see, it is 0."""
        given = self.call.tensors.bias
        assert given is not None
        if self.alone and not self.adds_bias and found.shape == given.shape:
            self.bias = found
            return
        if self.bias is None:
            self.bias = torch.empty_like(given, memory_format=_DENSE)
        rows = part_of("bias", self.bias, h=heads.q, i=part.rows)
        of_keys = part_of("bias", rows, j=part.j)
        assert rows is not None
        assert of_keys is not None
        if self.adds_bias:
            of_keys += found
            return
        of_keys.copy_(found)
        if rows.shape[3] > 1:
            rows[..., : part.j.start].zero_()
            rows[..., part.j.stop :].zero_()

    def total(self) -> Gradients:
        """Return the gradients, those of keys and values from all ranks."""
        found = iter(self.keys.total())
        k, v = (next(found) if want else None for want in (self.wanted.k, self.wanted.v))
        bias, sink, heads = reduced(self.call, self.bias, self.sink, self.heads)
        return Gradients(self.q, k, v, bias, sink, heads)


def _place(t: Tensor, heads: Heads, part: Part) -> Tensor:
    """Return the rows and heads of a call, as memory for its results.

    A kernel writes into memory with the strides of a new tensor. With one sequence, its stride is
    no matter: here it becomes that of a new tensor.
    """
    found = t[:, part.rows, heads.q]
    return found[0][None] if t.shape[0] == 1 else found


def _store(x: Tensor, place: Tensor | None) -> None:
    """Copy a result to its place, unless a kernel has written it there."""
    if place is not None and x.data_ptr() != place.data_ptr():
        place.copy_(x)


def _dense(t: Tensor) -> Tensor:
    """Return a tensor without gaps, of rows of some heads."""
    if t.is_contiguous():
        return t
    found = torch.empty_like(t, memory_format=_DENSE)
    to, rows = words(found, t)
    to.copy_(rows)
    return found


_DENSE = torch.contiguous_format
