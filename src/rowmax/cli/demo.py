"""The demo: the installation checked, a model trained, a long sequence run, a report written.

It follows one clock. Each part ends at a share of the time, takes smaller steps where the machine
is slow, and says what it left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from . import checks, long, report, tables, training
from .busy import best_threads
from .clock import Clock, load_average
from .compiling import Kernels
from .findings import Findings, Machine
from .gpt import standard_library
from .progress import Progress
from .words import duration

SECONDS, QUICK_SECONDS = 160.0, 50.0  # three minutes and one, less what the end of a process takes
#: where each part ends, as a share of all the time
CHECKS, TRAINING, LONG = 0.7, 0.86, 0.97


@dataclass(frozen=True)
class Options:
    device: torch.device
    backend: str | None = None
    steps: int | None = None
    quick: bool = False
    report: Path = Path("report.html")
    seed: int = 0
    seconds: float | None = None  # for everything; None for the usual time
    spent: float = 0.0  # seconds of them that have passed


def refusal_of(path: Path) -> str | None:
    """Return why a report cannot be written there, or None."""
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}"
    new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        return f"{path}: {error.strerror}; want a file that can be written"
    return None


def run(options: Options, console: Console, now: Callable[[], float] = time.monotonic) -> Findings:
    """Run everything that fits, and write the report."""
    usual = QUICK_SECONDS if options.quick else SECONDS
    clock = Clock(options.seconds or usual, now, spent=options.spent)
    with best_threads():
        machine = Machine.here(options.device)
        console.print(str(machine), highlight=False, soft_wrap=True)
        found, backend, able = check_within(options, console, clock.until(CHECKS))
        trained = train(options, console, clock.until(TRAINING), backend) if able else None
        stretched = run_long(options, console, clock.until(LONG), backend) if able else None
    findings = Findings(
        machine, found, trained, stretched, clock.elapsed, clock.seconds, load_average()
    )
    options.report.write_text(report.page(findings), encoding="utf-8")
    console.print(tables.verdict(findings))
    console.print(f"Report: {options.report.resolve()}", soft_wrap=True, highlight=False)
    return findings


def check_within(
    options: Options, console: Console, clock: Clock
) -> tuple[checks.Checks, str | None, bool]:
    """Run the checks that fit; return (checks, backend of the other parts, True if it can run).

    Where the CPU kernels could not be compiled in time, "torch" takes their place, unless it was
    them that was asked for.
    """
    names = checks.here(options.device)[0] if options.backend is None else (options.backend,)
    with Kernels(names, clock) as kernels:
        found = check_installation(
            options.device, options.backend, options.seed, console, clock, kernels
        )
        compiled = kernels.ready("cpu", torch.float32)
    if compiled or options.backend is not None:
        return found, options.backend, compiled
    return found, "torch", True


def check_installation(
    device: torch.device,
    backend: str | None,
    seed: int,
    console: Console,
    clock: Clock | None = None,
    kernels: Kernels | None = None,
) -> checks.Checks:
    """The first part, and the whole of ``rowmax check``, which has no limit of time."""
    names = None if backend is None else (backend,)
    shown = Clock(float("inf")) if clock is None else clock
    with Progress(console, shown, "Checks: starting") as progress:

        def on_check(text: str) -> None:
            progress.say(f"Checks: {text}")

        found = checks.run(device, names, seed, on_check, clock=clock, kernels=kernels)
    console.print(tables.of_checks(found))
    return found


def train(
    options: Options, console: Console, clock: Clock, backend: str | None
) -> training.Training | None:
    """The second part: one model twice."""
    plans = [training.plan_for(options.device, options.steps, options.quick)]
    if not options.quick:
        plans.append(training.plan_for(options.device, plans[0].steps, quick=True))
    ours = training.rowmax_attention(backend)
    with Progress(console, clock, "Training: measuring a step of each model") as progress:
        plan = training.plan_within(tuple(plans), clock, options.device, ours)

        def on_step(step: int, steps: int, curves: dict[str, training.Curve]) -> None:
            losses = ", ".join(f"{name} {c.losses[-1]:.3f}" for name, c in curves.items())
            pair = sum(sum(c.seconds[-5:]) / len(c.seconds[-5:]) for c in curves.values())
            rest = f"about {duration((steps - step) * pair)} to go"
            progress.say(f"Training: step {step} of {steps} of both models; loss {losses}; {rest}")

        found = None
        if plan is not None:
            found = training.train(
                *(plan, standard_library(), options.device, ours),
                seed=options.seed,
                on_step=on_step,
                clock=clock,
            )
            found.smaller = plan != plans[0]
    console.print(tables.of_training(found))
    return found


def run_long(
    options: Options, console: Console, clock: Clock, backend: str | None
) -> long.Long | None:
    """The third part."""
    shape = long.shape_for(options.device, options.quick)
    found = None
    with Progress(console, clock, "Long sequence: starting its process") as progress:

        def on_length(n: int) -> None:
            progress.say(
                f"Long sequence: {n:,} positions forward and backward, {shape.n:,} at the end"
            )

        if clock.left:
            found = long.run(
                *(shape, options.device, backend, options.seed, clock.left), on_length=on_length
            )
    console.print(tables.of_long(found))
    return found
