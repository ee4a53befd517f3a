"""What the demo prints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .checks import Checks, Result
from .findings import Findings
from .long import Long
from .training import Training
from .words import count, duration, printable, size


def of_checks(checks: Checks) -> RenderableType:
    """A row a feature, two columns a backend, then what is wrong and what is not here."""
    table = Table(
        title=f"1. Against the float64 definition ({checks.dtype} unless said)",
        title_justify="left",
        caption="Relative errors; every one is held to the tolerance rule.",
        caption_justify="left",
    )
    table.add_column("Feature")
    for name in checks.backends:
        table.add_column(f"{name}\nforward", justify="right")
        table.add_column("\ngradients", justify="right")
    notes = []
    for feature, row in checks.rows.items():
        cells: list[RenderableType] = []
        for name in checks.backends:
            cells += _cells(row[name])
            notes += [f"{feature}, {name}: {text}" for text in row[name].wrong]
        table.add_row(feature, *cells)
    right, all_of_them = checks.count
    style = "green" if checks.ok else "bold red"
    lines: list[RenderableType] = [table]
    lines += [Text(note, style="red") for note in notes]
    lines += [Text(f"{name}: {why}", style="dim") for name, why in checks.absent.items()]
    lines.append(Text(f"{right} of {all_of_them} right", style=style))
    if checks.left_out:
        lines.append(Text(f"{checks.left_out} not run (time)", style="yellow"))
    return Group(*lines, "")


def _cells(result: Result) -> list[RenderableType]:
    if result.left_out:
        return [Text(words, style="yellow") for words in ("not run", "(time)")]
    style = "green" if result.ok else "bold red"
    mark = "" if result.ok else "wrong "
    return [
        Text("refused", style="dim") if x is None else Text(f"{mark}{x:.1e}", style=style)
        for x in (result.forward, result.gradients)
    ]


def of_training(training: Training | None) -> RenderableType:
    """Both runs side by side, whether they agree, and what the model writes."""
    if training is None:
        return Text("2. The training was not run (time)\n", style="yellow")
    plan = training.plan
    steps = f"{training.steps} steps"
    if not training.complete:
        steps = f"{training.steps} of {training.asked} steps (time)"
    table = Table(
        title=f"2. A GPT of {count(training.parameters)} parameters, {steps} of "
        f"{plan.rows} x {plan.size.context} bytes of Python's standard library",
        title_justify="left",
    )
    table.add_column("Attention")
    for name in ("first loss", "last loss", "held-out loss", "tokens a second"):
        table.add_column(name, justify="right")
    speeds = training.tokens_per_second
    for name, curve in training.curves.items():
        numbers = (curve.losses[0], curve.smooth[-1], curve.held_out)
        table.add_row(name, *(f"{x:.3f}" for x in numbers), f"{speeds[name]:,.0f}")
    words = "They agree" if training.ok else "They do not agree"
    parts = (f"{k} {a:.1e} (allowed {b:.0e})" for k, (a, b) in training.agreement.items())
    agreement = f"{words}. Relative differences: {', '.join(parts)}."
    style = "green" if training.ok else "bold red"
    sample = Panel(escape(printable(training.sample)), title="It writes", title_align="left")
    return Group(table, Text(agreement, style=style), sample, "")


def of_long(long: Long | None) -> RenderableType:
    """Time and memory beside the matrix that is never held."""
    if long is None:
        return Text("3. The long sequence was not run (time)\n", style="yellow")
    shape = long.shape
    positions = f"{shape.n:,} positions"
    if not long.complete:
        positions = f"{shape.n:,} of {long.asked:,} positions (time)"
    table = Table(
        title=f"3. {positions}, causal, H {shape.heads}, D {shape.d}, {shape.dtype}",
        title_justify="left",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("forward", duration(long.forward))
    table.add_row("backward", duration(long.backward))
    table.add_row("peak memory beyond the inputs", size(long.memory))
    table.add_row("  of which out, lse, dq, dk and dv", size(long.results))
    table.add_row("the score matrix would take", size(shape.matrix_bytes))
    worst = max(long.errors.values())
    words = "agree with" if long.ok else "differ from"
    checked = f"Rows and keys taken from it {words} the float64 definition: {worst:.1e}"
    return Group(table, Text(checked, style="green" if long.ok else "bold red"), "")


def verdict(findings: Findings) -> RenderableType:
    """List what was left out, and give the verdict."""
    style = {0: "bold green", 1: "bold red"}.get(findings.code, "bold yellow")
    lines = [Text(f"Time: {text}", style="yellow") for text in findings.left_out]
    return Group(*lines, Text(findings.verdict, style=style))
