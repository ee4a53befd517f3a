"""The speed and the memory of rowmax next to SDPA's, by length and by feature.

A process of its own measures (``python -m demo.speed``) with the code of ``rowmax bench``, and can
be stopped at any time. Forward and backward together come first.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from rowmax.bench.cells import Cell
from rowmax.bench.run import Run, Turns
from rowmax.bench.worker import Pace

from .child import Child, read_arguments, report

PEER = "sdpa"
TURNS, SECONDS = 3, 0.06  # SECONDS are those of a turn


class Measurement(NamedTuple):
    """One pass of one problem, with rowmax and with SDPA."""

    group: str  # "length" or "feature"
    name: str  # such as "every key"
    what: str  # "forward", "both" or "memory"
    n: int
    dtype: str
    rowmax: float  # milliseconds, of memory MiB
    sdpa: float | None  # None where SDPA does not compute it

    @property
    def ratio(self) -> float | None:
        """Return SDPA's time or memory over rowmax's: more than 1 is better."""
        return self.sdpa / self.rowmax if self.sdpa and self.rowmax else None


@dataclass(frozen=True)
class Speed:
    """The measurements that fit into the time."""

    heads: int
    d: int
    dtype: str
    measurements: tuple[Measurement, ...]
    planned: int

    @property
    def complete(self) -> bool:
        return len(self.measurements) >= self.planned

    def of(self, group: str, what: str) -> list[Measurement]:
        """Return the measurements of one chart."""
        return [m for m in self.measurements if (m.group, m.what) == (group, what)]

    @property
    def longest(self) -> Measurement | None:
        """The longest sequence, forward and backward."""
        return max(self.of("length", "both"), key=lambda m: m.n, default=None)

    @property
    def largest(self) -> Measurement | None:
        """The memory of the longest sequence."""
        return max(self.of("length", "memory"), key=lambda m: m.n, default=None)

    @property
    def ratios(self) -> list[float]:
        """SDPA's times over rowmax's."""
        return [m.ratio for m in self.measurements if m.what != "memory" and m.ratio]

    @property
    def mean(self) -> float:
        """The geometric mean of all ratios of times."""
        return statistics.geometric_mean(self.ratios) if self.ratios else math.nan


class Part(NamedTuple):
    """A problem to measure."""

    group: str
    name: str
    what: str
    cell: Cell


def usual_cell(device: str) -> Cell:
    """Return the causal problem that lengths and features vary."""
    if device == "cpu":
        return Cell(1024, 64, 1, 4, dtype="float32", causal=True)
    return Cell(4096, 64, 4, 16, dtype="bfloat16", causal=True)


def plan_for(device: str, quick: bool) -> list[Part]:
    """Return the problems in the order of the work."""
    lengths = (256, 512, 1024) if quick else (256, 512, 1024, 2048, 4096)
    if device != "cpu":
        lengths = (512, 1024, 2048) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    usual = usual_cell(device)
    n = min(usual.n, 512) if quick else usual.n
    causal = replace(usual, n=n)
    full = replace(causal, causal=False)
    by_length = [replace(usual, n=m) for m in lengths]
    other = "bfloat16" if usual.dtype == "float32" else "float16"
    features = {
        "every key": full,
        "window of 128 keys": replace(full, window=128),
        "8 documents, causal": replace(causal, documents=8),
        "bias with its gradient": replace(full, bias="1hqk", dbias=True),
        "ALiBi, causal": replace(causal, alibi=True),
        "grouped heads, 4 to 1, causal": replace(causal, hk=usual.hq // 4),
        f"{other}, causal": replace(causal, dtype=other),
    }
    passes = ("both", "forward")
    found = [Part("length", "causal", what, cell) for what in passes for cell in by_length]
    found += [Part("feature", f, what, cell) for what in passes for f, cell in features.items()]
    long = by_length[-1:] if quick else by_length[-3:]
    memory = [Part("length", "causal", "memory", cell) for cell in long]
    return sorted([*found, *memory], key=lambda part: part.what == "forward")


def run(
    device: torch.device,
    backend: str | None,
    quick: bool,
    seconds: float | None,
    on_measurement: Callable[[int, int], None] = lambda done, planned: None,
) -> Speed:
    """Measure in a child process as much as fits.

    Raises:
        RuntimeError: the child failed; with its text on stderr.
    """
    plan = plan_for(device.type, quick)
    lines: list[list] = []

    def on_line(line: list) -> None:
        lines.append(line)
        on_measurement(len(lines), len(plan))

    with Child("demo.speed", str(device), backend, quick, SECONDS, on_line=on_line) as child:
        error = child.error() if child.wait(seconds) else None
    if error is not None:
        raise RuntimeError(f"the measurement of speed failed:\n{error}")
    cell = usual_cell(device.type)
    found = tuple(Measurement(*line) for line in child.lines)
    return Speed(cell.hq, cell.d, cell.dtype, found, len(plan))


def as_json(speed: Speed) -> dict:
    """Return the same numbers for a file."""
    found = [m._asdict() | {"ratio": m.ratio} for m in speed.measurements]
    return asdict(speed) | {"measurements": found}


def main() -> None:
    """Measure in this process, and send each measurement."""
    name, backend, quick, seconds = read_arguments()
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    warnings.simplefilter("ignore")  # torch explains each kernel that it does not choose
    ours = "rowmax" if backend is None else f"rowmax:{backend}"
    run = Run(
        Pace(device.type, seconds), (ours, PEER), Turns(TURNS), check=False, say=lambda text: None
    )
    for group, feature, what, cell in plan_for(device.type, quick):
        column = "peak_mib" if what == "memory" else "ms"
        found = {row["provider"]: float(row[column]) for row in run.measure(cell, what)}
        if ours in found:
            values = (found[ours], found.get(PEER))
            report(Measurement(group, feature, what, cell.n, cell.dtype, *values))


if __name__ == "__main__":
    main()
