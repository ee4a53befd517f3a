"""Predict how well attention scales over devices of one host and of several.

    python -m benchmarks.distributed_model --devices 2 4 8
    python -m benchmarks.distributed_model --devices 16 32 --strategies keys grid --cells causal-1m
    python -m benchmarks.distributed_model --csv measured.csv     (rows of benchmarks.distributed)

The time of a pass on the slowest rank is a sum, or the time of its host if that is longer:

    its share of the operations / speed of one device x imbalance
    + exposed copies between devices, and slower computing under hidden ones
    + copies in own memory + launches

Efficiency is the time of one device / devices / that sum.

Strategies, as ``rowmax.distributed`` has them:

    keys    on one host: copy engines pull K, V from shared memory. Forward kernels wait for the
            first of the actual copies, the backward for those of its first stage. Kernels write
            dK, dV in float32 while they compute; rows are those of the actual routes. Between
            hosts NCCL copies, in one stage: all exposed
    heads   rows for heads and back: all exposed; the backward exchanges q, k, v, out and dout again
    grid    a mesh of two dimensions: heads within a node, keys between nodes

The speeds are inputs. Those of NCCL are of published runs on H100 (GB/s a direction); those of
copy engines, memory, launches, host and slower computing are assumptions. With ``--csv``, the
speed of one device and of NCCL are those of the file, where it has them.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rowmax.bench.cells import Cell
from rowmax.bench.run import PRODUCTS
from rowmax.call.inputs import Options, Tensors
from rowmax.distributed import Layout
from rowmax.distributed.arrivals import come_by_heads, ordered
from rowmax.distributed.calls import Place, ShardedCall
from rowmax.distributed.groups import Group
from rowmax.distributed.layout import ALIGNED
from rowmax.distributed.moves import in_place
from rowmax.distributed.routes import (
    Route,
    common,
    length_of,
    load_of,
    pairs_of,
    route,
    sight_of,
)
from rowmax.distributed.slots import slots_of
from rowmax.distributed.strategies.stages import stages_of

from .distributed_cells import layout_for, mask_of, named

HALF, WIDE = 2, 4  # bytes of an element of inputs, and of a sum
PASSES = ("forward", "backward")
CELLS = ("causal-64k", "causal-128k", "causal-256k", "mha-64k", "full-64k", "documents-64k",
         "window-256k")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The speeds of devices and wires."""

    forward: float = 690.0  # TFLOP/s of one device
    backward: float = 620.0
    #: GB/s a direction between devices of a node, by their number
    wires: Mapping[int, float] = field(default_factory=lambda: {2: 329.0, 4: 355.0, 8: 361.0})
    between: float = 50.0  # GB/s a direction from a device to other nodes
    per_node: int = 8
    #: microseconds of launches and barriers of a forward; half as much for each further call of a
    #: kernel; twice backward
    launches: float = 60.0
    slower: float = 0.05  # computing takes so much longer while the wire is busy
    pulls: float = 370.0  # GB/s a direction of copy engines within a node
    memory: float = 3600.0  # GB/s of copies in own memory, bytes read and written: 75% of an H200
    latency: float = 5.0  # microseconds of a copy from one other device, whatever its size
    host: float = 1000.0  # microseconds of the host for a forward; two and a half times backward

    def wire(self, devices: int) -> float:
        """Return GB/s within a node that has so many devices of the group."""
        known = [n for n in self.wires if n <= devices]
        return self.wires[max(known, default=min(self.wires))]


IDEAL = Machine(wires={2: math.inf}, between=math.inf, launches=0.0, slower=0.0, memory=math.inf,
                pulls=math.inf, latency=0.0, host=0.0)  # fmt: skip


class Traffic(NamedTuple):
    """The bytes that a rank receives: within its node and from others; and copies in memory."""

    inside: float = 0.0
    outside: float = 0.0
    copied: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


STRATEGIES = ("keys", "heads", "grid")


class Prediction(NamedTuple):
    """The efficiency of a pass, and its parts as shares of the ideal time."""

    efficiency: float
    imbalance: float
    wire: float  # hidden or not
    exposed: float
    copies: float
    launches: float


# --- bytes ---------------------------------------------------------------------------------------


def _split(bytes_: float, devices: int, inside: int) -> Traffic:
    """Return bytes that come in equal parts from all other devices of the group."""
    others = max(1, devices - 1)
    return Traffic(bytes_ * (inside - 1) / others, bytes_ * (devices - inside) / others)


def received_rows(cell: Cell, devices: int) -> float:
    """Return the rows of keys that the slowest rank receives: all others, or a window's halo."""
    others = cell.n - cell.n / devices
    if cell.window:
        return min(others, math.ceil(cell.window / ALIGNED) * ALIGNED)
    return others


def traffic(
    cell: Cell, name: str, what: str, devices: int, per_node: int
) -> tuple[Traffic, Traffic]:
    """Return what comes before or under the products of a pass, and what returns after them."""
    inside = min(devices, per_node)
    rows = cell.n / devices * cell.b * cell.d
    q, kv = rows * cell.hq * HALF, 2 * rows * cell.hk * HALF
    backward = what == "backward"
    if devices == 1:
        return Traffic(), Traffic()
    if name == "heads":
        came = (3 * q + kv) if backward else q + kv
        went = (q + kv * WIDE / HALF) if backward else q
        share = (devices - 1) / devices
        come = _split(came * share, devices, inside)._replace(copied=6 * came)
        back = _split(went * share, devices, inside)._replace(copied=8 * went)
        return come, back
    if name == "grid":
        return _grid(cell, backward, devices, inside)
    seen = 2 * received_rows(cell, devices) * cell.b * cell.d * cell.hk
    # packed for each receiver, then put in order; sums are cleared, added up, packed and added
    whole = seen + kv / HALF
    come = _split(seen * HALF, devices, inside)._replace(copied=4 * whole * HALF)
    if not backward:
        return come, Traffic()
    return come, _split(seen * WIDE, devices, inside)._replace(copied=(4 * WIDE + HALF) * whole)


def _grid(cell: Cell, backward: bool, devices: int, inside: int) -> tuple[Traffic, Traffic]:
    """Return the bytes of heads within a node and keys between nodes."""
    nodes = devices // inside
    some = replace(cell, n=cell.n // nodes)  # the rows of a node
    what = "backward" if backward else "forward"
    come, back = traffic(some, "heads", what, inside, inside)
    share = max(1 / inside, 1 / cell.hk)  # heads of kv on a device
    kv = 2 * (cell.n - some.n) * cell.b * cell.d * cell.hk * share
    come = come.plus(Traffic(0.0, kv * HALF, 4 * kv * HALF))
    if backward:
        back = back.plus(Traffic(0.0, kv * WIDE, 4 * kv * WIDE))
    return come, back


# --- shared memory -------------------------------------------------------------------------------


class Pulled(NamedTuple):
    """The bytes that the slowest rank of a host pulls, copies in own memory, and its calls."""

    come: float
    back: float  # written to other ranks by kernels
    copied: float
    stages: tuple[float, ...]  # the share of kv heads of each
    calls: int
    arrivals: tuple[Arrival, ...]  # one for each rank


class Arrival(NamedTuple):
    """The bytes that calls of a rank wait for, and the computing before, as shares of the mean."""

    own: float  # computing of own keys alone
    first: float  # bytes for the first of the other calls
    call: float  # its computing
    every: float  # bytes for all calls


@lru_cache(maxsize=256)
def pulled(cell: Cell, backward: bool, devices: int) -> Pulled:
    """Return the copies of the strategy "keys" on one host, by the routes and the rule of stages.

    Copies in own memory are counted as bytes read and written, of ``rowmax.distributed.pulls``.
    """
    call = planned(cell, devices)
    ways = [route(call.queries, call.keys, sight_of(call), rank) for rank in range(devices)]
    row = 2 * cell.b * cell.hk * cell.d  # elements of k and v
    come = back = copied = 0.0
    load, arrivals = load_of(call.queries, call.keys, sight_of(call)), []
    slots = slots_of(call.queries, call.keys, sight_of(call))
    for rank, way in enumerate(ways):
        own = call.keys.lengths[rank]
        _, received = way.rows_of_others(rank)
        written = max(slots.rows_of_others(rank))
        come, back = max(come, received * row * HALF), max(back, written * row * WIDE * backward)
        arrivals.append(_arrival(call, way, rank, row * HALF, load.pairs))
        packing = way.parts[0].packing if way.parts else None
        shown, held = (length_of(ranges) for ranges in (way.shown, way.received[rank]))
        if packing is None:  # to shared memory, and to their places there or elsewhere
            together = in_place(call.queries, call.keys, sight_of(call), row * HALF)
            bytes_ = 2 * (max(shown, held) if together else shown + held) * HALF
        else:
            places = (packing.places(*one) for one in way.received[rank])
            held = sum(stop - start for each in places for _, start, stop in each)
            bytes_ = 2 * (shown + held) * HALF  # those of others arrive at their places
        if backward:  # the sums of slots
            bytes_ += slots.rows[rank] * WIDE + own * HALF
        copied = max(copied, bytes_ * row)
    sizes = [len(one) for one in stages_of(call, returns=False)]
    if not backward:  # kernels wait for keys (arrivals.py)
        sizes = [cell.hk]
        arrivals = [_early(call, rank, one, cell) for rank, one in enumerate(arrivals)]
    calls = max(len(way.parts) for way in ways) * len(sizes)
    shares = tuple(n / sum(sizes) for n in sizes)
    return Pulled(come, back, copied, shares, calls, tuple(arrivals))


def _arrival(call: ShardedCall, way: Route, rank: int, row: float, mean: float) -> Arrival:
    """Return what the calls of a rank wait for; ``row`` are the bytes of a row of keys."""
    _, received = way.rows_of_others(rank)
    own = first = share = 0.0
    for part in way.parts:
        if part.packing is not None:
            return Arrival(0.0, received * row, 1.0, received * row)
        pairs = pairs_of(range(part.i.start, part.i.stop), range(call.keys.n), sight_of(call))
        if part.own is not None:
            own += pairs / mean
        elif not share:
            share, cut = pairs / mean, ((part.gathered.start, part.gathered.stop),)
            others = (ranges for n, ranges in enumerate(way.received) if n != rank)
            first = row * sum(length_of(common(ranges, cut)) for ranges in others)
    return Arrival(own, first, share, received * row)


def _early(call: ShardedCall, rank: int, one: Arrival, cell: Cell) -> Arrival:
    """Return what the calls of a rank wait for if their kernels do: the first head or copy."""
    size = cell.hk, 2 * cell.b * cell.d * HALF
    place = call.queries, call.keys, sight_of(call)
    by_heads = come_by_heads(*place, *size)
    parts = cell.hk if by_heads else max(1, len(ordered(*place, rank, *size).copies))
    return one._replace(first=one.first / parts, call=max(0.0, 1.0 - one.own))


def planned(cell: Cell, devices: int) -> ShardedCall:
    """Return the call of the first rank, without memory for its rows."""
    layout = layout_for(cell, "keys", devices)[1]
    q, k = (
        torch.empty(cell.b, layout.lengths[0], heads, cell.d, dtype=torch.bfloat16, device="meta")
        for heads in (cell.hq, cell.hk)
    )
    documents = ",".join(map(str, accumulate(cell.packed, initial=0))) if cell.packed else ""
    place = Place("", layout.text, layout.text, "keys", False, False, documents)
    right = 0 if cell.causal or cell.window else None
    options = Options(0.1, left=cell.window or None, right=right)
    given = (place, Tensors(q, k, k), options, layout, layout, Group("", 0, devices))
    return ShardedCall(*given)


def _staged(found: Pulled, computing: float, machine: Machine) -> tuple[float, float]:
    """Return the seconds of copies of the wire, and those of them that nothing hides.

    While a stage computes, rows of the next one come, and its gradients go. The first stage begins
    with calls that wait for nothing, or for few rows.
    """
    first, last = found.come / machine.pulls / 1e9, found.back / machine.pulls / 1e9
    shares = found.stages
    exposed = max(_waits(one, shares[0], computing, machine) for one in found.arrivals)
    for n, share in enumerate(shares):
        comes = first * shares[n + 1] if n + 1 < len(shares) else 0.0
        exposed += max(0.0, comes - computing * share)
    return first + last, exposed


def _waits(one: Arrival, share: float, computing: float, machine: Machine) -> float:
    """Return the seconds that the first stage of a rank waits."""
    own, call = (share * computing * x for x in (one.own, one.call))
    first, every = (share * x / machine.pulls / 1e9 for x in (one.first, one.every))
    begin = max(own, first)
    return begin - own + max(0.0, every - begin - call)


# --- time ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def imbalance(cell: Cell, name: str, devices: int, per_node: int) -> float:
    """Return the operations of the most loaded rank over the mean."""
    if name in ("heads", "grid"):
        of_heads = devices if name == "heads" else min(devices, per_node)
        return math.ceil(cell.hq / of_heads) * of_heads / cell.hq
    layout: Layout = layout_for(cell, name, devices)[1]
    return layout.imbalance(mask_of(cell))


def predict(
    cell: Cell, name: str, what: str, devices: int, machine: Machine | None = None
) -> Prediction:
    """Return the predicted efficiency of a pass of a cell on some devices.

    >>> from benchmarks.distributed_cells import named
    >>> round(predict(named("causal-128k")[0], "keys", "forward", 8).efficiency, 2)
    0.94
    """
    machine = Machine() if machine is None else machine
    speed, backward = getattr(machine, what), what == "backward"
    ideal = cell.flops(PRODUCTS[what]) / devices / speed / 1e12
    if devices == 1:
        return Prediction(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    uneven = imbalance(cell, name, devices, machine.per_node)
    if name == "keys" and devices <= machine.per_node:
        found = pulled(cell, backward, devices)
        wire, exposed = _staged(found, ideal * uneven, machine)
        copied, calls = found.copied, found.calls
        peers = 2 * (devices - 1) * len(found.stages)  # a copy of k and one of v from each
    else:
        come, back = traffic(cell, name, what, devices, machine.per_node)
        wire = exposed = sum(_seconds(part, devices, machine) for part in (come, back))
        copied, calls, peers = come.copied + back.copied, 1, devices - 1
        if name == "grid":
            inside = min(devices, machine.per_node)
            peers = inside - 1 + devices // inside - 1
    slower = machine.slower * min(wire - exposed, ideal)
    copies = copied / machine.memory / 1e9
    times = 1 + backward
    launches = 1e-6 * times * (machine.launches * (1 + calls) / 2 + machine.latency * peers)
    spent = ideal * uneven + slower + exposed + copies + launches
    spent = max(spent, 1e-6 * machine.host * (2.5 if backward else 1.0))
    parts = (wire, exposed, copies, launches)
    return Prediction(ideal / spent, uneven, *(x / ideal for x in parts))


def _seconds(part: Traffic, devices: int, machine: Machine) -> float:
    """Return the seconds that bytes take; wires inside and between nodes work side by side."""
    inside = part.inside / machine.wire(min(devices, machine.per_node))
    return max(inside, part.outside / machine.between) / 1e9


def hiding_rows(heads: int, kv: int, what: str, machine: Machine, wire: float) -> float:
    """Return the rows a device from which a causal ring hides its copies under its products.

    K and V take 2 bytes an element, their gradients 4. All are hidden if each byte that comes
    has as many operations as the device computes in its time.
    """
    bytes_ = 4 if what == "forward" else 12
    products = 2 if what == "forward" else 5
    return bytes_ * kv / heads * getattr(machine, what) * 1e12 / (products * wire * 1e9)


# --- measured rows -------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A row of ``benchmarks.distributed``, and what is predicted for it."""

    cell: str
    what: str
    provider: str
    devices: int
    efficiency: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted - self.efficiency


def read_wires(rows: Sequence[Mapping[str, str]], machine: Machine) -> Machine:
    """Return the machine with the wire of a file: the best of its all-to-all copies."""
    found = dict(machine.wires)
    best: dict[int, float] = {}
    for row in rows:
        if row["pass"] == "wire" and row["provider"] == "all_to_all":
            devices = int(row["devices"])
            best[devices] = max(best.get(devices, 0.0), float(row["gbs"]))
    return replace(machine, wires=found | {n: x for n, x in best.items() if x > 0})


def compare(rows: Sequence[Mapping[str, str]], machine: Machine) -> list[Measured]:
    """Return measured efficiencies with predicted ones, at the measured speed of one device."""
    machine, found = read_wires(rows, machine), []
    for row in rows:
        family, *words = row["provider"].split(":")
        if family != "rowmax" or not row["efficiency"] or words[:1] == ["auto"]:
            continue
        cell = cell_of(row)
        if cell is None or words[0] not in STRATEGIES:
            continue
        what, devices = row["pass"], int(row["devices"])
        speed = cell.flops(PRODUCTS[what]) / float(row["one_ms"]) / 1e9
        predicted = predict(cell, words[0], what, devices, replace(machine, **{what: speed}))
        measured = float(row["efficiency"])
        given = (row["cell"], what, row["provider"], devices, measured, predicted.efficiency)
        found.append(Measured(*given))
    return found


def cell_of(row: Mapping[str, str]) -> Cell | None:
    """Return the cell of a row; None for documents whose lengths have no name."""
    try:
        return named(row["cell"])[0]
    except (ValueError, AttributeError):
        if row["documents"]:
            return None
    sizes = {key: int(row[key]) for key in ("n", "b", "hq", "hk", "d")}
    bias = "1hqk" if row["dbias"] == "1" else ""
    flags = {"causal": row["causal"] == "1", "window": int(row["window"] or 0)}
    return Cell(**sizes, **flags, dtype=row["dtype"], bias=bias, dbias=bool(bias))


# --- the command ---------------------------------------------------------------------------------


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.distributed_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, usual = parser.add_argument, Machine()
    add("--devices", nargs="+", type=int, default=[2, 4, 8])
    add("--cells", nargs="+", default=list(CELLS))
    add("--strategies", nargs="+", default=["keys", "heads"], choices=STRATEGIES)
    add("--csv", type=Path, help="measured rows: print them with their predictions")
    for name in ("forward", "backward", "between", "launches", "slower", "memory"):
        add(f"--{name}", type=float, default=getattr(usual, name))
    add("--per-node", type=int, default=usual.per_node)
    add("--wire", type=float, help="GB/s within a node, for those of published runs")
    options = parser.parse_args(given)
    if min(options.devices) < 1:
        parser.error(f"--devices: got {min(options.devices)}; want 1 or more")
    if any(n > options.per_node and n % options.per_node for n in options.devices):
        parser.error(f"--devices: want at most --per-node {options.per_node}, or multiples of it")
    return options


def main(given: list[str] | None = None) -> int:
    """Print predicted efficiencies, or measured ones with their predictions."""
    options = arguments(given)
    names = ("forward", "backward", "between", "launches", "slower", "memory", "per_node")
    machine = Machine(**{name: getattr(options, name) for name in names})
    if options.wire:
        machine = replace(machine, wires={2: options.wire})
    if options.csv:
        with options.csv.open(newline="") as file:
            found = compare(list(csv.DictReader(file)), machine)
        _print("cell", "pass", "provider", "devices", "measured", "predicted", "error")
        for one in found:
            numbers = (f"{x:.3f}" for x in (one.efficiency, one.predicted, one.error))
            _print(*one[:4], *numbers)
        if found:
            mean = sum(abs(one.error) for one in found) / len(found)
            print(f"{len(found)} rows, mean error {mean:.3f}")
        return 0 if found else 1
    _print("cell", "pass", "strategy", "devices", "efficiency", *Prediction._fields[1:])
    for text in options.cells:
        for cell in named(text):
            for name in options.strategies:
                for devices in options.devices:
                    for what in PASSES:
                        parts: list[Any] = list(predict(cell, name, what, devices, machine))
                        _print(text[:24], what, name, devices, *(f"{x:.3f}" for x in parts))
    return 0


def _print(*columns: Any) -> None:
    widths = (24, 9, 14, 8)
    print(*(f"{x!s:<{w}}" for x, w in zip(columns, widths, strict=False)),
          *(f"{x:>10}" for x in columns[4:]))  # fmt: skip


if __name__ == "__main__":
    import sys

    sys.exit(main())
