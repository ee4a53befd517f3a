"""Explain a distributed call without making it: strategy, copies, balance and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..call.blocks import Block, block_of
from ..call.dispatch import takes_places
from ..call.inputs import Options, Tensors
from ..call.problem import problem_of
from ..errors import bad, wrong_type
from ..explain import scaled
from ..masks import as_int
from .area import by_ranges
from .attention import check_layouts, normalized_rows
from .calls import ShardedCall, whole_rows
from .groups import Group, grid, group_of
from .layout import Layout, imbalance
from .moves import in_place, moves_of, shared_rows
from .routes import length_of, route, sight_of
from .shared import MOST_IN_TURN, shares_memory
from .slots import slots_of
from .strategies import STRATEGIES, unable
from .strategies.grid import ACROSS, across, exchange_within, rows_across
from .strategies.heads import Exchange, shared_heads, split_heads
from .strategies.stages import stages_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..attention import CallOptions


class Wire(NamedTuple):
    """The bytes that a rank sends to others and receives from them."""

    sent: int
    received: int

    def __add__(self, other: Any) -> Wire:
        return Wire(self.sent + other.sent, self.received + other.received)


class Roofline(NamedTuple):
    """The speeds that a prediction reads: those of one device.

    Attributes:
        forward: operations a second of the forward's matrix products.
        backward: those of the backward.
        wire: bytes a second in each direction.
        source: where the numbers are from.
    """

    forward: float
    backward: float
    wire: float
    source: str = "given"


#: by a part of the device's name
ROOFLINES = {
    "H200": Roofline(
        711e12,
        656e12,
        450e9,
        "16 bits, D 128, N 16384, causal in benchmarks/results; NVLink's nominal 450 GB/s",
    ),
}


class Prediction(NamedTuple):
    """Seconds of one direction of a call, and the share of the copies that can be hidden.

    Attributes:
        compute: of the most loaded rank.
        wire: of the rank that copies most.
        hidden: the share of wire that fits under compute, from 0 to 1: a limit, not a measurement.
    """

    compute: float
    wire: float
    hidden: float


class Direction(NamedTuple):
    """The forward or the backward of a call.

    Attributes:
        wire: the bytes of each rank.
        memory: bytes of this rank for rows of others, and for sums of gradients. By "keys" it is
            the peak besides results; the others copy these rows two to four times.
        flops: operations of the matrix products of the most loaded rank; None if unknown.
        time: predicted from a roofline; None if that or flops is unknown.
    """

    wire: tuple[Wire, ...]
    memory: int
    flops: int | None
    time: Prediction | None


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``; ``str`` of it is a text to read.

    Attributes:
        call: the shapes and layouts, as text.
        rank: the rank whose rows are given.
        strategy: the name of the chosen one.
        others: each other strategy, with the reason why it is not chosen.
        loads: the allowed pairs of each rank, over its heads. None where they are unknown: the
            other rows of a boolean mask with own rows, and masks of meta tensors.
        imbalance: the most loaded rank over the mean; None likewise.
        forward: bytes, memory and time of the forward.
        backward: those of the backward, if q, k, v and bias need gradients.
        roofline: the speeds of the predictions, None if unknown.
        overlaps: True if rows are copied while others compute.
    """

    call: str
    rank: int
    strategy: str
    others: Mapping[str, str]
    loads: tuple[int, ...] | None
    imbalance: float | None
    forward: Direction
    backward: Direction
    roofline: Roofline | None
    overlaps: bool

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {text}".rstrip() for name, text in _lines(self))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup | tuple[int, int] | None = None,
    layout: Layout,
    k_layout: Layout | None = None,
    strategy: str = "auto",
    rank: int | None = None,
    device: str | Roofline | None = None,
    **options: Unpack[CallOptions],
) -> Explanation:
    """Return the strategy of a distributed call, its copies, its balance and its memory.

    Takes the arguments of ``distributed.attention``, makes no collective and computes no
    attention. Reads masks, which waits for a GPU. Without process groups it plans: q, k and v may
    be meta tensors or expanded zeros of the shapes of a rank.

    Args:
        q: own rows, as k and v.
        mesh: as ``attention`` takes it. None without a default group is a plan for
            ``layout.ranks`` ranks, and sizes such as (2, 8) for a mesh of two dimensions.
        rank: the rank whose rows are given; None is this process's, or 0 of a plan.
        device: a ``Roofline``, a name such as "H200", or None for the name of q's device.
        options: those of ``rowmax.attention``.

    Returns:
        An ``Explanation``, to print or to read by its attributes.

    Raises:
        TypeError, ValueError: as the call itself would.

    >>> import torch
    >>> from rowmax import distributed as rd
    >>> layout = rd.Layout.zigzag(65536, 4)
    >>> q, k = (torch.empty(1, 16384, h, 128, dtype=torch.bfloat16, device="meta") for h in (32, 8))
    >>> found = rd.explain(q, k, k, layout=layout, causal=True, device="H200")
    >>> found.strategy, found.imbalance
    ('keys', 1.0)
    >>> found.forward.wire[0]
    Wire(sent=100663296, received=201326592)
    """
    group = _group(mesh, layout)
    queries, keys = check_layouts(layout, k_layout, group)
    if rank is not None:
        whole = as_int(rank)
        if whole is None or not 0 <= whole < group.size:
            raise bad("rank", repr(rank), f"0 to {group.size - 1}, or None")
        group = group.at(whole)
    if options.get("seed") is None:
        options["seed"] = 0  # does not advance torch's generator
    place, tensors, rest = normalized_rows(
        (q, k, v), group, (layout, k_layout), (strategy, False, False), dict(options)
    )
    rows = [_rows(t, tensors.q) for t in (tensors.bias, tensors.allowed)]
    call = ShardedCall(place, tensors, rest, queries, keys, group, rows[0], rows[1])
    call = call if group.parts or call.packs else call.with_ids()
    roofline = _roofline(device, tensors.q)
    loads = _loads(call)
    chosen, last = place.strategy, _calls_of_grid(call, group.rank)[-1]
    names = ACROSS if group.parts else (chosen,) if group.axes == "heads" else STRATEGIES
    return Explanation(
        call=_text(call),
        rank=group.rank,
        strategy=f"heads x {chosen}" if group.parts else chosen,
        others={name: _reason(name, call, strategy) for name in names if name != chosen},
        loads=loads,
        imbalance=None if loads is None else imbalance(loads),
        forward=_direction(call, loads, roofline, False),
        backward=_direction(call, loads, roofline, True),
        roofline=roofline,
        overlaps=chosen == "keys" and len(stages_of(last, returns=True)) > 1,
    )


def _group(mesh: Any, layout: Any) -> Group:
    """Return the group of a mesh, or one of a plan without processes."""
    if isinstance(mesh, tuple):
        sizes = [as_int(n) for n in mesh]
        if len(sizes) != 2 or any(n is None or n < 1 for n in sizes):
            raise bad("mesh", repr(mesh), "the sizes of a mesh of two dimensions, such as (2, 8)")
        return grid(*(Group("", 0, n) for n in sizes if n is not None))
    if mesh is None and not dist.is_initialized():
        return Group("", 0, getattr(layout, "ranks", 1))
    return group_of(mesh)


def _rows(t: Tensor | None, q: Tensor) -> str:
    if t is None:
        return "none"
    return "own" if t.shape[2] == q.shape[1] != 1 else "one"


def _roofline(device: Any, q: Tensor) -> Roofline | None:
    """Return the speeds of a device, or None for other devices and dtypes."""
    if isinstance(device, Roofline):
        return device
    if device is not None and not isinstance(device, str):
        raise wrong_type("device", type(device).__name__, "a name, a Roofline or None")
    name = device or (torch.cuda.get_device_name(q.device) if q.is_cuda else "")
    if q.dtype.itemsize != 2:
        return None
    return next((found for part, found in ROOFLINES.items() if part in name), None)


# --- the work ----------------------------------------------------------------------------------


def _loads(call: ShardedCall) -> tuple[int, ...] | None:
    """Return the pairs of each rank over its heads, or None if they are unknown."""
    call = call.with_ids(torch.device("cpu"))
    t = call.tensors
    values = (t.q_ids, t.k_ids, t.lengths, t.prefix)
    if call.mask_rows == "own" or any(one is not None and one.is_meta for one in values):
        return None
    tensors = Tensors(*map(_on_cpu, call.whole()))
    each = by_ranges(tensors, call.options)
    name, queries, keys, heads = call.place.strategy, call.queries, call.keys, 1
    if name == "heads":
        queries, heads = rows_across(queries, queries.ranks), call.group.size
    elif call.group.parts:
        heads = call.group.parts[1].size
        queries, keys = (rows_across(one, heads) for one in (queries, keys))
    if name == "queries":
        loads = [
            sum(_pairs(tensors, call.options, j) for j in keys.chunks(rank))
            for rank in range(keys.ranks)
        ]
    else:
        loads = [sum(int(each[a:b].sum()) for a, b in owned) for owned in queries.owned]
    split = split_heads(call.tensors.q.shape[2], call.tensors.k.shape[2], heads)
    return tuple(pairs * len(mine) for pairs in loads for mine in split.q)


def _pairs(tensors: Tensors, options: Options, j: range) -> int:
    """Return the pairs of all queries with a chunk of keys."""
    return int(by_ranges(*block_of(tensors, options, Block(j=slice(j.start, j.stop)))).sum())


def _on_cpu(t: Any) -> Any:
    """Return a tensor on the CPU; of numbers that no mask reads, zeros of its shape."""
    if t is None:
        return None
    if t.dtype.is_floating_point or t.is_meta:
        return torch.zeros((), dtype=t.dtype).expand(t.shape)
    return t.cpu()


def _direction(
    call: ShardedCall, loads: tuple[int, ...] | None, roofline: Roofline | None, back: bool
) -> Direction:
    name, size = call.place.strategy, call.group.size
    wires = tuple(_wire(call, name, rank, back) for rank in range(size))
    d, dv = call.tensors.q.shape[3], call.tensors.v.shape[3]
    flops = None if loads is None else max(loads) * 2 * (3 * d + 2 * dv if back else d + dv)
    time = None
    if flops is not None and roofline is not None:
        compute = flops / (roofline.backward if back else roofline.forward)
        wire = max(max(one) for one in wires) / roofline.wire
        time = Prediction(compute, wire, min(1.0, compute / wire) if wire else 1.0)
    return Direction(wires, _memory(call, back), flops, time)


# --- gathered keys -----------------------------------------------------------------------------


def _keys_wire(call: ShardedCall, rank: int, back: bool) -> Wire:
    """Return the bytes of the keys and values that move, and of their gradients."""
    size, wide = _key_bytes(call)
    way = route(call.queries, call.keys, sight_of(call), rank)
    sent, received = way.rows_of_others(rank)
    shares = shares_memory(call.group, call.tensors.k.device)
    rows = Wire(sent, received)
    if way.whole and not shares:  # padded to the longest rank
        rows = Wire(*[(call.group.size - 1) * max(call.keys.lengths)] * 2)
    found = Wire(rows.sent * size, rows.received * size)
    if not back:
        return found
    # gradients go the other way: from a rank, or from each of its calls
    out, into = received, sent
    if shares:
        out, into = slots_of(call.queries, call.keys, sight_of(call)).rows_of_others(rank)
    return found + Wire(out * wide, into * wide)


def _keys_memory(call: ShardedCall, back: bool) -> int:
    """Return the bytes of copies, gathered rows and gradients at the peak, besides results.

    With shared memory: of the rows of all stages, of what this rank shows to others elsewhere, and
    of as much shared memory again where calls take turns.
    """
    size, wide = _key_bytes(call)
    sight, rank = sight_of(call), call.group.rank
    way = route(call.queries, call.keys, sight, rank)
    sizes = [len(one) for one in stages_of(call, back)]
    most, total = max(sizes), sum(sizes)
    device = call.tensors.k.device
    if shares_memory(call.group, device):
        place = call.queries, call.keys, sight
        memory = 0 if in_place(*place, size) else moves_of(*place, rank).arriving * size
        shared = max(shared_rows(*place, size)) * size
        memory += shared * (2 if shared < MOST_IN_TURN else 1)
        if not back:
            return memory
        slots = slots_of(*place)
        memory += max(slots.rows) * wide
        if not takes_places(problem_of(call.whole(), call.options), call.options.backend):
            # gradients of a call, that a GPU copies while it computes the next one. A CPU then
            # adds own rows of k in two tensors, and those of v
            keys = [0, *slots.parts[rank]]
            on_gpu = device.type == "cuda"
            made = (sum if on_gpu else max)(keys) * wide * most // total
            memory += made if on_gpu else max(made, call.keys.lengths[rank] * wide)
        return memory
    sent = sum(map(length_of, way.sent))  # own rows too
    # keys of each piece, and their gradients
    packed = sum(part.packing.copied for part in way.parts if part.packing is not None)
    # rows arrive, and are then put in order; meanwhile those of the next stage arrive
    arriving = call.group.size * max(call.keys.lengths) if way.whole else way.length
    here = (way.length + (0 if back else arriving)) * size + packed * (size + back * wide)
    moving, returned = (sent + arriving) * size, 0
    if back:  # sums, and copies of them to send and to receive
        here += (2 * way.length + sent) * wide
        returned = (way.length + sent) * wide
    each = zip([0, *sizes], sizes, [*sizes[1:], 0], strict=False)
    return max(a * returned + b * here + c * moving for a, b, c in each) // total


def _key_bytes(call: ShardedCall) -> tuple[int, int]:
    """Return the bytes of a row of k and v, and of its gradients in the dtype of sums."""
    b, _, hk, d = call.tensors.k.shape
    row = b * hk * (d + call.tensors.v.shape[3])
    return row * call.tensors.k.dtype.itemsize, row * call.accumulator.itemsize


# --- distributed heads -------------------------------------------------------------------------


class _Exchanged(NamedTuple):
    """A tensor of which ranks exchange rows for heads."""

    heads: tuple[range, ...]
    layout: Layout
    unit: int  # bytes of one row of one head
    to_heads: bool

    def wire(self, rank: int) -> Wire:
        n, mine = self.layout.lengths[rank], len(self.heads[rank])
        rows = n * (sum(map(len, self.heads)) - mine) * self.unit
        heads = (self.layout.n - n) * mine * self.unit
        return Wire(rows, heads) if self.to_heads else Wire(heads, rows)

    def memory(self, rank: int) -> int:
        return self.layout.n * len(self.heads[rank]) * self.unit


def _exchanges(call: ShardedCall, back: bool) -> Iterator[_Exchanged]:
    """Yield what the forward or the backward exchanges."""
    t, wide = call.tensors, call.accumulator.itemsize
    b, _, hq, d = t.q.shape
    hk, dv = t.k.shape[2], t.v.shape[3]
    heads = split_heads(hq, hk, call.group.size)
    size, q, k = t.q.dtype.itemsize, call.queries, call.keys
    yield _Exchanged(heads.q, q, b * d * size, True)
    yield _Exchanged(heads.kv, k, b * (d + dv) * size, True)
    for one, rows in call.pairs.values():
        if rows == "own":
            unit = one.shape[0] * one.shape[3]
            split = shared_heads(one, heads.q)
            yield _Exchanged(split, q, unit * one.dtype.itemsize, True)
            if back and one is t.bias:
                yield _Exchanged(split, q, unit * wide, False)
    rows = b * (dv * size + wide)  # out and lse, or their cotangents
    yield _Exchanged(heads.q, q, rows, back)
    if back:
        yield _Exchanged(heads.q, q, rows, True)
        yield _Exchanged(heads.q, q, b * d * size, False)
        yield _Exchanged(heads.kv, k, b * (d + dv) * wide, False)


def _heads_wire(call: ShardedCall, rank: int, back: bool) -> Wire:
    return sum((one.wire(rank) for one in _exchanges(call, back)), Wire(0, 0))


def _heads_memory(call: ShardedCall, back: bool) -> int:
    return sum(one.memory(call.group.rank) for one in _exchanges(call, back))


# --- gathered queries --------------------------------------------------------------------------


def _query_bytes(call: ShardedCall, back: bool) -> tuple[int, int]:
    """Return the bytes of a row that is gathered, and of the results that return for it."""
    t, wide = call.tensors, call.accumulator.itemsize
    b, _, hq, d = t.q.shape
    size, dv = t.q.dtype.itemsize, t.v.shape[3]
    gathered, returned = b * hq * d * size, b * hq * (d if back else dv + 1) * wide
    if back:  # out and its cotangent, lse and its
        gathered += b * hq * 2 * (dv * size + wide)
    for one, rows in call.pairs.values():
        if rows != "one":
            row = one.shape[0] * one.shape[1] * one.shape[3]
            gathered += row * one.dtype.itemsize
            returned += row * wide * (back and one is t.bias)
    return gathered, returned


def _queries_wire(call: ShardedCall, rank: int, back: bool) -> Wire:
    gathered, returned = _query_bytes(call, back)
    others, n = call.group.size - 1, call.queries.lengths[rank]
    all_of_them = others * max(call.queries.lengths) * gathered  # padded to the longest rank
    results = Wire((call.queries.n - n) * returned, others * n * returned)
    return Wire(all_of_them, all_of_them) + results


def _queries_memory(call: ShardedCall, back: bool) -> int:
    return call.queries.n * sum(_query_bytes(call, back))


WIRES: dict[str, Callable[[ShardedCall, int, bool], Wire]] = {
    "keys": _keys_wire,
    "heads": _heads_wire,
    "queries": _queries_wire,
}
MEMORY: dict[str, Callable[[ShardedCall, bool], int]] = {
    "keys": _keys_memory,
    "heads": _heads_memory,
    "queries": _queries_memory,
}


# --- a mesh of two dimensions ------------------------------------------------------------------


def _wire(call: ShardedCall, name: str, rank: int, back: bool) -> Wire:
    """Return the bytes of a rank by a strategy: of a grid, those of both dimensions."""
    if not call.group.parts:
        return WIRES[name](call, rank, back)
    place = call.place._replace(strategy=name)
    within, inner = _calls_of_grid(call._replace(place=place), rank)
    found = _heads_wire(within, within.group.rank, back)
    return found + WIRES[name](inner, inner.group.rank, back) if inner.tensors.q.shape[2] else found


def _memory(call: ShardedCall, back: bool) -> int:
    """Return the bytes of this rank for rows of others, and for sums of gradients."""
    *within, last = _calls_of_grid(call, call.group.rank)
    found = sum(_heads_memory(one, back) for one in within)
    return found + MEMORY[call.place.strategy](last, back) if last.tensors.q.shape[2] else found


def _calls_of_grid(call: ShardedCall, rank: int) -> tuple[ShardedCall, ...]:
    """Return the calls of a rank by which a grid is counted: of its exchange, and of own heads.

    That of another group is itself.
    """
    if not call.group.parts:
        return (call,)
    group, t = call.group.at(rank), call.tensors
    call = call._replace(group=group)
    ranks, mine = exchange_within(call), group.parts[1].rank
    q, k, v = whole_rows(t.q, t.k, t.v, ranks.queries.n, ranks.keys.n)
    hq, hk = len(ranks.q[mine]), len(ranks.kv[mine])
    terms = {name: _rows_of_heads(one, ranks, rows) for name, (one, rows) in call.pairs.items()}
    own = t._replace(q=q[:, :, :hq], k=k[:, :, :hk], v=v[:, :, :hk], **terms)
    within = call._replace(group=ranks.group, queries=ranks.queries, keys=ranks.keys)
    return within, across(call, own, call.options)


def _rows_of_heads(t: Tensor, ranks: Exchange, rows: str) -> Tensor:
    """Return a bias or boolean mask of own heads by its shape alone."""
    b, _, n, j = t.shape
    mine = len(shared_heads(t, ranks.q)[ranks.group.rank])
    return t.new_empty(()).expand(b, mine, n if rows == "one" else ranks.queries.n, j)


# --- the text ----------------------------------------------------------------------------------


def _reason(name: str, call: ShardedCall, given: str) -> str:
    """Return why a strategy is not chosen, with the bytes that it would copy."""
    reason = unable(name, call)
    if reason is not None:
        return f"not able: {reason}"
    moved = [max(max(_wire(call, name, r, back)) for r in _ranks(call)) for back in (False, True)]
    texts = " and ".join(scaled(n, 1024, "B") for n in moved)
    first = f"strategy={given!r} is asked for" if given != "auto" else "'auto' prefers another"
    hq, hk, ranks = call.tensors.q.shape[2], call.tensors.k.shape[2], call.group.size
    notes = ""
    if name == "heads" and hq < ranks:
        notes = f"; {ranks - hq} of {ranks} ranks would have no head"
    elif name == "heads" and hk < ranks:
        notes = f"; {ranks} ranks would hold copies of {hk} kv heads"
    return f"able, but {first}; it would copy {texts} (forward and backward){notes}"


def _ranks(call: ShardedCall) -> range:
    return range(call.group.size)


def _text(call: ShardedCall) -> str:
    t = call.tensors
    rows = f"{call.queries.n} queries and {call.keys.n} keys on {call.group.size} ranks"
    shapes = ", ".join(f"{name} {list(getattr(t, name).shape)}" for name in "qkv")
    return f"{str(t.q.dtype).removeprefix('torch.')}, {rows}; rank {call.group.rank}: {shapes}"


def _lines(e: Explanation) -> Iterator[tuple[str, str]]:
    yield "call", e.call
    yield "strategy", e.strategy
    for name, reason in e.others.items():
        yield "", f"  not {name}: {reason}"
    unknown = "unknown: the rows of a boolean mask on other ranks, or a mask without values"
    yield "balance", unknown if e.imbalance is None else f"most loaded rank {e.imbalance:.3f}"
    for name, one in (("forward", e.forward), ("backward", e.backward)):
        own = one.wire[e.rank]
        most = max(max(w) for w in one.wire)
        yield (
            name,
            f"sends {scaled(own.sent, 1024, 'B')}, receives {scaled(own.received, 1024, 'B')} "
            f"(at most {scaled(most, 1024, 'B')} on a rank); "
            f"memory {scaled(one.memory, 1024, 'B')}",
        )
        yield "", f"  {_time(one)}"
    if e.roofline is not None:
        r = e.roofline
        yield (
            "roofline",
            f"{r.forward / 1e12:g} and {r.backward / 1e12:g} TFLOP/s, {r.wire / 1e9:g} GB/s each "
            f"way ({r.source})",
        )
        turns = "copies and products overlap" if e.overlaps else "copies and products take turns"
        yield "", f"  {turns} in {e.strategy!r}"


def _time(one: Direction) -> str:
    if one.time is None:
        return "share of copies that products can hide: unknown"
    compute, wire, hidden = one.time
    return (
        f"products {compute * 1e3:.3g} ms, copies {wire * 1e3:.3g} ms: "
        f"at most {hidden:.0%} of the copies can be hidden"
    )
