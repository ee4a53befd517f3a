"""Time rowmax and its peers on the cells of named sets, in one run.

    python -m benchmarks --cells main --providers rowmax cudnn --csv results.csv
    python -m benchmarks --device cpu --quick
    python -m benchmarks --cells "d=64 n=512|1024 causal=1" --against ../before
    python -m benchmarks --passes hopper.forward --tiles v_stages=3,q_stages=1 STAGED=0
    python -m benchmarks --passes forward jvp backward second --providers rowmax rowmax:torch
    python -m benchmarks --cells small --passes host --providers rowmax sdpa
    python -m benchmarks --cells training --passes step --providers none cudnn flash flex rowmax

``--cells`` takes sets (sets.py) and cells as text, ``--providers`` those of
src/rowmax/bench/providers.py. A pass is forward, backward, both, jvp, second, memory,
jvp-memory, second-memory, host, host-both, step, matmul or a kernel of variants.py.

Contestants take turns, in an order that changes from turn to turn; results are medians of the
turns. A ratio is a peer's time over a contestant's, both of this run. Results of rowmax are
compared with a peer's once. The exit status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from rowmax.bench.cells import cells
from rowmax.bench.run import COLUMNS, Contestant

from .run import Run
from .sets import SETS

#: columns that are printed
SHOWN = (
    "ms", "tflops", "gb_per_s", "host_us", "peak_mib", "tokens_per_second", "ratio", "off",
    "local", "note",
)  # fmt: skip


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options, with defaults by device and passes."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    add("--cells", nargs="+", help=f"text, or {', '.join(SETS)} (main; cpu on a CPU)")
    add("--only", default="", help="a regular expression of names of cells")
    add("--providers", nargs="+", help="rowmax cudnn; rowmax sdpa on a CPU")
    add("--passes", nargs="+", help="forward backward; forward both on a CPU")
    add("--tiles", nargs="+", help="changes of a kernel of variants.py, for those tried there")
    add("--peer", help="the provider that others are set beside: the first that is not rowmax")
    add("--against", type=Path, help="another checkout of rowmax, in the same run")
    add("--usual-assembler", action="store_true", help="also with the ptxas that Triton takes")
    add("--bar", type=Path, help="speeds of another run, such as benchmarks/results/fa4.csv")
    add("--csv", type=Path)
    add("--turns", type=int, default=5)
    add("--turn-seconds", type=float, help="of calls of a contestant in a turn")
    add("--once", nargs="+", default=[], help="providers that take one turn")
    add("--rested", action="store_true", help="every turn after 15 ms of rest, on a GPU")
    add("--pause", type=float, help="seconds before every turn: a card slows down as it warms")
    add("--seconds", type=float, default=math.inf, help="begin no cell after as long")
    add("--processes", type=int, help="that compile beforehand; 0 on a CPU")
    add("--registers", action="store_true", help="and local memory of every kernel")
    add("--check", action=argparse.BooleanOptionalAction, default=True)
    add("--quick", action="store_true", help="two turns, N up to 2048")
    options = parser.parse_args(given)
    usual = {"cells": ["cpu"], "providers": ["rowmax", "sdpa"], "passes": ["forward", "both"]}
    usual |= {"pause": 0.0, "turn_seconds": 0.2, "processes": 0}
    if options.device == "cuda":
        usual = {"cells": ["main"], "providers": ["rowmax", "cudnn"]}
        usual |= {"passes": ["forward", "backward"], "pause": 0.3, "turn_seconds": 0.04}
        usual["processes"] = min(14, os.cpu_count() or 1)
    for name, x in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, x)
    if options.peer is None:
        others = (x for x in options.providers if not x.startswith(("rowmax", "none")))
        options.peer = next(others, options.providers[0])
    options.turns, options.most = (2, 2048) if options.quick else (options.turns, math.inf)
    return options


def main(given: list[str] | None = None) -> int:
    """Measure, print and store; return 1 if a result is wrong."""
    options, start = arguments(given), time.perf_counter()
    texts = [text for name in options.cells for text in SETS.get(name, (name,))]
    every = [x for text in texts for x in cells(text) if re.search(options.only, x.name)]
    plan = [(x, what) for x in every if x.n <= options.most for what in options.passes]
    with ExitStack() as children, (options.csv or Path(os.devnull)).open("w", newline="") as file:
        run = Run(options, children)
        print(", ".join(f"{key} {x}" for key, x in run.facts.items() if x), flush=True)
        if options.processes:
            run.compile(plan)
            print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
        table = csv.DictWriter(file, COLUMNS, restval="")
        table.writeheader()
        for cell, what in plan:
            if time.perf_counter() - start > options.seconds:
                print(f"stopped after {options.seconds:.0f} s, before {cell.name} {what}")
                break
            for row in run.measure(cell, what):
                run.rows.append(row)
                table.writerow(row)
                name = str(Contestant(row["provider"], row["version"]))
                text = (f"{key} {row[key]}" for key in SHOWN if row.get(key))
                print(f"{cell.name:32} {what:9} {name:20}", *text, flush=True)
            file.flush()
        print(*run.summary(), *(f"WRONG: {text}" for text in run.failed), sep="\n")
    return int(bool(run.failed))
