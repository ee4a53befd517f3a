"""Write clocks of the Hopper forward's first block as CSV, and print the parts of a step.

    python -m benchmarks.clocks "d=64 n=16384" --csv clocks.csv
    python -m benchmarks.clocks "d=128 n=16384" --changes shipped v_stages=3,q_stages=1

The kernel stores clocks only here (CLOCKS). Stores take time and registers: compare ``ms`` with the
shipped kernel's. Clocks are those of one processor, from its first event on.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

from rowmax.bench.cells import Cell, Inputs, cells, inputs_of

from .variants import hopper_clocks

#: by number: the events of a warpgroup and of the producer
EVENTS = ("begin", "products issued", "scores done", "softmax done", "output done")
COPIES = ("begin", "K issued", "V issued")
#: all but "output done": with it the kernel of three warpgroups spills
USUAL = 0b01111
COLUMNS = ("cell", "change", "part", "use", "event", "clock")
_WRAP = 2**32


def rows(cell: Cell, change: str, found: list[Any]) -> list[dict[str, Any]]:
    """Return a row for each event that was stored, in the clocks since the first."""
    stored = [
        (part, use, event, clock % _WRAP)
        for part, uses in enumerate(found)
        for use, clocks in enumerate(uses[:-1])
        for event, clock in enumerate(clocks)
        if clock
    ]
    start = found[0][-1][0] % _WRAP
    names = [EVENTS] * (len(found) - 1) + [COPIES]
    found_rows = (
        (cell.name, change, part, use, names[part][event], (clock - start) % _WRAP)
        for part, use, event, clock in stored
    )
    return [dict(zip(COLUMNS, row, strict=True)) for row in found_rows]


def parts(found: list[dict[str, Any]], part: int) -> dict[str, float]:
    """Return the median clocks of a step of a warpgroup, and of its parts."""
    steps: dict[int, dict[str, int]] = {}
    for row in found:
        if row["part"] == part:
            steps.setdefault(row["use"], {})[row["event"]] = row["clock"]
    spans: dict[str, list[int]] = {}
    for use, at in steps.items():
        after = steps.get(use + 1, {}).get("begin")
        if "begin" not in at or after is None:
            continue
        spans.setdefault("step", []).append(after - at["begin"])
        known = [name for name in EVENTS if name in at]
        for name, before in zip(known[1:], known, strict=False):
            spans.setdefault(name, []).append(at[name] - at[before])
    return {name: statistics.median(x) for name, x in spans.items()}


def measure(cell: Cell, x: Inputs, change: str, events: int) -> list[dict[str, Any]]:
    """Print the parts of a step, and return the rows of a change."""
    found, ms = hopper_clocks(cell, x, change, events)
    first = found[0][-1]
    rate = ((first[2] - first[0]) % _WRAP) / ((first[3] - first[1]) % _WRAP or 1)
    print(f"{cell.name} {change}: {ms:.3f} ms, {rate:.3f} GHz", flush=True)
    every = rows(cell, change, found)
    for part in range(len(found) - 1):
        text = ", ".join(f"{name} {clocks:.0f}" for name, clocks in parts(every, part).items())
        print(f"  warpgroup {part}: {text}", flush=True)
    return every


def main() -> None:
    """Measure each change of a cell."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.clocks",
        None,
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cell", help='one cell as text, like "d=64 n=16384"')
    parser.add_argument("--changes", nargs="+", default=["shipped"], help="as of variants.py")
    parser.add_argument("--events", type=int, default=USUAL, help="a bit for each event")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    (cell,) = cells(options.cell)
    x = inputs_of(cell, "cuda")
    found = [row for one in options.changes for row in measure(cell, x, one, options.events)]
    if options.csv:
        with options.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(found)


if __name__ == "__main__":
    main()
