"""The Hopper forward with one thing changed at a time, in turns, on the same tensors.

    python benchmarks/hopper_variants.py [--cells 128/512/full 64/1024/causal ...] [--rounds 5]

TFLOP/s of the shipped plan, and of each variant as a ratio of it; medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import triton

from rowmax.hopper import launch
from rowmax.hopper.copies import over
from rowmax.problem import Options, Tensors, problem_of

VARIANTS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "stores by threads": {"STAGED": 0},
    "touched": {"TOUCHED": 4},
    "always masked": {"EVEN_K": False},
}
CELLS = [
    f"{d}/{n}/{m}" for d in (64, 128, 256) for n in (512, 1024, 4096) for m in ("full", "causal")
]


def runner(cell: str, options: dict[str, Any]) -> tuple[Any, float]:
    d, n, mask = cell.split("/")
    d, n = int(d), int(n)
    b, h = 16384 // n, 2048 // d
    q, k, v = (torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tensors = Tensors(q, k, v)
    problem = problem_of(tensors, Options(scale=d**-0.5, right=0 if mask == "causal" else None))
    out, lse = torch.empty_like(q), torch.empty(problem.lse_shape, device="cuda")
    plan = launch.made(problem, tensors, out, **options)
    copies = over(plan.copies, q, k, v, None, out)
    t = launch.pointers(plan, problem, tensors, out, lse)
    flops = 4 * b * h * n * n * d / (2 if mask == "causal" else 1)
    return lambda: plan.launch(copies, t, plan.last), flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--rounds", type=int, default=5, help="0: compile alone")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for cell in options.cells:
        runs = {name: runner(cell, x) for name, x in VARIANTS.items()}
        for run, _ in runs.values():
            run()
        torch.cuda.synchronize()
        if not options.rounds:  # compiled, for a run to come
            continue
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, (run, _) in runs.items():
                time.sleep(0.1)
                ms = triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median")
                times[name].append(ms)
        ms = {name: statistics.median(x) for name, x in times.items()}
        speed = runs["shipped"][1] / ms["shipped"] / 1e9
        rest = (f"{name} {ms['shipped'] / x:.3f}" for name, x in ms.items() if name != "shipped")
        print(f"{cell:16} {speed:5.0f} ", *rest, sep="  ", flush=True)


if __name__ == "__main__":
    main()
