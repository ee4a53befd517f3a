"""``rowmax warm``: compiles the kernels of a model's shapes ahead."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import rowmax

from ..masks import Mask
from ..warmup import Step, Warmup
from .call_spec import (
    BIAS_HELP,
    WINDOW_HELP,
    Alibi,
    Batch,
    Causal,
    Deterministic,
    Dropout,
    Heads,
    HeadSize,
    KvHeads,
    Sink,
    Softcap,
    window_limits,
)
from .options import DTYPES, Backend, Device, check_backend, find_device


@dataclass(frozen=True)
class WarmSpec:
    """Shapes and features of a model's calls. The annotations are the options of the command."""

    heads: Heads = 8
    kv_heads: KvHeads = None
    d: HeadSize = 64
    dv: Annotated[int | None, typer.Option("--value-dim", min=1, help="Of v, if not d.")] = None
    batch: Batch = 1
    n: Annotated[
        str, typer.Option("-n", "--lengths", help="N, or Nq x Nk as in 1x4096, with commas.")
    ] = "1024"
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Some of {', '.join(DTYPES)}. By default bfloat16, on a CPU float32."),
    ] = None
    device: Device = None
    gradient: Annotated[
        bool, typer.Option("--gradient/--no-gradient", help="Also compile the backward.")
    ] = True
    causal: Causal = False
    window: Annotated[str | None, typer.Option(help=WINDOW_HELP)] = None
    bias: Annotated[str | None, typer.Option(help=BIAS_HELP)] = None
    alibi: Alibi = False
    sink: Sink = False
    softcap: Softcap = 0.0
    dropout: Dropout = 0.0
    deterministic: Deterministic = False
    backend: Backend = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``rowmax.warmup``.

        Raises:
            typer.BadParameter, ValueError: an option cannot be read; the message names it.
        """
        dtypes = None if self.dtype is None else [x.strip() for x in self.dtype.split(",")]
        wrong = next((x for x in dtypes or () if x not in DTYPES), None)
        if wrong is not None:
            raise ValueError(f"--dtype: got {wrong!r}; want some of {', '.join(DTYPES)}")
        mask = Mask() if self.window is None else rowmax.Window(*window_limits(self.window))
        return {
            "heads": self.heads,
            "head_dim": self.d,
            "kv_heads": self.kv_heads,
            "value_dim": self.dv,
            "batch": self.batch,
            "lengths": lengths_of(self.n),
            "dtype": None if dtypes is None else [getattr(torch, x) for x in dtypes],
            "device": find_device(self.device),
            "gradient": self.gradient,
            "causal": self.causal,
            "mask": mask,
            "bias": self.bias,
            "alibi": self.alibi,
            "sink": self.sink,
            "softcap": self.softcap,
            "dropout_p": self.dropout,
            "deterministic": self.deterministic,
            "backend": check_backend(self.backend),
        }


def lengths_of(text: str) -> list[tuple[int, int]]:
    """Return (Nq, Nk) of each part of a text such as "1024,1x4096".

    Raises:
        ValueError: a part is no length.
    """
    found = []
    for part in text.split(","):
        nq, _, nk = part.strip().partition("x")
        if not nq.isdigit() or not (nk or nq).isdigit() or 0 in (int(nq), int(nk or nq)):
            raise ValueError(f"--lengths: got {text!r}; want integers, such as 1024 or 1x4096")
        found.append((int(nq), int(nk or nq)))
    return found


def run_warm(spec: WarmSpec, console: Console) -> None:
    """Compile under a bar of progress, then print what was compiled.

    Raises:
        TypeError, ValueError: an option cannot be used.
    """
    arguments = spec.arguments()
    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    logger = logging.getLogger("rowmax")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the bar says that kernels compile
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("compiling", total=None)

            def on_step(done: int, total: int, step: Step) -> None:
                progress.update(bar, completed=done, total=total)

            done = rowmax.warmup(**arguments, on_step=on_step)
    finally:
        logger.setLevel(level)
    console.print(warm_table(done, arguments["lengths"]))


def warm_table(done: Warmup, asked: list[tuple[int, int]]) -> Table:
    """Return a row for each step. On a CPU the kernels of a step serve any length."""
    table = Table(
        title=f"Ready in {done.seconds:.1f} s",
        title_justify="left",
        caption="Seconds near 0: the kernels were in a cache.",
        caption_justify="left",
    )
    for name in ("call", "dtype", "Nq x Nk", "backend"):
        table.add_column(name)
    table.add_column("seconds", justify="right")
    for step in done.steps:
        table.add_row(
            step.call,
            str(step.dtype).removeprefix("torch."),
            f"{step.queries} x {step.keys}" if (step.queries, step.keys) in asked else "any",
            ", ".join(step.backends),
            f"{step.seconds:.2f}",
        )
    return table
