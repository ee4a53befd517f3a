"""The tables that the demo prints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .format import count, duration, size, times
from .long_sequence import LongSequence
from .report import DemoReport
from .speed import Speed
from .training import Training


def speed_table(speed: Speed | None) -> RenderableType:
    """Return times and memory next to SDPA's."""
    if speed is None or not speed.measurements:
        return Text("4. The speed was not measured (time)\n", style="yellow")
    part = "" if speed.complete else f", {len(speed.measurements)} of {speed.planned} (time)"
    table = Table(
        title=f"4. Next to SDPA: H {speed.heads}, D {speed.d}, {speed.dtype} unless said{part}",
        title_justify="left",
    )
    for name in ("problem", "pass"):
        table.add_column(name)
    for name in ("N", "rowmax", "SDPA", "SDPA / rowmax"):
        table.add_column(name, justify="right")
    for m in speed.measurements:
        unit, ratio = "MiB" if m.what == "memory" else "ms", m.ratio
        shown = Text("" if ratio is None else times(ratio))
        shown.stylize("green" if ratio is not None and ratio >= 1 else "yellow")
        what = "forward and backward" if m.what == "both" else m.what
        theirs = "" if m.sdpa is None else f"{m.sdpa:.3g} {unit}"
        table.add_row(m.name, what, f"{m.n:,}", f"{m.rowmax:.3g} {unit}", theirs, shown)
    return Group(table, "")


def training_table(training: Training | None) -> RenderableType:
    """Return both runs side by side, and their agreement."""
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
        losses = (curve.losses[0], curve.smooth[-1], curve.held_out)
        table.add_row(name, *(f"{x:.3f}" for x in losses), f"{speeds[name]:,.0f}")
    text = "They agree" if training.ok else "They do not agree"
    parts = (f"{k} {a:.1e} (allowed {b:.0e})" for k, (a, b) in training.agreement.items())
    agreement = f"{text}. Relative differences: {', '.join(parts)}."
    style = "green" if training.ok else "bold red"
    return Group(table, Text(agreement, style=style), "")


def long_sequence_table(long: LongSequence | None) -> RenderableType:
    """Return times and memory next to the size of the score matrix."""
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
    table.add_row("a score matrix would have", size(shape.matrix_bytes))
    text = "agree with" if long.ok else "differ from"
    worst = max(long.errors.values())
    checked = f"Rows and keys taken from it {text} the float64 definition: {worst:.1e}"
    return Group(table, Text(checked, style="green" if long.ok else "bold red"), "")


def verdict(report: DemoReport) -> RenderableType:
    """Return a line for each thing left out, and the verdict."""
    style = {0: "bold green", 1: "bold red"}.get(report.exit_code, "bold yellow")
    lines = [Text(f"Time: {text}", style="yellow") for text in report.left_out]
    return Group(*lines, Text(report.verdict, style=style))
