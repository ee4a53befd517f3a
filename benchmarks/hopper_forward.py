"""The Hopper forward beside what torch has, on the same tensors in one run.

    python benchmarks/hopper_forward.py --out results.csv [--flex] [--rounds 3] [--sizes 64 128]

36 cells: bfloat16, 16k tokens, H D = 2048, N from 512 to 16k, D 64, 128 and 256, full and causal.
Then features. Every cell is timed in turns with pauses between, since the card slows down as it
warms; the median of the turns is kept. FLOPs: 4 B H N N D, half of it for causal; for
windows, documents and packed sequences, the pairs that are seen. Each of the 36 is set beside the
better of cuDNN in the same run and FlashAttention-4 in a run of its own (results/fa4.csv).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import time
from collections.abc import Callable
from itertools import chain
from math import isnan
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rowmax

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
Run = Callable[[], object]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def sustained(run: Run) -> float:
    """The median of some 40 ms of runs, after about as long."""
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")


def rested(run: Run) -> float:
    """The median of some 40 ms of runs after 15 ms of rest, in which the host gets ahead. Each
    begins with an empty cache, as with ``do_bench``."""
    run()
    torch.cuda.synchronize()
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def times(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(25_000_000)  # clocks, about 15 ms
        for start, end in events:
            cache.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    each = statistics.median(times(3))
    return statistics.median(times(max(4, min(100, int(40 / each)))))


def measured(
    runs: dict[str, Run], flops: float, rounds: int, timer: Callable[[Run], float] = sustained
) -> dict[str, float]:
    """TFLOP/s of each, the median of its turns; nan where one cannot run.

    Some tenths of a second lie between turns; who comes after whom changes from turn to turn. Ours
    and cuDNN's, which the bar is, take as many turns, the others one.
    """
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    time.sleep(1.0)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if turn and name in ("fa2", "flex"):
                continue
            time.sleep(0.3)
            try:
                ms = timer(runs[name])
            except RuntimeError:
                ms = math.nan
            speeds[name].append(flops / ms / 1e9)
    return {name: statistics.median(x) for name, x in speeds.items()}


def of_torch(kind: SDPBackend, q, k, v, **options) -> Run:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def run() -> object:
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, **options)

    return run


def of_flex(q, k, v, causal: bool) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = q.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    torch._dynamo.config.recompile_limit = 256  # past it, it would hold the matrix
    flex = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n) if causal else None
    return lambda: flex(q, k, v, block_mask=mask)


def fa4(part: str) -> dict[str, float]:
    """FlashAttention-4's speed by cell, ``forward`` or ``backward``."""
    with (Path(__file__).parent / "results/fa4.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {f"D{r['D']} N{r['N']} {r['mask']}": float(r[part]) for r in rows}


class Bars:
    """The 36 cells beside the better of cuDNN in the same run and FlashAttention-4."""

    def __init__(self, part: str) -> None:
        self.others, self.ratios = fa4(part), []

    def ratio(self, name: str, speeds: dict[str, float]) -> str:
        bar = max(self.others.get(name, 0.0), 0.0 if isnan(speeds["cudnn"]) else speeds["cudnn"])
        self.ratios.append(speeds["rowmax"] / bar)
        return f"  {self.ratios[-1]:.3f} of {bar:.0f}"

    def mean(self) -> str:
        mean = math.exp(statistics.fmean(map(math.log, self.ratios)))
        return f"{len(self.ratios)} cells: geometric mean {mean:.3f}, least {min(self.ratios):.3f}"


def plain_cells(sizes: list[int], flex: bool):
    for d in sizes:
        for n in LENGTHS:
            for causal in (False, True):
                b, h = TOKENS // n, WIDTH // d
                q, k, v = (normal(b, n, h, d) for _ in range(3))
                runs = {
                    "rowmax": lambda q=q, k=k, v=v, c=causal: rowmax.attention(
                        q, k, v, causal=c, backend="hopper"
                    ),
                    "cudnn": of_torch(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal=causal),
                    "fa2": of_torch(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal=causal),
                }
                if flex:
                    runs["flex"] = of_flex(q, k, v, causal)
                flops = 4 * b * h * n * n * d / (2 if causal else 1)
                yield f"D{d} N{n} {'causal' if causal else 'full'}", runs, flops


def feature_cells():
    n, d = 16384, 128
    q, k, v = normal(1, n, 32, d), normal(1, n, 8, d), normal(1, n, 8, d)

    def ours(*tensors, **options) -> dict[str, Run]:
        return {"rowmax": lambda: rowmax.attention(*tensors, backend="hopper", **options)}

    half = 4 * 32 * n * n * d / 2
    yield "GQA 32/8 causal N16384", ours(q, k, v, causal=True), half
    yield "the same, softcap 30", ours(q, k, v, causal=True, softcap=30.0), half
    pairs = 1024 * n - 1024 * 1023 // 2 + n
    window = rowmax.Window(left=1024, right=0)
    yield "the same, window 1024", ours(q, k, v, mask=window), 4 * 32 * pairs * d
    q, k, v = (normal(32768, 16, d) for _ in range(3))
    cu = torch.arange(0, 32769, 2048, device="cuda", dtype=torch.int32)
    flops = 4 * 16 * 16 * 2048 * 2048 * d / 2

    def packed() -> object:
        return rowmax.attention_varlen(q, k, v, cu, cu, 2048, 2048, causal=True, backend="hopper")

    yield "packed causal, 16 x 2048", {"rowmax": packed}, flops
    for b, n, h, d in ((1, 4096, 16, 128), (4, 2048, 32, 64)):
        q, k, v = (normal(b, n, h, d) for _ in range(3))
        bias = normal(1, h, n, n)
        runs = ours(q, k, v, bias=bias)
        runs["cudnn"] = of_torch(SDPBackend.CUDNN_ATTENTION, q, k, v, attn_mask=bias)
        yield f"bias (1, {h}, {n}, {n}), B{b} D{d}", runs, 4 * b * h * n * n * d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hopper_forward.csv"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--plain", action="store_true", help="the 36 cells alone")
    options = parser.parse_args()
    versions = f"torch {torch.__version__} triton {triton.__version__}"
    a = normal(8192, 8192)
    ceiling = measured({"matmul": lambda: a @ a}, 2 * 8192**3, options.rounds)["matmul"]
    with options.out.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["case", "implementation", "tflops", "device", "versions", "date"])
        about = [torch.cuda.get_device_name(), versions, datetime.date.today().isoformat()]
        rows.writerow(["matmul 8192", "cublas", f"{ceiling:.0f}", *about])
        print(f"{about}, matmul {ceiling:.0f} TFLOP/s")
        bars = Bars("forward")
        features = () if options.plain else feature_cells()
        for name, runs, flops in chain(plain_cells(options.sizes, options.flex), features):
            speeds = measured(runs, flops, options.rounds)
            print(f"{name:28}", *(f"{n} {x:.0f}" for n, x in speeds.items()), end="")
            for n, x in speeds.items():
                rows.writerow([name, n, f"{x:.0f}", *about])
            file.flush()
            if "fa2" in speeds:
                print(bars.ratio(name, speeds), end="")
            print(flush=True)
        if bars.ratios:
            print(bars.mean())


if __name__ == "__main__":
    main()
