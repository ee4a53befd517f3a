"""Keys and values are gathered in the order of positions; a call for each chunk of own queries.

A chunk of queries stands at its place of the whole call. So bands, distances, ids and dropout are
those of one device, and no results are merged. The backward gathers again and saves nothing. Of
documents that the host knows, all chunks are one packed call (``pieces.py``).

Stages of kv heads hide the copies (``stages.py``): while a stage computes, the keys and values of
the next one arrive, and in the backward the gradients of the one before return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...call.blocks import Block, block_of
from ...call.dispatch import prepared
from ...call.inputs import Gradients, Options, Tensors, Wanted, part_of
from ..calls import ShardedCall
from ..collectives import UnderWay, Waits
from ..exchange import Gather, Return
from ..pieces import Packing
from ..pulls import PulledPieces, PulledReturn, PulledRows
from ..routes import Part, Route, route, sight_of
from ..shared import regions_of, without_regions
from .shares import reduced
from .stages import stages_of


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""
    way, stages = _planned(call, returns=False)
    whole, found = call.whole(), _Results(call, len(way.parts) * len(stages))

    def compute(heads: Heads, k: Tensor, v: Tensor) -> None:
        for part in way.parts:
            tensors, options = _part(call, whole, heads, part, (k, v))
            into = found.place(heads, part)
            found.add(heads, part, prepared(tensors, options).forward(tensors, into))

    with UnderWay() as under_way:
        _by_stages(call, way, stages, under_way, compute)
    return found.total()


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    way, stages = _planned(call, returns=True)
    whole, sums = call.whole(), _Sums(call, way, len(stages), wanted)
    # often the call with most keys sees all of them: sums begin with it, and not with zeros
    parts = sorted(way.parts, key=lambda part: part.gathered.start - part.gathered.stop)

    def compute(heads: Heads, k: Tensor, v: Tensor) -> None:
        sums.begin(k, v)
        for part in parts:
            tensors, options = _part(call, whole, heads, part, (k, v))
            rows, h = part.rows, heads.q
            of_rows = out[:, rows, h].contiguous(), lse[:, h, rows].contiguous()
            of_lse = None if dlse is None else dlse[:, h, rows].contiguous()
            given = (*of_rows, dout[:, rows, h], of_lse)
            # partial sums: rounding each would add to the error
            job = prepared(tensors, options)
            into = sums.place(heads, part)
            made = job.backward(tensors, *given, wanted, wide=True, into=into)
            sums.add(heads, part, made if part.packing is None else _summed(part.packing, made))
        sums.send(heads, under_way)

    with UnderWay() as under_way:
        _by_stages(call, way, stages, under_way, compute)
        return sums.total()


class Arriving(Protocol):
    """Keys and values of a stage, on their way."""

    @property
    def copy(self) -> Waits:
        """The copies."""
        ...

    def wait(self) -> list[Tensor]:
        """Return them, in the order in which calls read them."""
        ...


class Heads(NamedTuple):
    """The heads of a stage."""

    q: slice
    kv: slice


def _by_stages(
    call: ShardedCall,
    way: Route,
    stages: Sequence[range],
    under_way: UnderWay,
    compute: Callable[[Heads, Tensor, Tensor], None],
) -> None:
    """Call ``compute(heads, k, v)`` for each stage, with the rows of the next on their way.

    A copy begins before the kernels that hide it: persistent ones leave no multiprocessor to a
    later kernel. No reference to a stage's k and v outlives its turn.
    """
    group = call.tensors.q.shape[2] // call.tensors.k.shape[2]
    slices = [slice(one.start, one.stop) for one in stages]
    gathers = _gathers(call, way, slices)

    def begin(stage: int) -> Arriving:
        gather = gathers(stage)
        under_way.append(gather.copy)
        return gather

    arriving = begin(0)
    for stage, kv in enumerate(slices):
        gather = arriving
        if stage + 1 < len(slices):
            arriving = begin(stage + 1)
        compute(Heads(slice(group * kv.start, group * kv.stop), kv), *gather.wait())


def _gathers(call: ShardedCall, way: Route, slices: Sequence[slice]) -> Callable[[int], Arriving]:
    """Return what begins the copies of a stage."""
    own, group = [call.tensors.k, call.tensors.v], call.group
    packing = way.parts[0].packing if way.parts else None
    regions = regions_of(group, call.tensors.q.device)
    if regions is not None:
        with _or_collectives(call):
            if call.packs:
                return PulledPieces(own, slices, _ways(call), packing, group, regions.rows).begin
            return PulledRows(own, slices, _ways(call), call.keys, group, regions.rows).begin

    def begin(stage: int) -> Arriving:
        gather = Gather([t[:, :, slices[stage]] for t in own], way, call.keys, group)
        return gather if packing is None else _PackedGather(gather, packing)

    return begin


class _PackedGather:
    """The packed keys of a stage, on their way by a collective."""

    def __init__(self, gather: Gather, packing: Packing) -> None:
        self.gather, self.packing, self.copy = gather, packing, gather.copy

    def wait(self) -> list[Tensor]:
        """Return the keys of all pieces, ``[1, T, H, D]``."""
        return [self.packing.packed(t) for t in self.gather.wait()]


def _returned(call: ShardedCall, way: Route, tensors: Sequence[Tensor]) -> Return | PulledReturn:
    """Return the gradients of gathered rows, on their way to the ranks of the rows."""
    rows, regions = call.tensors.k.shape[1], regions_of(call.group, call.tensors.q.device)
    if regions is not None:
        with _or_collectives(call):
            return PulledReturn(tensors, _ways(call), rows, call.group, regions.gradients)
    return Return(tensors, way, rows, call.group)


@contextlib.contextmanager
def _or_collectives(call: ShardedCall) -> Iterator[None]:
    """Let the call go on with collectives where no rank can share so much memory."""
    try:
        yield
    except MemoryError:
        without_regions(call.group, call.tensors.q.device)


def overlaps(call: ShardedCall) -> bool:
    """Return True if rows of one stage move while another computes."""
    return len(stages_of(call, returns=True)) > 1


def _planned(call: ShardedCall, returns: bool) -> tuple[Route, tuple[range, ...]]:
    """Return the route of this rank, and the stages; ranks agree first on the way of copies."""
    regions_of(call.group, call.tensors.q.device)
    return _ways(call)[call.group.rank], stages_of(call, returns=returns)


def _ways(call: ShardedCall) -> list[Route]:
    """Return the routes of all ranks."""
    sight = sight_of(call)
    return [route(call.queries, call.keys, sight, rank) for rank in range(call.group.size)]


def _part(
    call: ShardedCall, whole: Tensors, heads: Heads, part: Part, gathered: tuple[Tensor, Tensor]
) -> tuple[Tensors, Options]:
    """Return the call of a part: the inputs of the whole that its queries and keys read."""
    if part.packing is not None:
        return _packed_part(call, heads, part.packing, gathered)
    own, (k, v) = call.tensors, gathered
    if all(getattr(own, name) is None for name in _CUT):  # 20 us, and 75 by a block
        ends = tuple((x.start, x.stop) for x in (heads.q, part.i, part.j))
        sizes = tuple(t.shape for t in (whole.q, whole.k, whole.v))
        tensors, options = own, _options_of(call.options, sizes, own.q.dtype, ends)
    else:
        tensors, options = block_of(whole, call.options, Block(h=heads.q, i=part.i, j=part.j))
    mine = {"i": part.rows, "j": part.j, "h": heads.q}
    tensors = tensors._replace(
        k=part_of("k", k, j=part.gathered),
        v=part_of("v", v, j=part.gathered),
        # a block without the first key leaves the sink to another
        **{name: part_of(name, getattr(own, name), **mine) for name in _LOCAL},
    )
    return tensors, options


@lru_cache(maxsize=512)
def _options_of(
    options: Options, sizes: tuple[torch.Size, ...], dtype: torch.dtype, ends: Sequence[Ends]
) -> Options:
    """Return the options of a block of a call of these sizes; ``ends`` are those of h, i and j."""
    q, k, v = (torch.empty((), dtype=dtype).expand(size) for size in sizes)
    h, i, j = (slice(*each) for each in ends)
    return block_of(Tensors(q, k, v), options, Block(h=h, i=i, j=j))[1]


def _packed_part(
    call: ShardedCall, heads: Heads, packing: Packing, packed: tuple[Tensor, Tensor]
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


def _summed(packing: Packing, found: Gradients) -> Gradients:
    """Return the gradients with those of gathered keys, of those of the packed ones."""
    k, v = (
        None if t is None else packing.sums(t, torch.promote_types(t.dtype, torch.float32))
        for t in (found.k, found.v)
    )
    return found._replace(k=k, v=v)


Ends = tuple[int, int]
#: inputs of the whole that a block cuts
_CUT = ("heads", "q_ids", "k_ids", "lengths", "prefix")
#: inputs whose queries are own rows, and the sink
_LOCAL = ("q", "bias", "allowed", "sink")


class _Results:
    """The results of a rank. Each call writes its heads and rows; those of a single one are kept.

    Of several calls this is one copy of the results, unless kernels write them in place.
    """

    def __init__(self, call: ShardedCall, calls: int) -> None:
        self.found = None if calls == 1 else call.new_results()

    def place(self, heads: Heads, part: Part) -> Tensor | None:
        """Return the memory of a call's output."""
        return None if self.found is None else self.found[0][:, part.rows, heads.q]

    def add(self, heads: Heads, part: Part, found: tuple[Tensor, Tensor]) -> None:
        """Add the results of a call."""
        if self.found is None:
            self.found = found
            return
        _store(found[0], self.place(heads, part))
        self.found[1][:, heads.q, part.rows] = found[1]

    def total(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        assert self.found is not None
        return self.found


class _Sums:
    """The gradients of a rank: those of keys by stages, the others added up over all calls."""

    def __init__(self, call: ShardedCall, way: Route, stages: int, wanted: Wanted) -> None:
        self.call, self.way, self.wanted, self.wide = call, way, wanted, call.accumulator
        own = call.tensors
        self.alone = len(way.parts) * stages == 1
        several = wanted.q and not self.alone
        self.q = torch.empty_like(own.q, memory_format=_DENSE) if several else None
        #: the gradients of own rows; a stage writes its heads
        self.k, self.v = (
            t.new_empty(t.shape, dtype=self.wide if call.wide else t.dtype) if want else None
            for t, want in ((own.k, wanted.k), (own.v, wanted.v))
        )
        self.gathered: list[Tensor] = []  # the inputs of a stage with gradients
        self.stage: list[Tensor] = []  # their gradients, from the first call on
        self.returning: tuple[Heads, Return | PulledReturn] | None = None
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

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Begin a stage with its gathered rows."""
        self.gathered = [t for t, want in ((k, self.wanted.k), (v, self.wanted.v)) if want]

    def place(self, heads: Heads, part: Part) -> Tensor | None:
        """Return the memory of a call's gradient of q."""
        return None if self.q is None else self.q[:, part.rows, heads.q]

    def add(self, heads: Heads, part: Part, found: Gradients) -> None:
        """Add the gradients of a call."""
        if self.alone:
            self.q = found.q
        elif found.q is not None:
            _store(found.q, self.place(heads, part))
        of_keys = [t for t in (found.k, found.v) if t is not None]
        if not self.stage and part.gathered == slice(0, self.way.length):
            self.stage = [t.to(self.wide) for t in of_keys]
        else:
            self.stage = self.stage or self._zeros()
            for total, t in zip(self.stage, of_keys, strict=True):
                total[:, part.gathered] += t
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

    def send(self, heads: Heads, under_way: UnderWay) -> None:
        """Send the gradients of a stage. Add those of the stage before, which have arrived."""
        if not self.gathered:
            return
        back = _returned(self.call, self.way, self.stage or self._zeros())
        under_way.append(back.copy)
        self.gathered, self.stage = [], []
        self._receive()
        self.returning = heads, back

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(t, dtype=self.wide) for t in self.gathered]

    def _receive(self) -> None:
        """Write the gradients of own rows that a stage returns."""
        if self.returning is None:
            return
        heads, back = self.returning
        totals = [t for t in (self.k, self.v) if t is not None]
        for total, t in zip(totals, back.wait(), strict=True):
            total[:, :, heads.kv] = t
        self.returning = None

    def total(self) -> Gradients:
        """Return the gradients, those of keys and values from all ranks."""
        self._receive()
        bias, sink, heads = reduced(self.call, self.bias, self.sink, self.heads)
        return Gradients(self.q, self.k, self.v, bias, sink, heads)


def _store(x: Tensor, place: Tensor | None) -> None:
    """Copy a result to its place, unless a kernel has written it there."""
    if place is not None and x.data_ptr() != place.data_ptr():
        place.copy_(x)


_DENSE = torch.contiguous_format
