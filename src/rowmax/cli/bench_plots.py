"""Plots of ``rowmax bench``: speed, memory and error against N. Needs the extra "bench"."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

#: TFLOP/s of dense products in half precision by the vendors' data sheets, by the device's name
CEILINGS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989,
    "NVIDIA A100": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
}


class Plot(NamedTuple):
    """One plot: its file, its title, the column that it shows, and the name of its axis."""

    file: str
    title: str
    column: str
    axis: str


PLOTS = {
    "forward": Plot("forward.png", "Forward", "tflops", "TFLOP/s"),
    "backward": Plot("backward.png", "Backward", "tflops", "TFLOP/s"),
    "both": Plot("both.png", "Forward and backward", "tflops", "TFLOP/s"),
    "memory": Plot("memory.png", "Peak memory, forward and backward", "peak_mib", "MiB"),
    "error": Plot("error.png", "Largest error, share of what is allowed", "error_share", "share"),
}


def ceiling(row: dict[str, Any]) -> float | None:
    """Return the TFLOP/s of a device's tensor cores, None where they are not known."""
    if row["dtype"] not in ("bfloat16", "float16"):
        return None
    device = row["device"]
    exact = CEILINGS.get(device)
    return exact or next((x for name, x in CEILINGS.items() if device.startswith(name + "-")), None)


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a file for each pass that was measured; return the files."""
    paths = []
    for what, plot in PLOTS.items():
        of_pass = [x for x in rows if x["pass"] == what and float(x.get(plot.column) or 0)]
        if of_pass:
            paths.append(folder / plot.file)
            _figure(of_pass, plot).savefig(paths[-1], dpi=150)
    return paths


def _figure(rows: list[dict[str, Any]], plot: Plot) -> Any:
    """Return the figure of one pass: a line for each provider."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["provider"] for row in rows):
        points = [(row["n"], float(row[plot.column])) for row in rows if row["provider"] == name]
        ours = name.startswith("rowmax")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            linewidth=2.5 if ours else 1.5,
            color="#c2410c" if name == "rowmax" else None,
            label=name,
            zorder=3 if ours else 2,
        )
    lengths = sorted({row["n"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("N")
    axes.set_ylabel(plot.axis)
    top = ceiling(rows[0]) if plot.column == "tflops" else None
    if top is not None:
        label = f"products of tensor cores by the data sheet: {top:g}"
        axes.axhline(top, color="#666666", linestyle="--", label=label)
    if plot.column == "error_share":
        axes.axhline(1.0, color="#b3261e", linestyle="--", label="allowed")
    if plot.column == "peak_mib":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set_title(f"{plot.title}: {_shape(rows[0])}", fontsize=11)
    figure.supxlabel(_facts(rows[0]), fontsize=7, color="#666666")
    return figure


def _shape(row: dict[str, Any]) -> str:
    """Return the sizes and features that all lengths share."""
    before, _, after = row["cell"].partition(" N")
    return f"{before} {after.partition(' ')[2]}"


def _facts(row: dict[str, Any]) -> str:
    """Return the device, the versions and the date."""
    versions = (f"{name} {row[name]}" for name in ("torch", "triton", "numba") if row.get(name))
    return ", ".join((row["device"], *versions, row["date"]))
