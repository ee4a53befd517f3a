"""Kernels assembled by the ptxas that Triton takes, and by the one that rowmax takes, in one run.

    python benchmarks/assemblers.py --csv benchmarks/results/assemblers.csv

Each cell is timed forward and backward with both, their order changing from turn to turn; medians
of the turns, registers and words of local memory of every kernel. Kernels are compiled before, in
processes side by side. Results are not looked at: the older ptxas makes some float32 kernels wrong.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

import rowmax
from rowmax.gpu import assembler, compiled

COLUMNS = (
    "backend", "dtype", "cell", "pass", "usual", "usual_ms", "usual_registers", "usual_local",
    "taken", "taken_ms", "taken_registers", "taken_local", "ratio", "device", "torch", "triton",
    "date",
)  # fmt: skip
_CACHES = (
    (compiled, "_kernels"),
    (import_module("rowmax.gpu.triton.launch"), "_jobs"),
    (import_module("rowmax.gpu.hopper.host"), "_PLANS"),
    (import_module("rowmax.gpu.hopper.host"), "_SPILLED"),
    (import_module("rowmax.gpu.hopper.gradients.plans"), "PLANS"),
)


class Cell(NamedTuple):
    backend: str
    dtype: str
    name: str
    d: int
    n: int
    options: dict[str, Any]


def cells() -> list[Cell]:
    found = []
    for d in (64, 128, 256):
        for n in (1024, 16384):
            for causal in (False, True):
                name = f"D {d} N {n}{' causal' * causal}"
                found.append(Cell("hopper", "bfloat16", name, d, n, {"causal": causal}))
        for causal in (False, True):
            name = f"D {d} N 4096{' causal' * causal}"
            found.append(Cell("triton", "bfloat16", name, d, 4096, {"causal": causal}))
            if d < 256:
                name = f"D {d} N 2048{' causal' * causal}"
                found.append(Cell("triton", "float32", name, d, 2048, {"causal": causal}))
    for name, options in (
        ("window", {"mask": rowmax.Window(1024, 0)}),
        ("softcap", {"softcap": 30.0, "causal": True}),
        ("bias", {"bias": True}),
    ):
        found += [
            Cell(backend, "bfloat16", f"D 128 N 4096 {name}", 128, 4096, options)
            for backend in ("hopper", "triton")
        ]
    return found


class World:
    """The caches of kernels made by one assembler, put in place while it is in use."""

    def __init__(self, name: str, chosen: assembler.Choice) -> None:
        self.name, self.chosen = name, chosen
        self.kept: list[dict[Any, Any]] = [{} for _ in _CACHES]

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = assembler.choice
        assembler.choice = lambda: self.chosen
        for (module, name), kept in zip(_CACHES, self.kept, strict=True):
            getattr(module, name).clear()
            getattr(module, name).update(kept)
        try:
            yield
        finally:
            self.kept = [dict(getattr(module, name)) for module, name in _CACHES]
            assembler.choice = before

    def usage(self, call: Callable[[], Any]) -> tuple[str, str]:
        """Registers and words of local memory of the kernels that a call compiles or loads."""
        before = set(compiled._kernels)
        call()
        torch.cuda.synchronize()
        new = [x.kernel for key, x in compiled._kernels.items() if key not in before]
        return tuple(
            " ".join(f"{x.name}:{getattr(x, field, '?')}" for x in new)
            for field in ("n_regs", "n_spills")
        )


def worlds() -> list[World]:
    chosen = assembler.choice()
    usual = assembler.Choice(chosen.usual, chosen.usual)
    return [World("usual", usual), World("taken", chosen)]


def calls(cell: Cell) -> dict[str, Callable[[], Any]]:
    dtype = getattr(torch, cell.dtype)
    shape = (max(1, 16384 // cell.n), cell.n, 2048 // cell.d, cell.d)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    options = dict(cell.options)
    if options.pop("bias", False):
        bias = torch.randn(1, shape[2], cell.n, cell.n, device="cuda", dtype=dtype)
        options["bias"] = bias.requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    leaves += [options["bias"]] if "bias" in options else []

    def forward() -> Any:
        return rowmax.attention(*leaves[:3], backend=cell.backend, **options)

    out = None

    def backward() -> Any:
        nonlocal out
        out = forward() if out is None else out
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def compile_all(job: tuple[int, int]) -> None:
    which, n = job
    with worlds()[which].entered():
        for call in calls(cells()[n]).values():
            call()
    torch.cuda.synchronize()


def measured(cell: Cell, turns: int, both: list[World]) -> Iterator[dict[str, Any]]:
    for name in ("forward", "backward"):
        row: dict[str, Any] = {"backend": cell.backend, "dtype": cell.dtype, "cell": cell.name}
        row["pass"] = name
        ready, times = {}, {world.name: [] for world in both}
        for world in both:
            with world.entered():
                ready[world.name] = calls(cell)
                if name == "backward":
                    ready[world.name]["forward"]()
                usage = world.usage(ready[world.name][name])
            row[world.name] = str(world.chosen.taken)
            row[f"{world.name}_registers"], row[f"{world.name}_local"] = usage
        for turn in range(turns):
            for world in both if turn % 2 else both[::-1]:
                with world.entered():
                    call = ready[world.name][name]
                    ms = triton.testing.do_bench(call, warmup=8, rep=25, return_mode="median")
                times[world.name].append(float(ms))
        for world in both:
            row[f"{world.name}_ms"] = f"{statistics.median(times[world.name]):.4f}"
        row["ratio"] = f"{float(row['usual_ms']) / float(row['taken_ms']):.3f}"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/assemblers.csv"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--processes", type=int, default=14)
    given = parser.parse_args()
    every = cells()
    jobs = [(which, n) for n in range(len(every)) for which in range(2)]
    with multiprocessing.get_context("spawn").Pool(given.processes, maxtasksperchild=8) as pool:
        pool.map(compile_all, jobs, chunksize=1)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    both, ratios = worlds(), []
    with given.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for cell in every:
            for row in measured(cell, given.turns, both):
                writer.writerow({**row, **about})
                file.flush()
                ratios.append(float(row["ratio"]))
                text = " ".join(str(row[name]) for name in ("backend", "dtype", "cell", "pass"))
                spilled = row["usual_local"], row["taken_local"]
                print(
                    f"{text}: {row['usual_ms']} {row['taken_ms']} ratio {row['ratio']}"
                    + (f" local {spilled}" if spilled[0] != spilled[1] else ""),
                    flush=True,
                )
    mean, names = statistics.geometric_mean(ratios), [world.chosen.taken for world in both]
    print(f"{names[0]} over {names[1]}: geometric mean {mean:.3f}, least {min(ratios)}")


if __name__ == "__main__":
    main()
