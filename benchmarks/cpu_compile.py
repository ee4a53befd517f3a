"""Time the compilation of the CPU backend: first calls of processes, wall and processor time.

    taskset -c 0,1 python -m benchmarks.cpu_compile --csv compile.csv
    python -m benchmarks.cpu_compile --calls float32 --functions

Each call has an empty cache of kernels in its first process ("cold"); a second process loads them
("warm"). Heads of 64, causal, 2 threads. A row has the seconds of the first forward and backward,
by the wall and of processor time, and how many functions Numba compiled.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COLUMNS = ("call", "cache", "pass", "wall_s", "processor_s", "functions")
CALLS = ("float32", "bfloat16", "bias+softcap")


def main() -> int:
    """Run two processes of each call; print the rows and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--functions", action="store_true", help="print each with its own time")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--child", choices=CALLS, default=None, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child is not None:
        print(json.dumps(_child(a.child, a.functions)))
        return 0
    rows = []
    for call in a.calls:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "benchmarks.cpu_compile", "--child", call]
            command += ["--functions"] if a.functions else []
            for kind in ("cold", "warm"):
                env = os.environ | {"NUMBA_CACHE_DIR": cache}
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
                *printed, last = done.stdout.splitlines()
                print(*printed, sep="\n", end="\n" if printed else "")
                found = json.loads(last)
                rows += [{"call": call, "cache": kind, **row} for row in found]
                for row in rows[-2:]:
                    print(*(f"{row[name]!s:>13}" for name in COLUMNS), flush=True)
    if a.csv is not None:
        with a.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


def _child(call: str, functions: bool) -> list[dict[str, Any]]:
    """Return the rows of this process."""
    import torch
    from numba.core import event

    import rowmax

    torch.set_num_threads(2)
    dtype = torch.bfloat16 if call == "bfloat16" else torch.float32
    q, k, v = (torch.randn(2, 512, 4, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    terms: dict[str, Any] = {}
    if call == "bias+softcap":
        terms = {"bias": torch.randn(1, 4, 512, 512), "softcap": 30.0}
    open_: list[list[Any]] = []  # functions that are being compiled: [name, start, callees' time]
    own: list[tuple[float, str]] = []

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            name = event.data["dispatcher"].py_func.__qualname__
            open_.append([name, time.process_time(), 0.0])

        def on_end(self, event: Any) -> None:
            name, start, callees = open_.pop()
            taken = time.process_time() - start
            own.append((taken - callees, name))
            if open_:
                open_[-1][2] += taken

    event.register("numba:compile", Listener())
    rows, out = [], None
    for name in ("forward", "backward"):
        own.clear()
        wall, processor = time.perf_counter(), time.process_time()
        if out is None:
            out = rowmax.attention(q, k, v, causal=True, backend="cpu", **terms)
        else:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        seconds = time.perf_counter() - wall, time.process_time() - processor
        times = dict(zip(COLUMNS[3:5], (round(x, 3) for x in seconds), strict=True))
        rows.append({"pass": name, **times, "functions": len(own)})
        for taken, function in sorted(own, reverse=True) if functions else ():
            print(f"{taken:8.3f} {function}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
