"""Time attention over a sequence that several devices share, against one of them and torch's.

    python -m benchmarks.distributed --devices 2 --csv two.csv        (at most 150 s)
    python -m benchmarks.distributed --devices 4 --cells causal-64k --seconds 60
    python -m benchmarks.distributed --devices 2 --device cpu         (about 10 s, tiny cells)

The command starts a process for each device (NCCL; gloo on a CPU) and ends them all after
``--seconds``, whatever they do. Rows are written as they come. No pass begins after 85% of the
time, and none that would not fit by the times of its first calls.

Providers: ``one`` (the first device computes the whole, the others rest), ``rowmax:keys``,
``rowmax:heads`` (DeepSpeed's Ulysses over rowmax), each with ``:deterministic``, ``:balanced`` (the
layout) or a backend;
``torch:allgather`` and ``torch:alltoall`` (context_parallel with cuDNN's attention, both
rotations; causal and full masks). They take turns, in an order that rotates, after a rest.

First a short cell is compared with one device, all rows; then 64 rows of the cell itself. A
provider with a wrong result is not timed, and the exit status is 1.

    ms          median over turns of the slowest rank's time for a call
    efficiency  one_ms / devices / ms, both of this run
    tflops      of each device
    host_us     time of the slowest rank's host to enqueue a call
    peak_mib    memory that a call adds, of the largest rank; without NCCL's buffers
    gbs         of the pass "wire": GB/s that a rank receives

How long, expected from the operations at 690 and 620 TFLOP/s on 2 GPUs: start and kernels that
compile about a minute in all, then a cell of up to 64k tokens 5 to 12 s, 128k 15 s, 256k 50 s,
512k 3 min, 1M 12 min (``--long``; with --turns 1 half of it). 4 GPUs take two thirds of it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from rowmax.bench.cells import Cell
from rowmax.bench.run import BOUNDS, PRODUCTS

from . import distributed_calls as calls
from .distributed_cells import ALL, CELLS, LONG, ON_CPU, USUAL, named, short
from .ranks import Failure, Ranks, RanksError

COLUMNS = (
    "cell", "pass", "provider", "devices", "layout", "dtype", "b", "n", "hq", "hk", "d", "causal",
    "window", "documents", "dbias", "ms", "one_ms", "efficiency", "tflops", "host_us", "peak_mib",
    "mib", "gbs", "off", "note", "turns", "calls", "device", "interconnect", "torch", "triton",
    "nccl", "date",
)  # fmt: skip
SHOWN = ("ms", "efficiency", "tflops", "host_us", "peak_mib", "gbs", "off", "note")
PROVIDERS = ("one", "rowmax:keys", "rowmax:heads", "torch:allgather", "torch:alltoall")
PASSES = ("forward", "backward")
MOST_CALLS = 20  # in a turn
SHARE = 0.85  # nothing begins after so much of the seconds
COMPILE = 75.0  # seconds for a first call
SHORT = {"cuda": 4096, "cpu": 256}  # positions of the cell whose rows are all compared
#: contestants of one cell hold so many copies of its inputs on the first device at once
COPIES = 6
SIZES = 4  # at most so many sizes of messages


class Stopped(Exception):  # noqa: N818  (no error: the time is over)
    """The time is over."""


class Distributed:
    """The processes, and the rows so far."""

    def __init__(self, options: argparse.Namespace, write: Any) -> None:
        self.options, self.write = options, write
        self.begin = time.time()
        self.end = self.begin + options.seconds
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.banned: set[tuple[str, str]] = set()  # (cell, provider) that ended a process
        self.current = ""  # the provider that runs
        #: by (cell, pass): the facts of one device, and rows of its results
        self.ones: dict[tuple[str, str], dict[str, Any]] = {}
        self.samples: dict[tuple[str, str], Any] = {}
        self.ranks = self.started()
        found = self.ranks.run(calls.facts, limit=COMPILE)[0]
        self.memory = float(found.pop("memory", "inf"))
        peer = {"yes": "peer access", "no": "no peer access"}.get(found.pop("peer_access"), "")
        if options.device == "cuda":
            found["interconnect"] = interconnect() or peer
        self.facts = {key: x for key, x in found.items() if key in COLUMNS}

    def started(self) -> Ranks:
        return Ranks(self.options.devices, self.options.device, self.end)

    def say(self, *words: Any) -> None:
        print(f"{time.time() - self.begin:5.0f} s", *words, flush=True)

    def late(self, seconds: float = 0.0) -> bool:
        """Return True if work of some seconds must not begin."""
        return time.time() + seconds > self.begin + SHARE * self.options.seconds

    def due(self, seconds: float = 0.0) -> None:
        """Raise Stopped if work of some seconds must not begin."""
        if self.late(seconds):
            raise Stopped

    def all(self, function: Any, *args: Any, limit: float = COMPILE) -> list[Any]:
        return self.ranks.run(function, *args, limit=limit)

    def of(self, name: str, function: Any, *args: Any, limit: float = COMPILE) -> list[Any]:
        """Return the results of a provider's ranks: those of ``one`` are the first alone."""
        self.current = name
        only = (0,) if calls.is_one(name) else None
        return self.ranks.run(function, *args, limit=limit, only=only)

    # --- a cell ----------------------------------------------------------------------------------

    def measure(self, label: str, cell: Cell) -> None:
        """Measure the passes of a cell; begin again without a provider whose ranks hang or die."""
        while not self.attempt(label, cell):
            pass

    def attempt(self, label: str, cell: Cell) -> bool:
        """Return True if a cell is measured, or cannot be; False to begin again."""
        try:
            self._measure(label, cell)
        except RanksError as error:
            name = self.current.removesuffix(":repeated")
            first, *rest = str(error).split("\n")
            self.failed.append(f"{label} {self.current}: {first}")
            self.say("FAILED", self.failed[-1], *rest)
            again = (label, name) not in self.banned and name != ""
            self.banned.add((label, name))
            self.recover()
            return not again
        return True

    def recover(self) -> None:
        """Drop what ranks hold; start others if one has ended."""
        with contextlib.suppress(RanksError):
            if self.ranks.alive:
                self.all(calls.release)
                return
        self.ranks.close(grace=0.0)
        self.due(30.0)
        self.ranks = self.started()

    def _measure(self, label: str, cell: Cell) -> None:
        self.current = ""
        names = self.right_ones(label, cell)
        apart = COPIES * self.bytes_of(cell) > self.memory
        groups = [(name,) for name in names] if apart else [tuple(names)]
        done = {(row["cell"], row["pass"], row["provider"]) for row in self.rows}
        for group in groups:
            layouts = {name: self.of(name, calls.prepare, cell, name)[0] for name in group}
            for what in self.options.passes:
                left = [name for name in group if (label, what, name) not in done]
                infos = self.take_turns(what, self.first_calls(label, cell, left, what))
                for name, info in infos.items():
                    if calls.is_one(name):
                        self.ones[label, what] = info
                    info["layout"] = layouts[name]
                    self.add(self.row(label, cell, what, name, info))
            self.all(calls.release)

    def bytes_of(self, cell: Cell) -> float:
        """Return the bytes of q, k, v, dout, out, and of the bias."""
        rows = cell.b * cell.n * cell.d * (3 * cell.hq + 2 * cell.hk)
        bias = cell.hq * cell.n * cell.n if cell.bias else 0
        return getattr(torch, cell.dtype).itemsize * (rows + bias)

    def right_ones(self, label: str, cell: Cell) -> list[str]:
        """Return the providers whose results are right at a short length."""
        small = short(cell, SHORT[self.options.device])
        found = []
        for name in self.options.providers:
            self.due()
            if (label, name) in self.banned:
                continue
            if calls.is_one(name):
                found.append(name)
                continue
            for variant in (name, f"{name}:repeated"):
                info = self.try_short(small, variant)
                grouped = variant == name and name.startswith("torch") and cell.hq != cell.hk
                if "off" in info and self.expect(info["off"], cell, f"{small.name}: {variant}"):
                    found.append(variant)
                if "off" in info or "error" in info or not grouped:
                    break
            if "off" not in info:
                self.say(f"{label}: {name}: {info.get('error') or info['raised']}")
                if name.startswith("rowmax"):
                    self.failed.append(f"{label} {name}: {info.get('error') or info['raised']}")
        return found

    def try_short(self, cell: Cell, name: str) -> dict[str, Any]:
        """Return the largest difference of all ranks, the refusal, or the error that all raised."""
        self.current = name
        one = next(filter(calls.is_one, self.options.providers), "one")
        found = self.ranks.attempt(calls.check_short, cell, name, one, limit=COMPILE)
        failed = [one for one in found if isinstance(one, Failure)]
        if failed:
            return {"raised": failed[0].text.split("\n")[0]}
        if "error" in found[0]:
            return found[0]
        return {"off": max(one["off"] for one in found)}

    def expect(self, off: float, cell: Cell, of: str) -> bool:
        """Return True if a difference is rounding; note a failure if not."""
        right = off <= BOUNDS[cell.dtype]
        if not right:
            self.failed.append(f"{of} is off by {off:.1e}; not timed")
            self.say("WRONG", self.failed[-1])
        return right

    def first_calls(
        self, label: str, cell: Cell, names: list[str], what: str
    ) -> dict[str, dict[str, Any]]:
        """Run each contestant once; return the facts of those whose sampled rows are right."""
        infos = {}
        for name in names:
            self.due()
            found = self.of(name, calls.first_call, name, what, self.samples.get((label, what)))
            if calls.is_one(name):
                self.samples[label, what] = found[0].pop("sample")
            info = {key: max(one[key] for one in found) for key in found[0]}
            if "off" not in info or self.expect(info["off"], cell, f"{label} {what}: {name}"):
                infos[name] = info
        return infos

    def take_turns(self, what: str, infos: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Add the medians of turns to the facts of each contestant."""
        options, names = self.options, list(infos)
        number = {
            name: max(1, min(MOST_CALLS, int(1e3 * options.turn_seconds / info["ms"])))
            for name, info in infos.items()
        }
        a_turn = sum(options.pause + 1e-3 * infos[x]["ms"] * number[x] + 0.03 for x in names)
        turns: dict[str, list[calls.Turn]] = {name: [] for name in names}
        for turn in range(options.turns):
            if turn and self.late(a_turn):
                break
            self.due(a_turn)
            at = turn % max(1, len(names))
            for name in names[at:] + names[:at]:
                time.sleep(options.pause)
                limit = 30.0 + 5e-3 * infos[name]["ms"] * number[name]
                each = self.of(name, calls.take_turn, name, what, number[name], limit=limit)
                slowest = max(each, key=lambda one: one.ms)
                host = max(one.host_ms for one in each)
                turns[name].append(slowest._replace(host_ms=host))
        for name, each in turns.items():
            infos[name] |= {
                "ms": statistics.median(one.ms for one in each),
                "host_ms": statistics.median(one.host_ms for one in each),
                "turns": len(each),
                "calls": number[name],
            }
        return infos

    # --- the wire --------------------------------------------------------------------------------

    def measure_wire(self, sizes: list[float]) -> None:
        """Time collectives at the sizes of the cells, in MiB a rank."""
        for mib in sizes:
            for name in ("all_gather", "reduce_scatter", "all_to_all"):
                self.current = f"wire:{name}"
                limit = 60.0
                self.due()
                first = self.all(calls.wire, name, mib, 1, limit=limit)
                ms = max(one for one, _ in first)
                count = max(1, min(MOST_CALLS, int(1e3 * self.options.turn_seconds / ms)))
                each = []
                for _ in range(self.options.turns):
                    time.sleep(self.options.pause)
                    found = self.all(calls.wire, name, mib, count, limit=limit)
                    each.append(max(found))
                ms, received = statistics.median_low(each)
                row = {"cell": f"{mib:g} MiB a rank", "pass": "wire", "provider": name}
                row |= {"ms": f"{ms:.4f}", "mib": f"{mib:g}", "turns": len(each), "calls": count}
                row["gbs"] = f"{received * 2**20 / ms / 1e6:.1f}"
                self.add(row)

    # --- rows ------------------------------------------------------------------------------------

    def row(
        self, label: str, cell: Cell, what: str, name: str, info: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the row of a contestant."""
        one = self.ones.get((label, what))
        alone = calls.is_one(name)
        devices = 1 if alone else self.options.devices
        row = {key: getattr(cell, key) for key in ("dtype", "b", "n", "hq", "hk", "d")}
        row |= {"cell": label, "pass": what, "provider": name, "layout": info["layout"]}
        row |= {"causal": int(cell.causal), "window": cell.window or "", "dbias": int(cell.dbias)}
        row |= {"documents": len(cell.packed) or "", "turns": info["turns"]}
        row |= {"calls": info["calls"], "ms": f"{info['ms']:.4f}"}
        row["tflops"] = f"{cell.flops(PRODUCTS[what]) / devices / info['ms'] / 1e9:.4g}"
        row["host_us"] = f"{1e3 * info['host_ms']:.0f}"
        if one is not None and not alone:
            row["one_ms"] = f"{one['ms']:.4f}"
            row["efficiency"] = f"{one['ms'] / devices / info['ms']:.4f}"
        if "peak_mib" in info:
            row["peak_mib"] = f"{info['peak_mib']:.1f}"
        if "off" in info:
            row["off"] = f"{info['off']:.1e}"
        if name.endswith(":repeated"):
            row["note"] = "kv heads repeated"
        return row

    def add(self, row: dict[str, Any]) -> None:
        """Store and print a row."""
        row = {"devices": self.options.devices} | row | self.facts
        self.rows.append(row)
        self.write(row)
        text = (f"{key} {row[key]}" for key in SHOWN if row.get(key))
        self.say(f"{row['cell']:16} {row['pass']:9} {row['provider']:18}", *text)


def sizes_of(cells: list[Cell], devices: int) -> list[float]:
    """Return the MiB of a rank's keys and values, and of their float32 gradients: four of all."""
    rows = {cell.n * cell.hk * cell.d * cell.b // devices for cell in cells}
    found = sorted({2 * x * size / 2**20 for x in rows for size in (2, 4)})
    most = min(SIZES, len(found))
    return [found[round(n * (len(found) - 1) / max(1, most - 1))] for n in range(most)]


def interconnect() -> str:
    """Return the links between the first two GPUs as the driver's tool has them, such as NV18."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU0")]
    return lines[0][2] if lines and len(lines[0]) > 2 else ""


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options, with defaults by device."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--devices", type=int, default=2)
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    add("--cells", nargs="+", help=f"all, text, or names: {', '.join(CELLS)}")
    add("--long", action="store_true", help=f"also {' and '.join(LONG)}")
    add("--providers", nargs="+", default=list(PROVIDERS))
    add("--passes", nargs="+", default=list(PASSES), choices=(*PASSES, "wire"))
    add("--wire", action=argparse.BooleanOptionalAction, default=True, help="time collectives")
    add("--seconds", type=float, default=150.0, help="then every process is killed (150)")
    add("--turns", type=int, default=3)
    add("--turn-seconds", type=float, default=0.05, help="of calls of a provider in a turn")
    add("--pause", type=float, default=0.1, help="seconds of rest before a turn")
    add("--csv", type=Path)
    options = parser.parse_args(given)
    if options.device == "cuda" and torch.cuda.device_count() < options.devices:
        there = torch.cuda.device_count()
        parser.error(f"--devices: got {options.devices}; this host has {there} GPUs")
    if options.devices < 2:
        parser.error(f"--devices: got {options.devices}; want 2 or more")
    names = options.cells or (USUAL if options.device == "cuda" else ON_CPU)
    names = [x for name in names for x in (ALL if name == "all" else (name,))]
    names += LONG if options.long else ()
    options.plan = [(name, cell) for name in names for cell in named(name)]
    options.plan = [(x if x in CELLS else cell.name, cell) for x, cell in options.plan]
    options.wire = options.wire or "wire" in options.passes
    options.passes = [what for what in options.passes if what != "wire"]
    # rows of one device are compared with: it comes first
    options.providers = sorted(options.providers, key=lambda name: not calls.is_one(name))
    return options


def main(given: list[str] | None = None) -> int:
    """Measure, print and store; return 1 if a result is wrong or a process failed."""
    options = arguments(given)
    with (options.csv or Path(os.devnull)).open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="")
        table.writeheader()

        def write(row: dict[str, Any]) -> None:
            table.writerow(row)
            file.flush()

        try:
            run = Distributed(options, write)
        except RanksError as error:
            print(f"FAILED: no process could start: {error}")
            return 1
        run.say(", ".join(f"{key} {x}" for key, x in run.facts.items() if x))
        try:
            if options.wire:
                run.measure_wire(sizes_of([cell for _, cell in options.plan], options.devices))
            for label, cell in options.plan if options.passes else ():
                run.measure(label, cell)
        except Stopped:
            run.say(f"stopped: {options.seconds:.0f} s are nearly over")
        except RanksError as error:
            run.failed.append(str(error))
        finally:
            run.ranks.close()
        print(*(f"FAILED: {text}" for text in run.failed), sep="\n", end="\n" if run.failed else "")
    return int(bool(run.failed))


if __name__ == "__main__":
    import sys

    sys.exit(main())
