"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import rowmax

app = typer.Typer(
    name="rowmax",
    help="Exact attention for PyTorch, tile by tile, with every derivative.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

DTYPES = ("float32", "float16", "bfloat16", "float64")
PATTERN = "Letters of bhqk, or 1 where it broadcasts: 1hqk."

Device = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1. By default a GPU if any.")
]
Backend = Annotated[
    str | None, typer.Option(help="Force one backend by name instead of the best that can.")
]
Seed = Annotated[int, typer.Option(help="Of every random number.")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"rowmax {rowmax.__version__}, torch {torch.__version__}", highlight=False)
        raise typer.Exit


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
    from .demo import Options, refusal_of, run

    refusal = refusal_of(report)
    if refusal is not None:
        print(f"--report: {refusal}", file=sys.stderr)
        raise typer.Exit(2)
    options = Options(_device(device), _backend(backend), steps, quick, report, seed, seconds)
    if context.obj is not None:  # when the process began: the import of torch counts, too
        options = replace(options, spent=time.monotonic() - context.obj)
    raise typer.Exit(run(options, console).code)


@app.command()
def check(device: Device = None, backend: Backend = None, seed: Seed = 0) -> None:
    """Check every feature against the float64 definition, on every backend that runs here."""
    from .demo import check_installation

    checks = check_installation(_device(device), _backend(backend), seed, console)
    raise typer.Exit(0 if checks.ok else 1)


@app.command()
def explain(
    batch: Annotated[int, typer.Option("--batch", "-b", min=0)] = 1,
    queries: Annotated[int, typer.Option("--queries", "-n", min=0, help="Nq.")] = 2048,
    keys: Annotated[int | None, typer.Option("--keys", min=0, help="Nk, if not Nq.")] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Of q.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Of k and v, if not as many.")] = None,
    d: Annotated[int, typer.Option("-d", "--head-dim", min=1, help="Of q and k.")] = 64,
    dv: Annotated[
        int | None, typer.Option("--value-dim", min=1, help="Of v, if not the same.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    device: Device = None,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[str | None, typer.Option(help="left,right; none for no limit.")] = None,
    documents: Annotated[int, typer.Option(min=0, help="That many, of equal length.")] = 0,
    lengths: Annotated[str | None, typer.Option(help="Keys of each sequence: 100,250.")] = None,
    align: Annotated[
        str, typer.Option(help="Where the last query stands: at the last of the keys or lengths.")
    ] = "keys",
    mask: Annotated[str | None, typer.Option(help="A boolean mask. " + PATTERN)] = None,
    bias: Annotated[str | None, typer.Option(help="Added to the scores. " + PATTERN)] = None,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    sink: Annotated[bool, typer.Option("--sink")] = False,
    softcap: float = 0.0,
    dropout: float = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    packed: Annotated[str | None, typer.Option(help="Lengths of packed sequences: 9,70.")] = None,
    backend: Backend = None,
) -> None:
    """Say which backend would take a call and why, its tiles, its work and its memory."""
    from .described import Described

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; want {', '.join(DTYPES)}", param_hint="--dtype")
    described = Described(
        batch=batch,
        queries=queries,
        keys=queries if keys is None else keys,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        d=d,
        dv=d if dv is None else dv,
        dtype=getattr(torch, dtype),
        device=_device(device),
        causal=causal,
        window=window,
        documents=documents,
        lengths=lengths,
        align=align,
        allowed=mask,
        bias=bias,
        alibi=alibi,
        sink=sink,
        softcap=softcap,
        dropout=dropout,
        deterministic=deterministic,
        packed=packed,
        backend=_backend(backend),
    )
    try:
        found = rowmax.explain(**described.arguments())
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    print(found)


@app.command()
def tune(
    heads: Annotated[str, typer.Option(help="Head sizes, with commas.")] = "64,128,256",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES[:3])}.")] = "bfloat16",
    device: Device = None,
) -> None:
    """Measure tile shapes on this machine's GPU and keep the fastest for later calls."""
    from .tune import run

    where = _device(device)
    if where.type != "cuda":
        raise typer.BadParameter(f"{where}; want a GPU", param_hint="--device")
    if dtype not in DTYPES[:3]:
        raise typer.BadParameter(f"{dtype!r}; want {', '.join(DTYPES[:3])}", param_hint="--dtype")
    if not all(d.isdigit() and 1 <= int(d) <= 512 for d in heads.split(",")):
        raise typer.BadParameter(f"{heads!r}; want numbers from 1 to 512", param_hint="--heads")
    sizes = tuple(int(d) for d in heads.split(","))
    try:
        found = run(console, sizes, getattr(torch, dtype), where)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="ROWMAX_CACHE") from None
    if found is None:
        raise typer.Exit(1)


def _device(name: str | None) -> torch.device:
    """The device asked for, or the best there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except NotImplementedError:  # its text is a list of all that torch knows
        reason = "this build of torch cannot make a tensor there"
        raise typer.BadParameter(f"{name!r}: {reason}", param_hint="--device") from None
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r}: {reason}", param_hint="--device") from None
    return device


def _backend(name: str | None) -> str | None:
    from ..call.dispatch import NAMES

    if name is None or name in NAMES:
        return name
    raise typer.BadParameter(f"{name!r}; want one of {', '.join(NAMES)}", param_hint="--backend")
