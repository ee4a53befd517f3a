"""The options of the demo."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rowmax.cli.options import Backend, Device, Seed, check_backend, find_device

from .run import Options, report_error, run_demo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.command()
def demo(
    context: typer.Context,
    device: Device = None,
    backend: Backend = None,
    steps: Annotated[
        int | None,
        typer.Option(min=25, help="Training steps, if they fit. By default 300 on a CPU."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="All small, under a minute.")] = False,
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("report.html"),
    seed: Seed = 0,
    seconds: Annotated[
        float | None,
        typer.Option(min=10, help="Time for all of it. By default 160, or 50 with --quick."),
    ] = None,
) -> None:
    """Check the installation, train a small GPT, run a long sequence; write a report.

    The demo ends in time on any machine and says what it left out. Exit code 0: everything that
    was run holds; 1: something does not; 3: too little was run to say.
    """
    error = report_error(report)
    if error is not None:
        print(f"--report: {error}", file=sys.stderr)
        raise typer.Exit(2)
    # the import of torch counts: ``context.obj`` is the time at which the process began
    spent = 0.0 if context.obj is None else time.monotonic() - context.obj
    options = Options(
        find_device(device), check_backend(backend), steps, quick, report, seed, seconds, spent
    )
    raise typer.Exit(run_demo(options, console).exit_code)
