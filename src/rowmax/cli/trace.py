"""``rowmax trace``: writes a page that shows a small problem being computed tile by tile."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..trace import MASKS, Setting, page
from .call_spec import WINDOW_HELP, Softcap, window_limits
from .options import Seed


@dataclass(frozen=True)
class TraceSpec:
    """A problem and a file. The annotations are the options of the command."""

    queries: Annotated[int, typer.Option("--queries", "-n", help="Nq, 1 to 64.")] = 24
    keys: Annotated[int | None, typer.Option("--keys", help="Nk, if not Nq.")] = None
    head_dim: Annotated[int, typer.Option("--head-dim", "-d", help="Of q, k and v, 1 to 16.")] = 4
    block_q: Annotated[int, typer.Option("--block-q", help="Queries of a tile.")] = 4
    block_k: Annotated[int, typer.Option("--block-k", help="Keys of a tile.")] = 4
    mask: Annotated[
        str, typer.Option(help=f"The page begins with it: {', '.join(MASKS)}. It holds all.")
    ] = "causal"
    window: Annotated[
        str | None, typer.Option(help=WINDOW_HELP + " By default a third of the keys, 0.")
    ] = None
    documents: Annotated[int, typer.Option(help="That many, of equal length.")] = 5
    prefix: Annotated[
        int | None, typer.Option(help="Keys that all queries see. By default a third.")
    ] = None
    softcap: Softcap = 0.0
    seed: Seed = 0
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "trace.html"
    )
    open: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False

    def setting(self) -> Setting:
        """Return the problem.

        Raises:
            ValueError: an option cannot be used; the message names it.
        """
        names = {field.name for field in fields(Setting)} - {"window"}
        given = {name: getattr(self, name) for name in names}
        return Setting(**given, window=None if self.window is None else window_limits(self.window))


def run_trace(spec: TraceSpec, console: Console) -> None:
    """Write the page and print its name and size.

    Raises:
        ValueError: an option cannot be used.
        typer.BadParameter: the file cannot be written.
    """
    text = page(spec.setting(), spec.mask)
    try:
        spec.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from None
    kilobytes = len(text.encode()) / 1000
    console.print(f"{spec.output}: {kilobytes:.0f} kB, opens in any browser", highlight=False)
    if spec.open and not webbrowser.open(spec.output.resolve().as_uri()):
        console.print("No browser was found: open the file in one", highlight=False)
