"""The kernels of the Triton backward, each alone, with other tiles than those of the table.

    python benchmarks/triton_backward.py [--d 128 256] [--n 512 1024 4096 16384] [--jobs delta dv]

bfloat16, 16k tokens, H * D = 2048. Candidates are compiled ahead, in processes of their own, and
take turns on the device; the L2 cache is flushed before each run. A line is a kernel at one
length: the shipped tiles' time, speed and rank, then all candidates, best first, each with how
many times faster than the shipped ones it is. Tiles are written BLOCK_Q,BLOCK_K,warps,stages;
"s" is split; "none", "fewer" and "more" are of how many heads tiles are taken in turns.
TFLOP/s count the products that a kernel makes, causal half. A last table has the means over short
and over long sequences.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from rowmax.call.problem import Options, Problem, Tensors, Wanted, problem_of
from rowmax.gpu.triton.backward import backward
from rowmax.gpu.triton.backward_dkdv import DK, DKDV, DV
from rowmax.gpu.triton.backward_dq import DQ
from rowmax.gpu.triton.kernel_args import Pointers
from rowmax.gpu.triton.launch import Job, build_job
from rowmax.gpu.triton.preprocess import DELTA, padded_rows
from rowmax.gpu.triton.tiles import BOTH_UP_TO, Tiles, tiles_for

TOKENS, WIDTH = 16384, 2048

#: of each job and head size; for causal ones, also those after the bar
CANDIDATES = {
    ("delta", 128): "16,16,4,2 32,16,4,2 64,16,4,2 64,16,8,2 128,16,8,2",
    ("delta", 256): "16,16,4,2 32,16,4,2 64,16,4,2 32,16,8,2 64,16,8,2",
    ("dkdv", 128): "64,128,8,3 64,128,8,4 64,128,8,2 64,64,4,2 | 64,128,8,3,s",
    ("dq", 128): "128,64,8,3 128,64,8,4 64,64,4,2 | 128,64,8,3,s",
    ("dk", 256): "32,128,8,2 32,128,8,3 64,64,4,2 32,64,4,3 32,64,4,4 | 32,64,8,3 64,64,8,2",
    ("dv", 256): "32,128,8,3 32,128,8,4 32,128,8,5 64,128,8,2 64,64,4,2 | 64,64,8,3 32,64,4,4",
    ("dq", 256): ("64,32,4,3 64,32,4,4 64,64,4,2 128,32,8,3 | 128,32,8,3,s 64,32,4,3,s 64,64,8,2"),
}
SPECS = {spec.name: spec for spec in (DELTA, DKDV, DK, DV, DQ)}
PRODUCTS = {"delta": 0, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}


@dataclass(frozen=True)
class Choice:
    """Tiles, and of how many heads they are taken in turns if not as shipped."""

    tiles: Tiles
    turns: str = ""  # "none", "fewer" or "more"

    def __str__(self) -> str:
        t = self.tiles
        marks = ["s"] if t.split else []
        shape = map(str, (t.block_q, t.block_k, t.warps, t.stages))
        return ",".join([*shape, *marks]) + (f" ({self.turns})" if self.turns else "")


def candidates(job: str, d: int, causal: bool) -> list[Tiles]:
    always, _, more = CANDIDATES[job, d].partition("|")
    found = []
    for text in (always + (more if causal else "")).split():
        shape, marks = text.split(",")[:4], text.split(",")[4:]
        found.append(Tiles(*map(int, shape), split="s" in marks))
    return found


def jobs_of(d: int) -> list[str]:
    return ["delta", *(["dk", "dv"] if d > BOTH_UP_TO else ["dkdv"]), "dq"]


class Cell:
    """One problem with all that its backward's kernels read and write."""

    def __init__(self, d: int, n: int, causal: bool, device: str) -> None:
        shape = (TOKENS // n, n, WIDTH // d, d)
        make = torch.randn if device == "cuda" else torch.empty
        q, k, v, self.dout = (make(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
        self.tensors = Tensors(q, k, v)
        options = Options(scale=d**-0.5, right=0 if causal else None)
        self.problem: Problem = problem_of(self.tensors, options)
        self.flops = 2.0 * shape[0] * shape[2] * n * n * d * (0.5 if causal else 1.0)
        self.name = f"D{d} {'causal' if causal else 'full'} N{n}"
        b, h, _ = self.problem.lse_shape
        seen = (
            torch.arange(1, n + 1, device=device) if causal else torch.full((n,), n, device=device)
        )
        self.lse = (seen.float().log() + 0.5).expand(b, h, n).contiguous()  # about what it is
        self.out = make(shape, device=device, dtype=torch.bfloat16)
        rows = [self.lse.new_empty(padded_rows(self.problem)) for _ in ("lse2", "delta")]
        self.made = [torch.empty_like(x) for x in (q, k, v)]
        of_rows = {"dout": self.dout, "lse2": rows[0], "delta": rows[1]}
        self.delta = Pointers(q, out=self.out, lse=self.lse, **of_rows)
        self.t = Pointers(*self.tensors, **of_rows)

    def pointers(self, job: str) -> Pointers:
        dq, dk, dv = self.made
        return {
            "delta": self.delta,
            "dkdv": self.t._replace(dk=dk, dv=dv),
            "dk": self.t._replace(dk=dk),
            "dv": self.t._replace(dv=dv),
            "dq": self.t._replace(dq=dq),
        }[job]

    def plan(self, job: str, choice: Choice) -> Job:
        planned = build_job(SPECS[job], self.problem, self.tensors, choice.tiles, self.dout)
        if choice.turns:
            heads = planned.numbers.together
            heads = {"none": 1, "fewer": max(1, heads // 4), "more": 4 * heads}[choice.turns]
            planned.numbers = planned.numbers._replace(together=heads)
        return planned

    def choices(self, job: str, causal: bool, device: torch.device) -> list[Choice]:
        """The shipped one first; orders of tiles are tried on it alone."""
        shipped = tiles_for(job, self.problem, device)
        found = [Choice(shipped)]
        found += [
            Choice(t) for t in candidates(job, self.problem.d, causal) if not same(job, t, shipped)
        ]
        if job == "delta" or causal:
            found.append(Choice(shipped, "none"))
        if job != "delta" and causal:
            found += [Choice(shipped, "fewer"), Choice(shipped, "more")]
        return found

    def runs(self, job: str, causal: bool) -> dict[str, Callable[[], Any]]:
        """What runs each choice that the device has room for, all run once."""
        found: dict[str, Callable[[], Any]] = {}
        for choice in self.choices(job, causal, self.dout.device):
            planned, t = self.plan(job, choice), self.pointers(job)
            try:
                planned.run(t)
                torch.cuda.synchronize()
            except OutOfResources:
                continue
            found[str(choice)] = lambda planned=planned, t=t: planned.run(t)
        return found

    def whole(self) -> None:
        wanted = Wanted(True, True, True, False, False)
        backward(self.problem, self.tensors, self.out, self.lse, self.dout, None, wanted)


def same(job: str, x: Tiles, y: Tiles) -> bool:
    """Delta has no tiles of keys and no loop."""
    return (x.block_q, x.warps) == (y.block_q, y.warps) if job == "delta" else x == y


def compile_one(what: tuple[str, int, bool, Choice]) -> None:
    """Into Triton's cache on disk, for a device that this process does not see."""
    job, d, causal, choice = what
    cell = Cell(d, 4096, causal, "cpu")
    try:
        cell.plan(job, choice).compile(cell.pointers(job), GPUTarget("cuda", 90, 32))
    except Exception as problem:  # the device run meets it again
        print(f"{job} D{d} {choice}: {type(problem).__name__}", flush=True)


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each of ``count`` runs, as ``triton.testing.do_bench`` takes them."""
    driver: Any = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2)]
    call()
    for start, end in zip(*events, strict=True):
        driver.clear_cache(cache)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(*events, strict=True)]


def measured(runs: dict[str, Callable[[], Any]], options: argparse.Namespace) -> dict[str, float]:
    """The median time of each, over rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            time.sleep(options.sleep)
            times[name] += timed(runs[name], options.runs)
    return {name: statistics.median(x) for name, x in times.items()}


def report(cell: Cell, job: str, ms: dict[str, float]) -> None:
    shipped, *_ = ms
    order = sorted(ms, key=lambda name: ms[name])
    speed = PRODUCTS[job] * cell.flops / ms[shipped] / 1e9
    about = f"{speed:4.0f} TFLOP/s"
    if job == "delta":
        about = f"{2e-9 * cell.out.nbytes / ms[shipped]:4.2f} TB/s"
    print(
        f"{cell.name} {job}: shipped {shipped} {ms[shipped]:.4f} ms {about},"
        f" rank {order.index(shipped) + 1} of {len(order)}\n   ",
        "  ".join(f"{ms[shipped] / ms[name]:.3f} {name}" for name in order),
        flush=True,
    )


def summary(ratios: dict[tuple[int, bool, str], dict[str, dict[int, float]]]) -> None:
    print("\nmeans, how many times faster than the shipped choice: N up to 1024 | longer")
    for (d, causal, job), names in ratios.items():
        print(f"D{d} {'causal' if causal else 'full'} {job}")
        rows = []
        for name, by_n in names.items():
            groups = [
                [r for n, r in by_n.items() if (n <= 1024) == short] for short in (True, False)
            ]
            means = [
                math.exp(statistics.fmean(map(math.log, g))) if g else math.nan for g in groups
            ]
            rows.append((means, name))
        for means, name in sorted(rows, key=lambda row: -max(row[0])):
            print("   ", " | ".join(f"{m:.3f}" for m in means), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # pyright: ignore
    parser.add_argument("--d", type=int, nargs="+", default=[128, 256], choices=[128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[512, 1024, 4096, 16384])
    parser.add_argument("--case", nargs="+", default=["full", "causal"])
    parser.add_argument("--jobs", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=8, help="of a candidate in a round")
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds before each")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    cases: list[tuple[int, bool]] = list(
        product(options.d, [case == "causal" for case in options.case])
    )
    work = []
    for d, causal in cases:
        cell = Cell(d, 4096, causal, "cpu")
        for job in jobs_of(d):
            if job in options.jobs:
                choices = cell.choices(job, causal, torch.device("cuda", 0))
                work += [(job, d, causal, choice) for choice in choices]
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(compile_one, sorted(work, key=lambda w: not w[2]), chunksize=1)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}:"
        f" {len(work)} kernels compiled in {time.time() - start:.0f} s"
    )
    ratios: dict[tuple[int, bool, str], dict[str, dict[int, float]]] = {}
    lengths: list[int] = options.n
    for (d, causal), n in product(cases, lengths):
        cell = Cell(d, n, causal, "cuda")
        cell.plan("delta", cell.choices("delta", causal, cell.dout.device)[0]).run(cell.delta)
        total = 0.0
        for job in jobs_of(d):
            if job in options.jobs:
                ms = measured(cell.runs(job, causal), options)
                report(cell, job, ms)
                shipped, *_ = ms
                total += ms[shipped]
                for name, x in ms.items():
                    named = ratios.setdefault((d, causal, job), {}).setdefault(name, {})
                    named[n] = ms[shipped] / x
        ms = measured({"whole": cell.whole}, options)["whole"]
        print(f"{cell.name} whole backward: {ms:.4f} ms, the sum of its kernels {total:.4f}")
    summary(ratios)
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
