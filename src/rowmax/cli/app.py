"""The commands and their options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console

import rowmax

from .bench import BenchSpec, run_bench
from .call_spec import CallSpec
from .check_table import check_table
from .checks import run_checks
from .options import DTYPES, Backend, Device, Seed, check_backend, fields_as_options, find_device
from .progress import Progress
from .trace import TraceSpec, run_trace
from .warm import WarmSpec, run_warm

app = typer.Typer(
    name="rowmax",
    help="Exact attention for PyTorch, tile by tile, with every derivative.",
    epilog="Begin with: rowmax check",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

TUNED_DTYPES = DTYPES[:3]


@contextmanager
def _errors_of_options() -> Iterator[None]:
    """Turn errors of arguments into errors of options, without a traceback."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of rowmax and torch.")
    ] = False,
) -> None:
    if version:
        console.print(f"rowmax {rowmax.__version__}, torch {torch.__version__}", highlight=False)
        raise typer.Exit


@app.command(epilog="Example: rowmax check --device cpu --backend torch")
def check(device: Device = None, backend: Backend = None, seed: Seed = 0) -> None:
    """Check every feature against the float64 definition, on every backend that runs here.

    Exits with 1 if any result is wrong.
    """
    where, name = find_device(device), check_backend(backend)
    names = None if name is None else (name,)
    with Progress(console, "Checks: starting") as progress:
        checks = run_checks(where, names, seed, progress.show)
    console.print(check_table(checks))
    raise typer.Exit(0 if checks.ok else 1)


@app.command(
    epilog="Example: rowmax explain -n 8192 --heads 32 --kv-heads 8 -d 128 --causal "
    "--window 1024,0 --dtype bfloat16"
)
@fields_as_options(CallSpec)
def explain(spec: CallSpec) -> None:
    """Print the backend of a call and why it was chosen, its tiles, its work and its memory.

    Computes no attention, so any size is quick. Options are the arguments of rowmax.explain.
    """
    with _errors_of_options():
        explanation = rowmax.explain(**spec.arguments())
    print(explanation)


@app.command(
    epilog="Example: rowmax bench -n 512,1024,2048 --heads 16 --kv-heads 4 --causal "
    "--csv bench.csv --plots plots"
)
@fields_as_options(BenchSpec)
def bench(spec: BenchSpec) -> None:
    """Time rowmax and its installed peers on your shapes, in one run.

    Providers take turns and their order rotates; figures are medians of the turns. Results of
    rowmax are compared with a peer's. Exits with 1 if one is wrong.
    """
    with _errors_of_options():
        spec.check()
    raise typer.Exit(run_bench(spec, console))


@app.command(epilog="Example: rowmax warm --heads 32 --kv-heads 8 -d 128 -n 1024,1x4096 --causal")
@fields_as_options(WarmSpec)
def warm(spec: WarmSpec) -> None:
    """Compile the kernels of a model's shapes ahead: in an image, or before a server starts.

    The compiled code stays in the caches of Numba and Triton. rowmax.warmup does the same from
    Python.
    """
    with _errors_of_options():
        run_warm(spec, console)


@app.command(epilog="Example: rowmax trace -n 32 --block-q 8 --mask window --window 9,0 --open")
@fields_as_options(TraceSpec)
def trace(spec: TraceSpec) -> None:
    """Write a page that shows a small problem being computed tile by tile.

    One HTML file, without a network: the forward and both loops of the backward under five masks,
    step by step, with the numbers of a row next to the dense softmax.
    """
    with _errors_of_options():
        run_trace(spec, console)


@app.command(epilog="Example: rowmax tune --heads 64,128 --dtype bfloat16")
def tune(
    heads: Annotated[
        str, typer.Option("--head-dim", "-d", "--heads", help="Head sizes, with commas.")
    ] = "64,128,256",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(TUNED_DTYPES)}.")] = "bfloat16",
    device: Device = None,
) -> None:
    """Measure tile shapes on this machine's GPU and keep the fastest for later calls.

    They are kept in a file in the folder ROWMAX_CACHE, by default ~/.cache/rowmax, and only the
    Triton backend reads it.
    """
    from .tune import tune_tiles

    gpu = find_device(device)
    if gpu.type != "cuda":
        raise typer.BadParameter(f"{gpu}; want a GPU", param_hint="--device")
    if dtype not in TUNED_DTYPES:
        want = ", ".join(TUNED_DTYPES)
        raise typer.BadParameter(f"{dtype!r}; want {want}", param_hint="--dtype")
    if not all(d.isdigit() and 1 <= int(d) <= 576 for d in heads.split(",")):
        raise typer.BadParameter(f"{heads!r}; want numbers from 1 to 576", param_hint="--heads")
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
