"""The commands and their options."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer
from rich.console import Console

import rowmax

from .call_spec import CallSpec
from .check_table import check_table
from .checks import run_checks
from .options import DTYPES, Backend, Device, Seed, check_backend, fields_as_options, find_device
from .progress import Progress

app = typer.Typer(
    name="rowmax",
    help="Exact attention for PyTorch, tile by tile, with every derivative.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

TUNED_DTYPES = DTYPES[:3]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"rowmax {rowmax.__version__}, torch {torch.__version__}", highlight=False)
        raise typer.Exit


@app.command()
def check(device: Device = None, backend: Backend = None, seed: Seed = 0) -> None:
    """Check every feature against the float64 definition, on every backend that runs here."""
    where, name = find_device(device), check_backend(backend)
    names = None if name is None else (name,)
    with Progress(console, "Checks: starting") as progress:
        checks = run_checks(where, names, seed, progress.show)
    console.print(check_table(checks))
    raise typer.Exit(0 if checks.ok else 1)


@app.command()
@fields_as_options(CallSpec)
def explain(spec: CallSpec) -> None:
    """Print the backend of a call and why it was chosen, its tiles, its work and its memory."""
    try:
        explanation = rowmax.explain(**spec.arguments())
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    print(explanation)


@app.command()
def tune(
    heads: Annotated[str, typer.Option(help="Head sizes, with commas.")] = "64,128,256",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(TUNED_DTYPES)}.")] = "bfloat16",
    device: Device = None,
) -> None:
    """Measure tile shapes on this machine's GPU and keep the fastest for later calls."""
    from .tune import tune_tiles

    gpu = find_device(device)
    if gpu.type != "cuda":
        raise typer.BadParameter(f"{gpu}; want a GPU", param_hint="--device")
    if dtype not in TUNED_DTYPES:
        want = ", ".join(TUNED_DTYPES)
        raise typer.BadParameter(f"{dtype!r}; want {want}", param_hint="--dtype")
    if not all(d.isdigit() and 1 <= int(d) <= 512 for d in heads.split(",")):
        raise typer.BadParameter(f"{heads!r}; want numbers from 1 to 512", param_hint="--heads")
    sizes = tuple(int(d) for d in heads.split(","))
    try:
        path = tune_tiles(console, sizes, getattr(torch, dtype), gpu)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="ROWMAX_CACHE") from None
    if path is None:
        raise typer.Exit(1)


@app.command(
    hidden=True,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def demo() -> None:
    """Exit with code 2: the package does not hold the demo."""
    message = "rowmax: the demo is in the repository, not in the package: run make demo there"
    print(message, file=sys.stderr)
    raise typer.Exit(2)
