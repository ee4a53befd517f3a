"""A run of ``python -m benchmarks``: also kernels alone, other checkouts and training steps."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from rowmax.bench import run
from rowmax.bench.cells import Cell
from rowmax.bench.run import Contestant, Results, Turns
from rowmax.bench.worker import Pace, Task

from .processes import Child, Settings
from .training import GRADIENT, NEAR
from .variants import KERNELS, tried
from .worker import Worker


class Run(run.Run):
    """The options, a worker for each version of rowmax, and the rows so far."""

    products = run.PRODUCTS | {name: products for name, (_, products) in KERNELS.items()}

    def __init__(self, options: argparse.Namespace, children: ExitStack) -> None:
        self.options, self.children = options, children
        here = Settings(options.device, options.turn_seconds, options.rested, options.registers)
        self.settings = {"": here}
        if options.against:
            root = options.against.resolve()
            self.settings[str(options.against)] = here._replace(root=root)
        if options.usual_assembler:
            self.settings["usual ptxas"] = here._replace(usual_assembler=True)
        super().__init__(
            Pace(options.device, options.turn_seconds, options.rested),
            options.providers,
            Turns(options.turns, options.pause, options.once),
            options.peer,
            options.check,
            lambda text: print(text, flush=True),
        )

    def start_workers(self) -> dict[str, Any]:
        """Return a worker for each version, in this process if there is one version."""
        alone = len(self.settings) == 1
        return {
            name: Worker(x) if alone else self.children.enter_context(Child.begin(x)).worker
            for name, x in self.settings.items()
        }

    @contextmanager
    def alone(self, version: str) -> Iterator[Any]:
        """Return a context with a worker in a process of its own."""
        with Child.begin(self.settings[version]) as child:
            yield child.worker

    def contestants(self, cell: Cell, what: str) -> list[Contestant]:
        """Return those of this version, then rowmax in the others."""
        first = super().contestants(cell, what)
        if what in KERNELS:
            names = ["shipped", *(self.options.tiles or tried(what, cell))]
            first = [Contestant(name) for name in names]
        ours = [x.provider for x in first if what in KERNELS or x.provider.startswith("rowmax")]
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

    # --- rows ----------------------------------------------------------------------------------

    def row(self, cell: Cell, what: str, one: Contestant, found: Results) -> dict[str, Any]:
        """Return the row of a contestant; of a training step with its losses."""
        row = super().row(cell, what, one, found)
        if what == "step":
            row["tokens_per_second"] = f"{1e3 * cell.b * cell.n / found[one].value:.0f}"
            row["note"] = self.learnt(one, found)
        return row

    def peer_of(self, one: Contestant, found: Results) -> Contestant | None:
        """Return another version of the same provider, else the shipped kernel or the peer."""
        same = [x for x in found if x.provider == one.provider and x.version and not one.version]
        usual = [x for x in found if x.provider in ("shipped", self.options.peer) and not x.version]
        return next((x for x in same + usual if x != one), None)

    def bound(self, cell: Cell, what: str) -> float:
        """Return the relative difference from a peer that rounding explains."""
        return GRADIENT if what == "step" else super().bound(cell, what)

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
