"""The checks as a table on the console."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .checks import Checks, Result


def check_table(checks: Checks, number: str = "") -> RenderableType:
    """Return a row a feature and two columns a backend, then errors and absent backends.

    ``number`` stands before the title.
    """
    table = Table(
        title=f"{number}Against the float64 definition ({checks.dtype} unless said)",
        title_justify="left",
        caption="Relative errors; every one is held to the tolerance rule.",
        caption_justify="left",
    )
    table.add_column("Feature")
    for name in checks.backends:
        table.add_column(f"{name}\nforward", justify="right")
        table.add_column("\ngradients", justify="right")
    for feature, row in checks.rows.items():
        table.add_row(feature, *(cell for name in checks.backends for cell in _cells(row[name])))
    right, total = checks.count
    lines: list[RenderableType] = [table]
    lines += [Text(note, style="red") for note in checks.errors]
    lines += [Text(f"{name}: {why}", style="dim") for name, why in checks.absent.items()]
    lines.append(Text(f"{right} of {total} right", style="green" if checks.ok else "bold red"))
    if checks.left_out:
        lines.append(Text(f"{checks.left_out} not run (time)", style="yellow"))
    return Group(*lines, "")


def _cells(result: Result) -> list[RenderableType]:
    """Return the cells of one result: forward, gradients."""
    if result.left_out:
        return [Text(text, style="yellow") for text in ("not run", "(time)")]
    style = "green" if result.ok else "bold red"
    mark = "" if result.ok else "wrong "
    return [
        Text("refused", style="dim") if x is None else Text(f"{mark}{x:.1e}", style=style)
        for x in (result.forward, result.gradients)
    ]
