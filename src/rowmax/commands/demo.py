"""The demo: the installation checked, a model trained, a long sequence run, a report written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import checks, long, report, tables, training
from .findings import Findings, Machine
from .gpt import standard_library


@dataclass(frozen=True)
class Options:
    device: torch.device
    backend: str | None = None
    steps: int | None = None
    quick: bool = False
    report: Path = Path("report.html")
    seed: int = 0


def run(options: Options, console: Console) -> bool:
    """Run everything; whether all of it held."""
    start = time.perf_counter()
    machine = Machine.here(options.device)
    console.print(str(machine), highlight=False)
    checked = check_installation(options.device, options.backend, options.seed, console)
    trained = train(options, console)
    stretched = run_long(options, console)
    findings = Findings(machine, checked, trained, stretched, time.perf_counter() - start)
    options.report.write_text(report.page(findings), encoding="utf-8")
    console.print(tables.verdict(findings))
    console.print(f"Report: {options.report.resolve()}", soft_wrap=True, highlight=False)
    return findings.ok


def check_installation(
    device: torch.device, backend: str | None, seed: int, console: Console
) -> checks.Checks:
    """The first part, and the whole of ``rowmax check``."""
    names = None if backend is None else (backend,)
    with console.status("Checking the installation", spinner="line") as status:
        found = checks.run(device, names, seed, lambda name: status.update(f"Checking: {name}"))
    console.print(tables.of_checks(found))
    return found


def train(options: Options, console: Console) -> training.Training:
    """The second part: one model twice."""
    plan = training.plan_for(options.device, options.steps, options.quick)
    corpus = standard_library()
    columns = (
        TextColumn("Training both"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=plan.steps)

        def on_step(step: int, curves: dict[str, training.Curve]) -> None:
            losses = "  ".join(f"{name} {c.smooth[-1]:.3f}" for name, c in curves.items())
            progress.update(task, completed=step + 1, description=f"loss {losses}")

        ours = training.rowmax_attention(options.backend)
        found = training.train(
            plan, corpus, options.device, ours, seed=options.seed, on_step=on_step
        )
    console.print(tables.of_training(found))
    return found


def run_long(options: Options, console: Console) -> long.Long:
    """The third part."""
    shape = long.shape_for(options.device, options.quick)
    with console.status(f"A sequence of {shape.n:,}, forward and backward", spinner="line"):
        found = long.run(shape, options.device, options.backend, options.seed)
    console.print(tables.of_long(found))
    return found
