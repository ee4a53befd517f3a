"""Time the kernels of a forward whose keys are split, by number of parts.

    python -m benchmarks.key_parts "d=128 hq=8 hk=1 b=1 nq=256|512 n=8192|65536 causal=1"
    python -m benchmarks.key_parts "d=576 dv=512 hq=128 hk=1 b=1 nq=1 n=8192" --parts 16 32 64

Times are those of the kernels on the device, without the host, by PyTorch's profiler. Of
Hopper's forward each number of parts is measured, of Triton's kernel of few queries its own.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

from rowmax.bench.cells import Cell, Inputs, cells, inputs_of
from rowmax.bench.timing import Call, facts

from .variants import KERNELS, posed

PARTS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (
    *("cell", "backend", "parts", "chosen", "us", "merge_us"),
    *("device", "torch", "triton", "date"),
)


def kernel_times(call: Call, calls: int) -> dict[str, float]:
    """Return each kernel's us in a call, the mean of some calls."""
    call()
    call()
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events() or []:
        if event.device_time > 0:
            times.setdefault(event.name, []).append(event.device_time)
    return {name: sum(x) / calls for name, x in times.items()}


def contestants(cell: Cell, x: Inputs, numbers: list[int]) -> list[tuple[str, str, int, int]]:
    """Return (backend, change, parts, 1 if the backend chooses them) of a cell."""
    from rowmax.gpu import parts
    from rowmax.gpu.hopper import forward_parts, host

    _, problem, _ = posed(cell, x)
    most = host.processors(x.q.device)
    chosen = forward_parts.parts_of(problem, most)
    possible = forward_parts.parts_to_choose(problem, most)
    found = [
        ("hopper", f"PARTS={n}", n, int(n == chosen))
        for n in sorted({*numbers, chosen})
        if n in possible
    ]
    if parts.splits(problem):
        found.append(("triton", "shipped", parts.parts_of(problem), 1))
    return found


def rows(cell: Cell, numbers: list[int], calls: int) -> list[dict[str, Any]]:
    """Print and return the rows of a cell."""
    x, found = inputs_of(cell, "cuda"), []
    for backend, change, parts, chosen in contestants(cell, x, numbers):
        make, _ = KERNELS["hopper.forward" if backend == "hopper" else "triton.few"]
        times = kernel_times(make(cell, x, change), calls)
        merge = sum(us for name, us in times.items() if name.startswith("merge"))
        total = sum(times.values())
        print(f"{cell.name} {backend} {parts}: {total:.1f} us, to merge {merge:.1f}", flush=True)
        values = (cell.name, backend, parts, chosen, f"{total:.1f}", f"{merge:.1f}")
        found.append(dict(zip(COLUMNS, values, strict=False)) | facts("cuda"))
    return found


def main() -> None:
    """Measure each number of parts of each cell."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.key_parts",
        None,
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cells", nargs="+", help='cells as text, like "d=128 hq=8 hk=1 nq=256"')
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS))
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    every = [cell for text in options.cells for cell in cells(text)]
    found = [row for cell in every for row in rows(cell, options.parts, options.calls)]
    if options.csv:
        with options.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            table.writeheader()
            table.writerows(found)


if __name__ == "__main__":
    main()
