"""``rowmax bench``: times rowmax and its installed peers on the user's shapes, in one run."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..bench.cells import Cell
from ..bench.providers import NAMES, installed_providers
from ..bench.run import BOUNDS, COLUMNS, Run, Turns
from ..bench.worker import Pace
from .bench_errors import error_rows
from .call_spec import (
    BIAS_HELP,
    DOCUMENTS_HELP,
    WINDOW_HELP,
    Alibi,
    Batch,
    Causal,
    Dropout,
    Heads,
    HeadSize,
    KvHeads,
    Softcap,
    integers,
    shape_letters,
    window_limits,
)
from .options import Device, find_device

PASSES = ("forward", "backward", "both", "memory", "error")
#: lengths that are measured if none is named
LENGTHS = {"cuda": "512,1024,2048,4096,8192,16384", "cpu": "256,512,1024,2048"}


@dataclass(frozen=True)
class BenchSpec:
    """Shapes, features, passes and providers. The annotations are the options of the command."""

    n: Annotated[
        str | None, typer.Option("-n", "--lengths", help="Nq and Nk: 512,1024. By device.")
    ] = None
    batch: Batch = 1
    heads: Heads = 8
    kv_heads: KvHeads = None
    d: HeadSize = 64
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(BOUNDS)}. By default bfloat16, on a CPU float32."),
    ] = None
    device: Device = None
    causal: Causal = False
    window: Annotated[str | None, typer.Option(help=WINDOW_HELP + " Here right is 0.")] = None
    documents: Annotated[int, typer.Option(min=0, help=DOCUMENTS_HELP)] = 0
    bias: Annotated[str, typer.Option(help=BIAS_HELP)] = ""
    bias_gradient: Annotated[
        bool, typer.Option("--bias-gradient", help="The bias has a gradient.")
    ] = False
    alibi: Alibi = False
    softcap: Softcap = 0.0
    dropout: Dropout = 0.0
    passes: Annotated[str, typer.Option(help=f"Some of {', '.join(PASSES)}.")] = "forward,backward"
    providers: Annotated[
        str | None,
        typer.Option(help=f"Some of {', '.join(NAMES[:-1])}. By default all that are installed."),
    ] = None
    turns: Annotated[int, typer.Option(min=1, help="Turns of each provider.")] = 5
    seconds: Annotated[float, typer.Option(min=0, help="Of calls in a turn.")] = 0.1
    csv: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None
    plots: Annotated[
        Path | None,
        typer.Option(help="Draw plots into this folder; adds the passes memory and error."),
    ] = None

    @cached_property
    def place(self) -> torch.device:
        """The device to run on."""
        device = find_device(self.device)
        if device.type not in LENGTHS:
            raise ValueError(f"--device: got {str(device)!r}; want cpu or cuda")
        return device

    @cached_property
    def cells(self) -> list[Cell]:
        """A cell for each length."""
        kind = "float32" if self.place.type == "cpu" else "bfloat16"
        dtype = self.dtype or kind
        if dtype not in BOUNDS:
            raise ValueError(f"--dtype: got {dtype!r}; want {', '.join(BOUNDS)}")
        if self.batch < 1:
            raise ValueError(f"--batch: got {self.batch}; want 1 or more")
        if self.heads % (self.kv_heads or self.heads):
            want = f"a divisor of the {self.heads} query heads"
            raise ValueError(f"--kv-heads: got {self.kv_heads}; want {want}")
        lengths = integers("--lengths", self.n or LENGTHS[self.place.type])
        if min(lengths) < 1:
            raise ValueError(f"--lengths: got {self.n!r}; want integers of 1 or more")
        left = 0
        if self.window is not None:
            limits = window_limits(self.window)
            if limits[1] != 0 or not limits[0] or limits[0] < 0:
                want = "left,0 with left of 1 or more: a window that all peers can compute"
                raise ValueError(f"--window: got {self.window!r}; want {want}")
            left = limits[0]
        if self.bias_gradient and not self.bias:
            raise ValueError("--bias-gradient: got no --bias; want --bias as well")
        if self.bias:
            shape_letters("--bias", self.bias)
        options = {
            "b": self.batch, "hq": self.heads, "hk": self.kv_heads or self.heads, "d": self.d,
            "dtype": dtype, "causal": self.causal, "window": left, "documents": self.documents,
            "bias": self.bias, "dbias": self.bias_gradient, "alibi": self.alibi,
            "softcap": self.softcap, "dropout": self.dropout,
        }  # fmt: skip
        return [Cell(n=n, **options) for n in lengths]

    @cached_property
    def wanted_passes(self) -> list[str]:
        """The passes, those of plots included."""
        found = names_of("--passes", self.passes, PASSES)
        more = ["memory", "error"] if self.plots else []
        return found + [x for x in more if x not in found]

    @cached_property
    def wanted_providers(self) -> list[str]:
        """The providers by name, or those that are installed."""
        if self.providers is None:
            return list(installed_providers(self.place.type))
        return names_of("--providers", self.providers, NAMES)

    def check(self) -> None:
        """Raise a ValueError for an option that cannot be used, before anything is measured."""
        _ = self.cells, self.wanted_passes, self.wanted_providers
        if self.csv is not None and not self.csv.parent.is_dir():
            raise ValueError(f"--csv: got {str(self.csv)!r}; want a file in a folder that exists")
        if self.csv is not None and self.csv.is_dir():
            raise ValueError(f"--csv: got the folder {str(self.csv)!r}; want a file")
        if self.plots is not None:
            if find_spec("matplotlib") is None:
                install = 'pip install "rowmax[bench]"'
                raise ValueError(f"--plots: matplotlib is not installed; want {install}")
            try:
                self.plots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"--plots: {self.plots}: {error.strerror}; want a folder"
                ) from None


def names_of(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return the names in a text with commas; of ``name:more`` only the name is checked.

    Raises:
        ValueError: a name is not known, or there is none.
    """
    names = [x.strip() for x in text.split(",") if x.strip()]
    wrong = next((x for x in names if x.partition(":")[0] not in known), None)
    if wrong is not None or not names:
        raise ValueError(f"{option}: got {wrong or text!r}; want some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def run_bench(spec: BenchSpec, console: Console) -> int:
    """Measure, print, store and draw; return 1 if a result is wrong.

    Raises:
        ValueError: an option cannot be used; raised before anything is measured.
    """
    spec.check()
    if spec.place.type == "cuda":
        torch.cuda.set_device(spec.place.index or 0)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch explains each kernel that it does not choose
        file = stack.enter_context((spec.csv or Path(os.devnull)).open("w", newline=""))
        table = csv.DictWriter(file, COLUMNS, restval="")
        table.writeheader()
        pause = 0.3 if spec.place.type == "cuda" else 0.0
        run = Run(
            Pace(spec.place.type, spec.seconds),
            spec.wanted_providers,
            Turns(spec.turns, pause),
            say=say,
        )
        say(", ".join(f"{name} {x}" for name, x in run.facts.items() if x))
        say(f"providers: {', '.join(spec.wanted_providers)}")
        for row in measured(spec, run, console):
            run.rows.append(row)
            table.writerow(row)
            file.flush()
    console.print(results(run.rows, spec.wanted_passes))
    for text in run.failed:
        console.print(f"WRONG: {text}", style="bold red", highlight=False, soft_wrap=True)
    if spec.csv is not None:
        say(f"Figures: {spec.csv.resolve()}")
    if spec.plots is not None:
        from .bench_plots import draw

        for path in draw(run.rows, spec.plots):
            say(f"Plot: {path}")
    return int(bool(run.failed))


def measured(spec: BenchSpec, run: Run, console: Console) -> Iterator[dict[str, Any]]:
    """Yield every row, under a bar of progress.

    The bar is drawn between measurements: a thread that draws it would slow them.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    plan = [(cell, what) for cell in spec.cells for what in spec.wanted_passes]
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(plan))
        for cell, what in plan:
            progress.update(bar, description=f"N {cell.n} {what}", refresh=True)
            if what == "error":
                yield from error_rows(cell, run)
            else:
                yield from run.measure(cell, what)
            progress.advance(bar)
        progress.update(bar, description="measured", refresh=True)


# --- tables --------------------------------------------------------------------------------------

#: the title and the column of each pass
TITLES = {
    "forward": ("Forward", "ms"),
    "backward": ("Backward", "ms"),
    "both": ("Forward and backward", "ms"),
    "memory": ("Peak memory of forward and backward", "MiB"),
    "error": ("Largest error, as a share of what the tolerance rule allows", "share"),
}
_FIELDS = {"ms": "ms", "MiB": "peak_mib", "share": "error_share"}


def results(rows: list[dict[str, Any]], passes: list[str]) -> RenderableType:
    """Return a table for each pass, with a row for each length and provider."""
    tables = []
    for what in passes:
        of_pass = [row for row in rows if row["pass"] == what]
        if of_pass:
            tables += [_table(what, of_pass), Text("")]
    return Group(*tables)


def _table(what: str, rows: list[dict[str, Any]]) -> Table:
    title, unit = TITLES[what]
    timed, shown = unit == "ms", rows[0]["cell"].partition(" N")
    features = shown[2].partition(" ")[2]
    table = Table(title=f"{title}\n{shown[0]} {features}", title_justify="left")
    table.add_column("N", justify="right")
    table.add_column("provider")
    table.add_column(unit, justify="right")
    if timed:
        table.add_column("TFLOP/s", justify="right")
    if what != "error":
        table.add_column("rowmax against the best peer", justify="right")
    last = None
    for row in rows:
        if last is not None and row["n"] != last:
            table.add_section()
        name = row["provider"] + f" ({row.get('note')})" * bool(row.get("note"))
        figure = row[_FIELDS[unit]]
        cells: list[RenderableType] = [str(row["n"]) if row["n"] != last else "", name, figure]
        if unit == "share":
            share = float(figure)
            cells[2] = Text(f"{share:.0%}", style="green" if share <= 1 else "bold red")
        cells += [row.get("tflops", "")] if timed else []
        cells += [_against(row, timed)] if what != "error" else []
        table.add_row(*cells)
        last = row["n"]
    return table


def _against(row: dict[str, Any], timed: bool) -> Text:
    """Return rowmax's ratio to the best peer in words, green where it is better."""
    if not row.get("ratio"):
        return Text("")
    ratio = float(row["ratio"])
    word = "speed" if timed else "memory"
    shown = ratio if timed else 1 / ratio if ratio else 0.0
    text = f"{shown:.2f} x {row['peer']}'s {word}"
    return Text(text, style="green" if ratio >= 1 else "yellow")
