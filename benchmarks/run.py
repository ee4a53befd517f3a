"""A run: contestants take turns on each cell; a row has its ratio to a peer of the run."""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from .cells import Cell
from .processes import Child, Settings, Task
from .training import GRADIENT, NEAR
from .variants import KERNELS, tried
from .worker import Worker

COLUMNS = (
    "cell", "pass", "provider", "version", "dtype", "b", "n", "hq", "hk", "d", "ms", "tflops",
    "host_us", "peak_mib", "tokens_per_second", "ratio", "peer", "off", "registers", "local",
    "note", "turns", "device", "threads", "vectors", "torch", "triton", "numba", "date",
)  # fmt: skip
#: relative differences, in norm, that rounding explains
BOUNDS = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-3}
PRODUCTS = {"matmul": 1, "forward": 2, "backward": 5, "both": 7, "jvp": 6, "second": 16}
PRODUCTS |= {name: products for name, (_, products) in KERNELS.items()}
#: column and its unit, of passes that do not give milliseconds
UNITS = {"memory": ("peak_mib", 1), "host": ("host_us", 1e3), "host-both": ("host_us", 1e3)}


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


class Run:
    """The options, a worker for each version of rowmax, and the rows so far."""

    def __init__(self, options: argparse.Namespace, children: ExitStack) -> None:
        self.options = options
        here = Settings(options.device, options.turn_seconds, options.rested, options.registers)
        self.settings = {"": here}
        if options.against:
            root = options.against.resolve()
            self.settings[str(options.against)] = here._replace(root=root)
        if options.usual_assembler:
            self.settings["usual ptxas"] = here._replace(usual_assembler=True)
        alone = len(self.settings) == 1
        self.workers: dict[str, Any] = {
            name: Worker(x) if alone else children.enter_context(Child.begin(x)).worker
            for name, x in self.settings.items()
        }
        self.facts: dict[str, str] = self.workers[""].facts()
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def contestants(self, cell: Cell, what: str) -> list[Contestant]:
        """Return those of this version, then rowmax in the others."""
        names: list[str] = ["torch"] if what == "matmul" else self.options.providers
        if what in KERNELS:
            names = ["shipped", *(self.options.tiles or tried(what, cell))]
        ours = [x for x in names if what in KERNELS or x.startswith("rowmax")]
        first = [Contestant(name) for name in names]
        return first + [Contestant(x, v) for v in self.settings if v for x in ours]

    def compile(self, plan: list[tuple[Cell, str]]) -> None:
        """Run every call once, in processes side by side: kernels are then in the caches."""

        def work(version: str, tasks: list[Task]) -> None:
            with Child.begin(self.settings[version]) as child:
                for task in tasks:
                    child.worker.prepare("", task)
                    child.worker.release()

        each = max(1, self.options.processes // len(self.settings))
        every = [(c, w, x) for c, w in plan for x in self.contestants(c, w) if w != "matmul"]
        with ThreadPoolExecutor(each * len(self.settings)) as pool:
            done = []
            for version in self.settings:
                tasks = [Task(c, w, x.provider) for c, w, x in every if x.version == version]
                done += [pool.submit(work, version, tasks[i::each]) for i in range(each)]
        for failure in filter(None, (one.exception() for one in done)):
            print(f"a process ended: {failure!r}", flush=True)  # the run repeats its tasks

    def measure(self, cell: Cell, what: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each contestant of a pass of a cell."""
        options, infos, workers = self.options, {}, {}
        with ExitStack() as stack:
            for one in self.contestants(cell, what):
                worker = self.workers[one.version]
                if what == "memory" and options.device == "cpu":  # a process has one peak
                    worker = stack.enter_context(Child.begin(self.settings[one.version])).worker
                info = worker.prepare(str(one), Task(cell, what, one.provider))
                if "error" not in info:
                    workers[one], infos[one] = worker, info
                    continue
                print(f"{cell.name} {what}: {one}: {info['error']}", flush=True)
                if one.provider == "rowmax":  # a named backend may refuse
                    self.failed.append(f"{cell.name} {what} {one}: {info['error']}")
            if options.check and what != "step":
                self.check(workers, infos)
            times = self.turns(what, workers)
            if options.check and what == "step":  # the trained models
                self.check(workers, infos)
            for worker in workers.values():
                worker.release()
        found = {x: Result(statistics.median(t), len(t), infos[x]) for x, t in times.items()}
        for one in found:
            yield self.row(cell, what, one, found) | self.facts

    def check(self, workers: dict[Contestant, Any], infos: dict[Contestant, Any]) -> None:
        for one, worker in workers.items():
            infos[one].update(worker.check(str(one)))

    def turns(self, what: str, workers: dict[Contestant, Any]) -> dict[Contestant, list[float]]:
        """Return the times of every turn; in each turn a contestant follows a different one."""
        names, options = list(workers), self.options
        times: dict[Contestant, list[float]] = {one: [] for one in names}
        time.sleep(3 * options.pause)
        for turn in range(1 if what == "memory" else options.turns):
            at = (turn + 1) // 2 % max(1, len(names))
            order = names[at:] + names[:at]
            for one in order if turn % 2 == 0 else order[::-1]:
                if not (turn and one.provider in options.once):
                    time.sleep(options.pause)
                    times[one].append(workers[one].turn(str(one)))
        return times

    # --- rows ----------------------------------------------------------------------------------

    def row(self, cell: Cell, what: str, one: Contestant, found: Results) -> dict[str, Any]:
        value, turns, info = found[one]
        row = {x: getattr(cell, x) for x in ("dtype", "b", "n", "hq", "hk", "d")}
        row |= {"cell": cell.name, "pass": what, "turns": turns, **one._asdict()}
        row |= {x: info[x] for x in ("registers", "local", "note") if x in info}
        column, factor = UNITS.get(what, ("ms", 1))
        row[column] = f"{factor * value:.{4 if column == 'ms' else 1}f}"
        if PRODUCTS.get(what):
            row["tflops"] = f"{cell.flops(PRODUCTS[what]) / value / 1e9:.4g}"
        same = [x for x in found if x.provider == one.provider and x.version and not one.version]
        usual = [x for x in found if x.provider in ("shipped", self.options.peer) and not x.version]
        peer = next((x for x in same + usual if x != one), None)
        if peer is not None and value:
            row |= {"ratio": f"{found[peer].value / value:.3f}", "peer": str(peer)}
        if what == "step":
            row["tokens_per_second"] = f"{1e3 * cell.b * cell.n / value:.0f}"
            row["note"] = self.learnt(one, found)
        if "off" in info:
            row["off"] = f"{info['off']:.1e}"
            bound = GRADIENT if what == "step" else BOUNDS[cell.dtype]
            self.expect(info["off"], bound, f"{cell.name} {what}: {one}")
        return row

    def expect(self, off: float, bound: float, of: str) -> None:
        if not off <= bound:
            self.failed.append(f"{of} is off by {off:.1e}")

    def learnt(self, one: Contestant, found: Results) -> str:
        """Return the attention's share of a step, and the difference of losses from the peer's."""
        none, peer, text = Contestant("none"), Contestant(self.options.peer), ""
        if none in found:
            text = f"attention {1 - found[none].value / found[one].value:.3f}"
        losses = found[one].info.get("losses")
        if one == none or not losses:
            return text
        others = found.get(peer, found[one]).info["losses"]
        apart = max(abs(x - y) / y for x, y in zip(losses, others, strict=False))
        self.expect(apart, NEAR, f"the loss of {one}")
        return f"{text} last loss {losses[-1]:.4f}, losses {apart:.1e} apart"

    def summary(self) -> Iterator[str]:
        """Yield the means of the ratios and the least, by pass and contestant."""
        groups: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.get("ratio"):
                kind, name = row["pass"], Contestant(row["provider"], row["version"])
                if kind in KERNELS:
                    d, _, band = row["cell"].split(",")[0].split()
                    kind += f" {d} {band} N {'>' if row['n'] > 1024 else '<='} 1024"
                group = groups.setdefault(f"{kind}: {row['peer']} / {name}", {})
                group[row["cell"]] = float(row["ratio"])
        for name, ratios in (groups | self.bars()).items():
            mean, least = statistics.geometric_mean(ratios.values()), min(ratios.values())
            at = next(cell for cell, x in ratios.items() if x == least)
            yield f"{name}: geometric mean {mean:.3f} of {len(ratios)}, least {least:.3f} ({at})"

    def bars(self) -> dict[str, dict[str, float]]:
        """Return rowmax's speeds over the better of cuDNN's in this run and that of a file."""
        found: dict[str, dict[str, float]] = {}
        if self.options.bar:
            text = self.options.bar.read_text().splitlines()
            lines = csv.DictReader(line for line in text if not line.startswith("#"))
            others = {f"D{r['D']} N{r['N']} {r['mask']}": r for r in lines}
            speeds = {(r["cell"], r["pass"], r["provider"]): r.get("tflops", 0) for r in self.rows}
            for (cell, what, name), speed in speeds.items():
                if name.startswith("rowmax") and what in others.get(cell, ()):
                    bar = max(
                        float(others[cell][what]), float(speeds.get((cell, what, "cudnn"), 0))
                    )
                    found.setdefault(f"{what}: {name} / bar", {})[cell] = float(speed) / bar
        return found
