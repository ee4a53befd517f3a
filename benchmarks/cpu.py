"""rowmax against torch's scaled_dot_product_attention on a CPU, in one run.

    python benchmarks/cpu.py [--quick] [--csv benchmarks/results/cpu.csv]

Both see the same numbers, each in the layout it takes as it is. Calls alternate, and medians are
compared; every cell is repeated until it has had its share of seconds. What torch needs besides
(a dense mask for a window, the sum of bias and causal mask) is made outside of the time where it
is a constant, and inside where it has a gradient. Peak memory is read in child processes.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import rowmax


class Cell(NamedTuple):
    """One problem: batch 1."""

    n: int
    d: int
    heads: int = 8
    kv_heads: int = 8
    dtype: torch.dtype = torch.float32
    causal: bool = False
    bias: bool = False
    window: int | None = None

    @property
    def case(self) -> str:
        parts = ["causal"] * self.causal + ["bias + its gradient"] * self.bias
        parts += [f"window {self.window}"] * (self.window is not None)
        parts += [f"GQA {self.heads}/{self.kv_heads}"] * (self.heads != self.kv_heads)
        return ", ".join(parts) or "dense"


BF16 = torch.bfloat16
CELLS = [
    *(Cell(n, d, causal=c) for c in (False, True) for d in (64, 128) for n in (512, 1024, 2048)),
    *(Cell(n, d, causal=c) for c in (False, True) for d in (64, 128) for n in (4096, 8192)),
    *(Cell(n, 64, bias=True) for n in (2048, 4096)),
    *(Cell(n, 64, bias=True, causal=True) for n in (2048, 4096)),
    *(Cell(n, d, window=256) for n, d in ((2048, 64), (4096, 128))),
    *(Cell(2048, 64, heads=16, kv_heads=4, causal=c) for c in (False, True)),
    *(Cell(n, 64, dtype=BF16, causal=c) for c in (False, True) for n in (512, 2048)),
]


def calls(cell: Cell) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed: (who, direction) -> a call."""
    n, heads, d, kv = cell.n, cell.heads, cell.d, cell.kv_heads
    q, do = torch.randn(1, n, heads, d), torch.randn(1, n, heads, d).to(cell.dtype)
    k, v = torch.randn(2, 1, n, kv, d)
    ours = [x.to(cell.dtype).requires_grad_() for x in (q, k, v)]
    torchs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in ours]
    do_t = do.transpose(1, 2).contiguous()
    bias = torch.randn(1, heads, n, n, dtype=cell.dtype).requires_grad_() if cell.bias else None
    i = torch.arange(n)
    distance = i[:, None] - i
    future = distance < 0
    near = (distance >= 0) & (distance <= (cell.window or 0))

    def torch_forward() -> torch.Tensor:
        mask = near if cell.window is not None else bias
        if bias is not None and cell.causal:
            mask = bias.masked_fill(future, -torch.inf)
        return F.scaled_dot_product_attention(
            *torchs, mask, is_causal=cell.causal and mask is None, enable_gqa=heads != kv
        )

    window = None if cell.window is None else rowmax.Window(cell.window, 0)

    def our_forward() -> torch.Tensor:
        return rowmax.attention(*ours, causal=cell.causal, bias=bias, mask=window)  # pyright: ignore

    extra = [] if bias is None else [bias]
    return {
        ("torch", "forward"): torch.no_grad()(torch_forward),
        ("rowmax", "forward"): torch.no_grad()(our_forward),
        ("torch", "forward + backward"): lambda: torch.autograd.grad(
            torch_forward(), torchs + extra, do_t
        ),
        ("rowmax", "forward + backward"): lambda: torch.autograd.grad(
            our_forward(), ours + extra, do
        ),
    }


def measure(cell: Cell, seconds: float) -> list[dict[str, object]]:
    todo = calls(cell)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in todo}
    for call in todo.values():
        call()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["torch", "forward"]) < 5:
        for key, call in todo.items():
            start = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - start))
    rows = []
    for direction in ("forward", "forward + backward"):
        theirs, ours = (times[who, direction] for who in ("torch", "rowmax"))
        rows.append(
            {
                "case": cell.case,
                "dtype": str(cell.dtype).removeprefix("torch."),
                "n": cell.n,
                "d": cell.d,
                "heads": cell.heads,
                "kv_heads": cell.kv_heads,
                "direction": direction,
                "torch_ms": f"{statistics.median(theirs):.2f}",
                "rowmax_ms": f"{statistics.median(ours):.2f}",
                "ratio": f"{statistics.median(theirs) / statistics.median(ours):.2f}",
                "repeats": len(ours),
            }
        )
    return rows


_MEMORY = """
import resource, sys, torch
sys.path[:0] = {path!r}
from cpu import Cell, calls
todo = calls(Cell(*{cell!r}))
small = calls(Cell(*{cell!r})._replace(n=256))
small["{who}", "forward + backward"]()  # compiled, pools made
peak = lambda: int([l for l in open("/proc/self/status") if l.startswith("VmHWM")][0].split()[1])
open("/proc/self/clear_refs", "w").write("5")
before = int([l for l in open("/proc/self/status") if l.startswith("VmRSS")][0].split()[1])
grads = todo["{who}", "forward + backward"]()
print((peak() - before) / 1024)
"""


def memory(cell: Cell, who: str) -> float:
    """MiB that forward and backward add to the process at their peak, gradients included."""
    fields = [*cell[:4], None, *cell[5:]]
    text = _MEMORY.format(path=sys.path, cell=fields, who=who)
    text = text.replace("None, ", "torch.float32, ", 1)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def machine() -> dict[str, object]:
    names = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((x.split(":")[1].strip() for x in names.splitlines() if "model name" in x), "")
    import numba

    return {
        "device": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "rowmax": rowmax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one second a cell, N up to 2048")
    parser.add_argument("--only", default="", help="cells of this case or dtype")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for cell in CELLS:
        if (options.quick and cell.n > 2048) or options.only not in f"{cell.case} {cell.dtype}":
            continue
        for row in measure(cell, 1.0 if options.quick else 4.0):
            rows.append(row | machine())
            print("{case:32} {dtype:9} N {n:<5} D {d:<4} {direction:19}".format(**row), end="")
            print(
                "torch {torch_ms:>8} rowmax {rowmax_ms:>8} ms  x {ratio}".format(**row), flush=True
            )
    if not options.quick and not options.only:
        for cell in (Cell(8192, 64, causal=True), Cell(4096, 64, bias=True)):
            peaks = {who: memory(cell, who) for who in ("torch", "rowmax")}
            texts = {f"{who}_mib": f"{mib:.0f}" for who, mib in peaks.items()}
            print(
                f"memory, {cell.case}, N {cell.n}: "
                + ", ".join(f"{k} {v}" for k, v in texts.items())
            )
            rows.append({"case": cell.case, "n": cell.n, "d": 64, "heads": 8} | texts | machine())
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys(name for row in rows for name in row))
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
