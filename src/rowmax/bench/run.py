"""A run: contestants take turns on each cell; a row has its ratio to a peer of the run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from .cells import Cell
from .worker import Alone, Pace, Task, Worker

COLUMNS: tuple[str, ...] = (
    "cell", "pass", "provider", "version", "dtype", "b", "n", "hq", "hk", "d", "nq", "ms", "tflops",
    "gb_per_s", "host_us", "peak_mib", "tokens_per_second", "error_share", "ratio", "peer", "off",
    "registers", "local", "note", "turns", "device", "threads", "vectors", "torch", "triton",
    "numba", "date",
)  # fmt: skip
#: relative differences, in norm, that rounding explains
BOUNDS = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-3}
#: products of matrices that are counted in a pass
PRODUCTS = {"matmul": 1, "forward": 2, "backward": 5, "both": 7, "jvp": 6, "second": 16}
#: column and factor of its unit, of passes that do not give milliseconds
UNITS = {
    **dict.fromkeys(("memory", "jvp-memory", "second-memory"), ("peak_mib", 1)),
    **dict.fromkeys(("host", "host-both"), ("host_us", 1e3)),
}


class Contestant(NamedTuple):
    """A provider (for a kernel alone: a change) in one version of rowmax."""

    provider: str
    version: str = ""

    def __str__(self) -> str:
        return self.provider + f" @ {self.version}" * bool(self.version)


class Result(NamedTuple):
    """The median of a contestant's turns, their number, and other facts of the call."""

    value: float
    turns: int
    info: dict[str, Any]


Results = dict[Contestant, Result]


class Turns(NamedTuple):
    """The turns of every contestant, and the rest before each."""

    number: int = 5
    pause: float = 0.0  # seconds: a card slows down as it warms
    once: Sequence[str] = ()  # providers that take one turn


FIVE = Turns()
#: milliseconds, or MiB of a memory pass, of every turn
Times = dict[Contestant, list[float]]


class Run:
    """Providers that take turns, and the rows so far."""

    products = PRODUCTS

    def __init__(
        self,
        pace: Pace,
        providers: Sequence[str],
        turns: Turns = FIVE,
        peer: str | None = None,
        check: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        """Without a peer by name, rowmax is set against the fastest other provider.

        ``say`` takes a line on each contestant that does not compute a cell.
        """
        self.pace, self.providers, self.turns = pace, providers, turns
        self.peer, self.checked, self.say = peer, check, say
        self.workers = self.start_workers()
        self.facts: dict[str, str] = self.workers[""].facts()
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def start_workers(self) -> dict[str, Any]:
        """Return a worker for each version of rowmax."""
        return {"": Worker(self.pace)}

    def alone(self, version: str) -> Any:
        """Return a context with a worker in a process of its own."""
        return Alone(self.pace)

    def contestants(self, cell: Cell, what: str) -> list[Contestant]:
        """Return the contestants of a pass of a cell."""
        return [Contestant(name) for name in (["torch"] if what == "matmul" else self.providers)]

    def measure(self, cell: Cell, what: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each contestant of a pass of a cell."""
        infos, workers = {}, {}
        with ExitStack() as stack:
            for one in self.contestants(cell, what):
                worker = self.workers[one.version]
                if what.endswith("memory") and self.pace.device == "cpu":  # a process has one peak
                    worker = stack.enter_context(self.alone(one.version))
                info = worker.prepare(str(one), Task(cell, what, one.provider))
                if "error" not in info:
                    workers[one], infos[one] = worker, info
                    continue
                self.say(f"{cell.name} {what}: {one}: {info['error']}")
                if one.provider == "rowmax":  # a named backend may refuse
                    self.failed.append(f"{cell.name} {what} {one}: {info['error']}")
            if self.checked and what != "step":
                self.check(workers, infos)
            times = self.take_turns(what, workers)
            if self.checked and what == "step":  # the trained models
                self.check(workers, infos)
            for worker in workers.values():
                worker.release()
        found = {x: Result(statistics.median(t), len(t), infos[x]) for x, t in times.items()}
        for one in found:
            yield self.row(cell, what, one, found) | self.facts

    def check(self, workers: dict[Contestant, Any], infos: dict[Contestant, Any]) -> None:
        """Add the differences from a peer to the facts of every call."""
        for one, worker in workers.items():
            infos[one].update(worker.check(str(one)))

    def take_turns(
        self, what: str, workers: dict[Contestant, Any]
    ) -> dict[Contestant, list[float]]:
        """Return the times of every turn; in each turn a contestant follows a different one."""
        names, turns = list(workers), self.turns
        times: Times = {one: [] for one in names}
        time.sleep(3 * turns.pause)
        for turn in range(1 if what.endswith("memory") else turns.number):
            at = (turn + 1) // 2 % max(1, len(names))
            order = names[at:] + names[:at]
            for one in order if turn % 2 == 0 else order[::-1]:
                if not (turn and one.provider in turns.once):
                    time.sleep(turns.pause)
                    times[one].append(workers[one].turn(str(one)))
        return times

    # --- rows ----------------------------------------------------------------------------------

    def row(self, cell: Cell, what: str, one: Contestant, found: Results) -> dict[str, Any]:
        """Return the row of a contestant: its sizes, its figures and its ratio to a peer."""
        value, turns, info = found[one]
        row = {x: getattr(cell, x) for x in ("dtype", "b", "n", "hq", "hk", "d")}
        row |= {
            "nq": cell.queries,
            "cell": cell.name,
            "pass": what,
            "turns": turns,
            **one._asdict(),
        }
        row |= {x: info[x] for x in ("registers", "local", "note") if x in info}
        column, factor = UNITS.get(what, ("ms", 1))
        row[column] = f"{factor * value:.{4 if column == 'ms' else 1}f}"
        if self.products.get(what):
            row["tflops"] = f"{cell.flops(self.products[what]) / value / 1e9:.4g}"
        if column == "ms" and cell.nq and self.products.get(what):
            row["gb_per_s"] = f"{cell.streamed / value / 1e6:.0f}"
        peer = self.peer_of(one, found)
        if peer is not None and value and found[peer].value:
            row |= {"ratio": f"{found[peer].value / value:.3f}", "peer": str(peer)}
        if "off" in info:
            row["off"] = f"{info['off']:.1e}"
            self.expect(info["off"], self.bound(cell, what), f"{cell.name} {what}: {one}")
        return row

    def peer_of(self, one: Contestant, found: Results) -> Contestant | None:
        """Return the contestant that another is set against, or None.

        Without a peer by name, that is the fastest of the others, and for rowmax alone.
        """
        if self.peer is not None:
            named = Contestant(self.peer)
            return named if named in found and named != one else None
        if not one.provider.startswith("rowmax"):
            return None
        others = [x for x in found if not x.provider.startswith(("rowmax", "none"))]
        return min(others, key=lambda x: found[x].value, default=None)

    def bound(self, cell: Cell, what: str) -> float:
        """Return the relative difference from a peer that rounding explains."""
        return BOUNDS[cell.dtype]

    def expect(self, off: float, bound: float, of: str) -> None:
        """Note a failure where a difference is beyond its bound."""
        if not off <= bound:
            self.failed.append(f"{of} is off by {off:.1e}")
