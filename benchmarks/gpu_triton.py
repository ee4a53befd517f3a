"""The Triton backend beside compiled FlexAttention and SDPA, on one GPU, in one run.

    python benchmarks/gpu_triton.py --out benchmarks/results/gpu_triton.csv [--part main]

bfloat16, 16k tokens, H * D = 2048, forward and backward on their own; a window, a bias with its
gradient, and peak memory. Medians of runs between which the L2 cache is flushed. TFLOP/s count
4 B H N N D forward and 2.5 times that backward, causal half, a window by its pairs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import rowmax

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [B, N, H, D]


def median_ms(call: Callable[[], Any]) -> float:
    return triton.testing.do_bench(call, warmup=15, rep=60, return_mode="median")  # pyright: ignore


def heads_first(call: Attention) -> Attention:
    """A function of [B, H, N, D] as one of [B, N, H, D]."""
    return lambda *x: call(*(t.transpose(1, 2) for t in x)).transpose(1, 2)


def sdpa(backend: SDPBackend, causal: bool) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return heads_first(call)


def flex(n: int, keep: Any = None, add: Any = None) -> Attention:
    blocks = None if keep is None else create_block_mask(keep, None, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return heads_first(lambda q, k, v: compiled(q, k, v, score_mod=add, block_mask=blocks))  # pyright: ignore


def ours(**options: Any) -> Attention:
    return lambda q, k, v: rowmax.attention(q, k, v, backend="triton", **options)  # pyright: ignore


def measured(call: Attention, shape: tuple[int, ...], flops: float, leaves: tuple = ()) -> Row:
    """Forward and backward of one function on fresh random inputs."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dout = torch.randn_like(q)
    with torch.no_grad():
        forward = median_ms(lambda: call(q, k, v))
    inputs = [t.requires_grad_() for t in (q, k, v)] + list(leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(q, k, v)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    backward = median_ms(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    return {
        "forward_ms": round(forward, 4),
        "backward_ms": round(backward, 4),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "backward_tflops": round(2.5 * flops / backward / 1e9, 1),
        "both_tflops": round(3.5 * flops / (forward + backward) / 1e9, 1),
        "peak_mib": round(peak / 2**20, 1),
    }


def causal_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 1024)


def main_table() -> Iterator[tuple[Row, Callable[[], Row]]]:
    makers: dict[str, Callable[[int, bool], Attention]] = {
        "rowmax": lambda n, causal: ours(causal=causal),
        "flex": lambda n, causal: flex(n, causal_mask if causal else None),
        "cudnn": lambda n, causal: sdpa(SDPBackend.CUDNN_ATTENTION, causal),
    }
    for d in (128, 256, 64):
        for causal in (False, True):
            for n in reversed(LENGTHS):
                b, h = TOKENS // n, WIDTH // d
                flops = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
                case = "causal" if causal else "full"
                for name, make in makers.items():
                    yield (
                        {"case": case, "n": n, "d": d, "h": h, "b": b, "name": name},
                        partial(_run, partial(make, n, causal), (b, n, h, d), flops),
                    )


def _run(make: Callable[[], Attention], shape: tuple[int, ...], flops: float) -> Row:
    return measured(make(), shape, flops)


def feature_table() -> Iterator[tuple[Row, Callable[[], Row]]]:
    n, h, d = 16384, 16, 128
    pairs = n * 1025 - 1024 * 1025 // 2
    about = {"case": "window 1024", "n": n, "d": d, "h": h, "b": 1}
    window = rowmax.Window(1024, 0)
    yield (
        {**about, "name": "rowmax"},
        lambda: measured(ours(mask=window), (1, n, h, d), 4 * h * pairs * d),
    )
    yield (
        {**about, "name": "flex"},
        lambda: measured(flex(n, window_mask), (1, n, h, d), 4 * h * pairs * d),
    )
    m = 4096
    about = {"case": "bias and its gradient", "n": m, "d": d, "h": h, "b": 1}

    def with_bias(name: str) -> Row:
        bias = torch.randn(1, h, m, m, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def add(score: Any, b: Any, head: Any, i: Any, j: Any) -> Any:
            return score + bias[0, head, i, j]

        call = ours(bias=bias) if name == "rowmax" else flex(m, add=add)
        return measured(call, (1, m, h, d), 4 * h * m * m * d, (bias,))

    for name in ("rowmax", "flex"):
        yield {**about, "name": name}, lambda name=name: with_bias(name)
    about = {"case": "memory", "n": 65536, "d": 128, "h": 1, "b": 1}
    yield (
        {**about, "name": "rowmax"},
        lambda: measured(ours(), (1, 65536, 1, 128), 4 * 65536.0**2 * 128),
    )


def host_time() -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Of a causal forward without gradients, and SDPA's beside it, since processors differ."""

    def each(call: Attention) -> Row:
        q, k, v = (
            torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        times = []
        with torch.no_grad():
            for _ in range(300):
                call(q, k, v)
            for _ in range(30):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    call(q, k, v)
                times.append((time.perf_counter() - start) / 50)
        return {"host_us": round(1e6 * sorted(times)[len(times) // 2], 1)}

    about = {"case": "host time of a forward", "n": 128, "d": 64, "h": 4, "b": 1}
    calls = {
        "rowmax": ours(causal=True),
        "sdpa": heads_first(partial(scaled_dot_product_attention, is_causal=True)),
        "flex": flex(128, causal_mask),
    }
    for name, call in calls.items():
        yield {**about, "name": name}, partial(each, call)


PARTS = {"features": feature_table, "host": host_time, "main": main_table}
COLUMNS = (
    "case", "name", "b", "n", "h", "d", "forward_tflops", "backward_tflops", "both_tflops",
    "forward_ms", "backward_ms", "peak_mib", "host_us", "device", "torch", "triton", "date",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--only", default="", help="names of implementations, with commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after as long")
    given = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # pyright: ignore  # backward runs often
    torch._dynamo.config.recompile_limit = 256  # pyright: ignore
    torch._dynamo.config.accumulated_recompile_limit = 4096  # pyright: ignore
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    names = [name for name in given.only.split(",") if name]
    start = time.perf_counter()
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for part in PARTS if given.part == "all" else (given.part,):
            for case, run in PARTS[part]():
                if names and case["name"] not in names:
                    continue
                if time.perf_counter() - start > given.seconds:
                    return
                torch.manual_seed(0)
                torch.cuda.empty_cache()
                try:
                    row = run()
                except Exception as error:  # another library may refuse a case
                    print(case, repr(error)[:200], flush=True)
                    continue
                writer.writerow({**case, **row, **about})
                file.flush()
                print(*case.values(), row, flush=True)
                time.sleep(0.3)  # the card slows down when it is hot


if __name__ == "__main__":
    main()
