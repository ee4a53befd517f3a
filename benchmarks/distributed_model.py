"""Predict how well attention scales over devices of one host and of several.

    python -m benchmarks.distributed_model --devices 2 4 8
    python -m benchmarks.distributed_model --devices 16 32 --strategies keys grid --cells causal-1m
    python -m benchmarks.distributed_model --csv measured.csv     (rows of benchmarks.distributed)

The time of a pass on the slowest rank is a sum:

    its share of the operations / speed of one device x imbalance
    + exposed copies between devices, and slower computing under hidden ones
    + copies in own memory + launches

Efficiency is the time of one device / devices / that sum.

Strategies, as ``rowmax.distributed`` has them now:

    keys    K, V come before the first tile, dK, dV return in float32 after the last: all exposed
    heads   rows for heads and back: all exposed; the backward exchanges q, k, v, out and dout again
    staged  copies while tiles are computed; exposed is a quarter of one shard of dK, dV (not built)
    grid    heads within a node, keys between nodes (not built)

The speeds are inputs. Those of wires are of published runs on H100 (NCCL, GB/s a direction); those
of memory, launches and slower computing are assumptions. With ``--csv``, speed of one device and of
the wire are those of the file, where it has them.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rowmax.bench.cells import Cell
from rowmax.bench.run import PRODUCTS
from rowmax.distributed import Layout
from rowmax.distributed.layout import ALIGNED

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
    launches: float = 60.0  # microseconds of launches and barriers of a forward; twice backward
    slower: float = 0.05  # computing takes so much longer while the wire is busy
    memory: float = 2400.0  # GB/s of copies in own memory

    def wire(self, devices: int) -> float:
        """Return GB/s within a node that has so many devices of the group."""
        known = [n for n in self.wires if n <= devices]
        return self.wires[max(known, default=min(self.wires))]


IDEAL = Machine(wires={2: math.inf}, between=math.inf, launches=0.0, slower=0.0, memory=math.inf)


class Traffic(NamedTuple):
    """The bytes that a rank receives: within its node and from others; and copies in memory."""

    inside: float = 0.0
    outside: float = 0.0
    copied: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


class Strategy(NamedTuple):
    """Exposed shares: of what comes, and of what returns; and those of one shard of dK, dV."""

    gather: float
    scatter: float
    tail: float = 0.0


STRATEGIES = {
    "keys": Strategy(1.0, 1.0),
    "heads": Strategy(1.0, 1.0),
    "staged": Strategy(0.0, 0.0, 0.25),
    "grid": Strategy(1.0, 1.0),
}


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
        come = _split(came * share, devices, inside)._replace(copied=4 * came)
        back = _split(went * share, devices, inside)._replace(copied=6 * went)
        return come, back
    seen = 2 * received_rows(cell, devices) * cell.b * cell.d * cell.hk
    if name == "grid":
        return _grid(cell, backward, devices, inside)
    # packed for each receiver, then put in order; sums are cleared, added up, packed and added
    whole = seen + kv / HALF
    copied = 0.0 if name == "staged" else 4 * whole * HALF
    come = _split(seen * HALF, devices, inside)._replace(copied=copied)
    if not backward:
        return come, Traffic()
    copied = 0.0 if name == "staged" else (4 * WIDE + HALF) * whole
    return come, _split(seen * WIDE, devices, inside)._replace(copied=copied)


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
    >>> round(predict(named("causal-64k")[0], "staged", "forward", 8).efficiency, 3)
    0.986
    """
    machine = Machine() if machine is None else machine
    speed = getattr(machine, what)
    ideal = cell.flops(PRODUCTS[what]) / devices / speed / 1e12
    if devices == 1:
        return Prediction(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    strategy = STRATEGIES[name]
    come, back = traffic(cell, name, what, devices, machine.per_node)
    first, last = (_seconds(part, devices, machine) for part in (come, back))
    exposed = strategy.gather * first + strategy.scatter * last
    # hidden copies need as much computing; the last return of one shard has none
    tail = strategy.tail * last / max(1, devices - 1)
    hidden = first + last - exposed
    exposed += max(tail, hidden - ideal)
    slower = machine.slower * min(hidden, ideal)
    copies = (come.copied + back.copied) / machine.memory / 1e9
    launches = 1e-6 * machine.launches * (2 if what == "backward" else 1)
    uneven = imbalance(cell, name, devices, machine.per_node)
    spent = ideal * uneven + slower + exposed + copies + launches
    parts = (first + last, exposed, copies, launches)
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
    add("--strategies", nargs="+", default=["keys", "heads", "staged"], choices=STRATEGIES)
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
