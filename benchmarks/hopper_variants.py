"""The Hopper forward with one thing changed at a time, in turns, on the same tensors.

    python benchmarks/hopper_variants.py [--cells 128/512/full 64/1024/causal ...] [--rounds 5]

TFLOP/s of the shipped plan, and of each variant as a ratio of it; medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import triton

from rowmax.call.problem import Options, Tensors, problem_of
from rowmax.gpu.hopper import host
from rowmax.gpu.hopper.tiles import tile_for

#: by head size, and mask where that matters: changes of the tile, and of what is compiled in
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "64": {"two warpgroups": ({"warpgroups": 2, "registers": (240, 24)}, {})},
    "128": {"three V, one Q": ({"v_stages": 3, "q_stages": 1}, {})},
    "256": {"stores by threads": ({}, {"STAGED": 0})},
    "64/bias": {
        "one, four": ({"b_stages": 1, "k_stages": 4, "v_stages": 4, "q_stages": 2}, {}),
        "two, two": ({"b_stages": 2, "k_stages": 2, "v_stages": 2, "q_stages": 2}, {}),
        "keys 64": ({"b_stages": 3, "block_k": 64, "k_stages": 4, "v_stages": 4}, {}),
    },
    "128/bias": {
        "one": ({"b_stages": 1, "q_stages": 2}, {}),
        "one, one Q": ({"b_stages": 1, "q_stages": 1}, {}),
        "keys 64": ({"b_stages": 2, "block_k": 64, "k_stages": 3, "v_stages": 3}, {}),
        "keys 64, four": ({"b_stages": 4, "block_k": 64, "k_stages": 3, "v_stages": 3}, {}),
    },
    "256/bias": {"one": ({"b_stages": 1}, {})},
}
CELLS = [
    *(
        f"{d}/{n}/{m}"
        for d in (64, 128, 256)
        for n in (512, 1024, 4096, 16384)
        for m in ("full", "causal")
    ),
    *("64/2048/bias", "128/4096/bias", "256/2048/bias"),
]


def runner(cell: str, changes: dict[str, Any], options: dict[str, Any]) -> tuple[Any, float]:
    d, n, mask = cell.split("/")
    d, n = int(d), int(n)
    b, h = 16384 // n, 2048 // d
    bias = None
    if mask == "bias":
        b = (4096 // n) ** 2
        bias = torch.randn(1, h, n, n, device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tensors = Tensors(q, k, v, bias)
    problem = problem_of(tensors, Options(scale=d**-0.5, right=0 if mask == "causal" else None))
    out, lse = torch.empty_like(q), torch.empty(problem.lse_shape, device="cuda")
    how = host.bias_path(problem, bias)
    tile = replace(tile_for(problem, how, host.processors(q.device)), **changes)
    plan = host.build_plan(problem, tensors, out, tile, **options)
    copies = host.over(plan.copies, q, k, v, bias, out)
    t = host.pointers(plan, problem, tensors, out, lse)
    flops = 4 * b * h * n * n * d / (2 if mask == "causal" else 1)
    return lambda: plan.launch(copies, t, plan.last), flops


def variants_of(cell: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    d, _, mask = cell.split("/")
    return VARIANTS.get(f"{d}/{mask}") or VARIANTS[d]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--rounds", type=int, default=5, help="0: compile alone")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for cell in options.cells:
        variants = {"shipped": ({}, {})} | variants_of(cell)
        runs = {name: runner(cell, *changes) for name, changes in variants.items()}
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
