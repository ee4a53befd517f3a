"""Draw the plots of ``rowmax bench`` from a committed run: ``python docs/pictures/bench.py``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from rowmax.cli.bench_plots import draw

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "benchmarks" / "results" / "bench.csv"


def rows() -> list[dict[str, Any]]:
    """Return the rows of the run, without the columns that a pass leaves empty."""
    with RUN.open(newline="") as file:
        found = [{name: x for name, x in row.items() if x} for row in csv.DictReader(file)]
    return [row | {"n": int(row["n"])} for row in found]


if __name__ == "__main__":
    for path in draw(rows(), HERE):
        path.replace(HERE / f"bench-{path.name}")
