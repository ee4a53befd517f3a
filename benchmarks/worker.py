"""Workers that also time kernels alone and training steps, with the rowmax of a checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import rowmax
from rowmax.bench import worker
from rowmax.bench.worker import Pace, Ready, Task

from .processes import ROOT, Settings


class Worker(worker.Worker):
    """The calls of one cell, made and timed in this process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(Pace(settings.device, settings.seconds, settings.rested))
        self.settings = settings
        source = Path(rowmax.__file__ or "").resolve().parents[1]
        if settings.root not in (ROOT, source.parent):
            raise RuntimeError(f"rowmax is imported from {source}, not of {settings.root}")
        adapter = settings.root / "benchmarks" / "variants.py"
        if settings.root != ROOT and adapter.exists():  # private names of that checkout
            for name in ("cells", "providers"):  # an older adapter imports them from benchmarks
                module = importlib.import_module(f"rowmax.bench.{name}")
                sys.modules.setdefault(f"benchmarks.{name}", module)
            spec: Any = importlib.util.spec_from_file_location("benchmarks.variants", adapter)
            sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])
        self.variants: Any = importlib.import_module("benchmarks.variants")
        if settings.usual_assembler:
            self.variants.use_usual_assembler()

    def first_run(self, ready: Ready) -> dict[str, Any]:
        """Run a call for the first time; return the registers of its kernels if wanted."""
        if self.settings.registers and not (
            ready.task.what.endswith("memory") and self.device == "cpu"
        ):
            return self.variants.usage(ready.call)
        return super().first_run(ready)

    def turn(self, name: str) -> float:
        """Return milliseconds, or MiB of a memory pass."""
        ready = self.ready[name]
        return ready.call.turn() if ready.task.what == "step" else super().turn(name)

    def check(self, name: str) -> dict[str, Any]:
        """Return the difference from a peer's results, in norm; in training also of losses."""
        ready = self.ready[name]
        losses = {}
        if ready.task.what == "step":
            losses["losses"] = [x.item() for x in ready.call.losses]
        return losses | super().check(name)

    def peers(self, task: Task) -> tuple[str, ...]:
        """Return the providers that may check a result; none if a check has no meaning."""
        if task.what in self.variants.KERNELS:
            return ("shipped",) if task.provider != "shipped" else ()
        if task.what == "step":
            return () if task.provider == "none" else self.others(task)
        return super().peers(task)

    def difference(self, ready: Ready, peer: str) -> float:
        """Return the largest difference of a result, or of a model's gradients, from a peer's."""
        if ready.task.what == "step":
            return ready.call.gradient_difference(self.attend(ready.task._replace(provider=peer)))
        return super().difference(ready, peer)

    def made(self, task: Task) -> Ready:
        """Return the call of a task, not yet run."""
        cell, what, name = task
        if what == "step":
            from .training import Learner

            return Ready(task, Learner(cell, self.attend(task), self.device))
        if what in self.variants.KERNELS:
            return Ready(task, self.variants.KERNELS[what][0](cell, self.inputs_for(cell), name))
        return super().made(task)
