"""The parts of the demo, run by one clock: checks, training, long sequence, speed, report.

Each part ends at a share of the time, runs less where the machine is slow, and reports what it
left out.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from rowmax.cli.check_table import check_table
from rowmax.cli.checks import Checks, collect, find_backends
from rowmax.cli.progress import Progress

from . import long_sequence, page, speed, tables, timed_checks, training
from .clock import Clock, load_average
from .compiling import Kernels
from .format import duration
from .gpt import standard_library
from .report import DemoReport, Machine
from .threads import best_threads

SECONDS, QUICK_SECONDS = 160.0, 50.0  # three minutes and one, less the end of the process
#: the end of each part, as a share of all the time
CHECKS, TRAINING, LONG_SEQUENCE, SPEED = 0.7, 0.86, 0.94, 0.98


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    device: torch.device
    backend: str | None = None
    steps: int | None = None
    quick: bool = False
    report: Path = Path("report.html")
    seed: int = 0
    seconds: float | None = None  # time for everything; None for the usual time
    spent: float = 0.0  # seconds that have passed already

    @property
    def command(self) -> str:
        """The command that runs the same again."""
        given = {
            "--device": str(self.device),
            "--backend": self.backend,
            "--steps": self.steps,
            "--seconds": None if self.seconds is None else f"{self.seconds:g}",
            "--seed": self.seed or None,
            "--report": None if str(self.report) == "report.html" else str(self.report),
        }
        words = [word for name, x in given.items() if x is not None for word in (name, str(x))]
        return shlex.join(["python", "-m", "demo", *(["--quick"] if self.quick else []), *words])


def report_error(path: Path) -> str | None:
    """Return why a report cannot be written to this path, or None; also of the JSON next to it."""
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}"
    if path.suffix == ".json":
        return f"{path}: the report is a page; want a name that ends in .html"
    return _unwritable(path) or _unwritable(path.with_suffix(".json"))


def _unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, or None."""
    new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        return f"{path}: {error.strerror}; want a file that can be written"
    return None


def run_demo(
    options: Options, console: Console, now: Callable[[], float] = time.monotonic
) -> DemoReport:
    """Run everything that fits into the time, and write the report."""
    usual = QUICK_SECONDS if options.quick else SECONDS
    clock = Clock(options.seconds or usual, now, spent=options.spent)
    compared = trained = stretched = None  # where no backend can run in time
    with best_threads():
        machine = Machine.here(options.device)
        console.print(str(machine), highlight=False, soft_wrap=True)
        checks, backend, able = run_checks(options, console, clock.until(CHECKS))
        if able:
            trained = run_training(options, console, clock.until(TRAINING), backend)
            stretched = run_long_sequence(options, console, clock.until(LONG_SEQUENCE), backend)
            # last: the verdict does not need it, and it uses any time that is left
            compared = run_speed(options, console, clock.until(SPEED), backend)
    report = DemoReport(
        machine,
        checks,
        compared,
        trained,
        stretched,
        clock.elapsed,
        clock.seconds,
        load_average(),
        options.report,
        options.command,
    )
    options.report.write_text(page.render(report), encoding="utf-8")
    report.write_json()
    console.print(tables.verdict(report))
    console.print(f"Report: {options.report.resolve()}", soft_wrap=True, highlight=False)
    return report


def run_checks(options: Options, console: Console, clock: Clock) -> tuple[Checks, str | None, bool]:
    """Run the checks that fit; return (checks, backend of the other parts, True if it can run).

    Where the CPU kernels are not compiled in time, "torch" takes their place, unless ``--backend``
    names them.
    """
    device = options.device
    names, absent = find_backends(device)
    if options.backend is not None:
        names = (options.backend,)
    with (
        Kernels(names, clock) as kernels,
        Progress(console, "Checks: starting", lambda: clock.elapsed) as progress,
    ):
        rows = timed_checks.run_checks(device, names, options.seed, clock, kernels, progress.show)
        compiled = kernels.ready("cpu", torch.float32)
    checks = collect(device, names, absent, rows)
    console.print(check_table(checks, "1. "))
    if compiled or options.backend is not None:
        return checks, options.backend, compiled
    return checks, "torch", True


def run_speed(
    options: Options, console: Console, clock: Clock, backend: str | None
) -> speed.Speed | None:
    """Measure speed and memory next to SDPA, as much as fits."""
    result = None
    with Progress(console, "Speed: starting its process", lambda: clock.elapsed) as progress:

        def on_measurement(done: int, planned: int) -> None:
            progress.show(f"Speed: {done} of {planned} measurements next to SDPA")

        if clock.left:
            result = speed.run(options.device, backend, options.quick, clock.left, on_measurement)
    console.print(tables.speed_table(result))
    return result


def run_training(
    options: Options, console: Console, clock: Clock, backend: str | None
) -> training.Training | None:
    """Train one model twice; return None where not even the smallest plan fits."""
    plans = [training.plan_for(options.device, options.steps, options.quick)]
    if not options.quick:
        plans.append(training.plan_for(options.device, plans[0].steps, quick=True))
    ours = training.rowmax_attention(backend)
    first = "Training: measuring a step of each model"
    with Progress(console, first, lambda: clock.elapsed) as progress:
        plan = training.plan_within(tuple(plans), clock, options.device, ours)

        def on_step(step: int, steps: int, curves: dict[str, training.Curve]) -> None:
            losses = ", ".join(f"{name} {c.losses[-1]:.3f}" for name, c in curves.items())
            pair = sum(sum(c.seconds[-5:]) / len(c.seconds[-5:]) for c in curves.values())
            rest = f"about {duration((steps - step) * pair)} to go"
            progress.show(f"Training: step {step} of {steps} of both models; loss {losses}; {rest}")

        result = None
        if plan is not None:
            corpus = standard_library()
            result = training.train(
                plan, corpus, options.device, ours, options.seed, on_step, clock
            )
            result.smaller = plan != plans[0]
    console.print(tables.training_table(result))
    return result


def run_long_sequence(
    options: Options, console: Console, clock: Clock, backend: str | None
) -> long_sequence.LongSequence | None:
    """Run the longest sequence that fits; return None where the shortest does not."""
    shape = long_sequence.shape_for(options.device, options.quick)
    result = None
    first = "Long sequence: starting its process"
    with Progress(console, first, lambda: clock.elapsed) as progress:

        def on_length(n: int) -> None:
            progress.show(
                f"Long sequence: {n:,} positions forward and backward, {shape.n:,} at the end"
            )

        if clock.left:
            result = long_sequence.run(
                shape, options.device, backend, options.seed, clock.left, on_length
            )
    console.print(tables.long_sequence_table(result))
    return result
