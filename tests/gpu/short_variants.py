"""Backwards and forwards of short sequences: check random calls, time tiles against peers.

``check SECONDS SEED`` compares random calls with the definition. ``warm N`` compiles the kernels of
cell N. ``time SECONDS`` prints microseconds of every variant: on the GPU (the host is ahead), and
by the clock.
"""

from __future__ import annotations

import csv
import importlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import rowmax
from rowmax.call import dispatch, normalize, recent
from rowmax.call.inputs import Tensors
from rowmax.gpu import launch, short_keys, tiles
from rowmax.gpu.tiles import Tiles
from tests.drawn import Drawn, RefusedError, UnpreparedError, draw_group, varied, wrong

backward = importlib.import_module("rowmax.gpu.triton.backward")
T = Tiles
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: B, Nq, Nk, H, Hk, D, causal
CELLS: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "64x197 h12 d64": (64, 197, 197, 12, 12, 64, False),
    "256x77 h12 d64 causal": (256, 77, 77, 12, 12, 64, True),
    "8x128 h16 d64": (8, 128, 128, 16, 16, 64, False),
    "8 cross 4096x77 h8 d40": (8, 4096, 77, 8, 8, 40, False),
    "512x64 h16 d64": (512, 64, 64, 16, 16, 64, False),
    "64x128 h16 d64": (64, 128, 128, 16, 16, 64, False),
    "64x128 h16 d64 causal": (64, 128, 128, 16, 16, 64, True),
    "64x128 h16 d128": (64, 128, 128, 16, 16, 128, False),
    "64x128 h16 d128 causal": (64, 128, 128, 16, 16, 128, True),
    "64x256 h16 d64": (64, 256, 256, 16, 16, 64, False),
    "64x256 h16 d64 causal": (64, 256, 256, 16, 16, 64, True),
    "8x197 h12 d64": (8, 197, 197, 12, 12, 64, False),
    "32x77 h8 d64 causal": (32, 77, 77, 8, 8, 64, True),
    "2 cross 4096x77 h8 d40": (2, 4096, 77, 8, 8, 40, False),
    "512x50 h16 d64 causal": (512, 50, 50, 16, 16, 64, True),
    "256x64 h16 d128": (256, 64, 64, 16, 16, 128, False),
    "64x128 h16 hk4 d64": (64, 128, 128, 16, 4, 64, False),
    "256x77 h8 d64": (256, 77, 77, 8, 8, 64, False),
    "16x512 h16 hk4 d64 x64 keys": (16, 512, 64, 16, 4, 64, False),
}
#: by (keys that a program holds, padded head size): (queries, warps, stages, registers)
BACKWARD = {
    (64, 64): ((32, 4, 3, 0), (32, 4, 4, 0), (64, 4, 3, 0), (16, 4, 4, 0)),
    (64, 128): ((32, 4, 3, 0), (32, 8, 3, 0), (16, 4, 3, 0)),
    (128, 64): ((32, 8, 3, 0), (16, 4, 3, 0), (16, 4, 4, 0), (32, 8, 3, 128), (16, 8, 4, 128),
                (64, 8, 2, 0)),
    (128, 128): ((32, 8, 3, 0), (32, 8, 2, 0), (16, 8, 3, 0)),
    (256, 64): ((32, 8, 3, 0), (32, 8, 4, 0), (32, 8, 2, 0)),
}  # fmt: skip
FORWARD = (T(64, 32, 4, 3), T(64, 32, 4, 4), T(64, 32, 4, 2), T(64, 64, 4, 3), T(64, 16, 4, 4),
           T(32, 32, 4, 3), T(64, 64, 4, 4))  # fmt: skip
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def forget() -> None:
    """Empty the caches of calls, so that the next call of a kind is planned again."""
    dispatch._prepared.clear()
    dispatch.choose.cache_clear()
    recent._calls.clear()
    normalize._passed.clear()
    launch._jobs.clear()


@contextmanager
def forced(
    backward_tiles: Tiles | None, registers: int = 0, forward_tiles: Tiles | None = None
) -> Iterator[None]:
    """Send backwards to the kernel of few keys with these tiles, or none of them."""
    of, usual, make = short_keys.tiles_of, launch.tiles_for, launch.Job.__init__

    def tiles_of(problem: Any, wanted: Any = None) -> Tiles | None:
        if backward_tiles is None or problem.varlen or (wanted and any(wanted[3:])):
            return None
        return backward_tiles

    def init(job: Any, kernel: Any, *args: Any) -> None:
        make(job, kernel, *args)
        if registers and kernel.fn.__name__ == "short_kernel":
            job.options["maxnreg"] = registers

    def tiles_for(job: str, problem: Any, device: Any) -> Tiles:
        if job == "forward" and forward_tiles is not None:
            return forward_tiles
        return usual(job, problem, device)

    short_keys.tiles_of, launch.tiles_for, launch.Job.__init__ = tiles_of, tiles_for, init
    forget()
    try:
        yield
    finally:
        short_keys.tiles_of, launch.tiles_for, launch.Job.__init__ = of, usual, make
        forget()


# --- check -------------------------------------------------------------------------------------


def check(seconds: float, seed: int) -> None:
    end, rng = time.monotonic() + seconds, random.Random(seed)
    gpu = torch.cuda.is_available()
    device, budget = ("cuda", 4_000_000) if gpu else ("cpu", 3000)
    if not gpu:  # the interpreter
        dispatch._DEVICES.pop("triton")
    counts = {"right": 0, "wrong": 0, "refused": 0}
    while time.monotonic() < end:
        dtype = rng.choice(("bfloat16", "float16") if gpu else ("float16",))
        group = draw_group(rng, dtype, "triton", budget)
        if group.sequences or max(group.d, group.dv or group.d) > 128:
            continue
        width = tiles.padded(max(group.d, group.dv or group.d, 64))
        for _ in range(4):
            case = varied(rng, group, budget)
            nk = min(case.nq if case.nk is None else case.nk, short_keys.MOST_ELEMENTS // width)
            if case.positions or not nk:
                continue
            case = replace(case, nk=nk, nq=min(case.nq, 600), grads=("q", "k", "v"))
            height = max(64, tiles.padded(nk))
            block_q, warps, stages, registers = rng.choice(BACKWARD[height, width])
            shape = Tiles(block_q, height, warps, stages, parts=rng.choice((1, 1, 2, 3)))
            with forced(shape, registers):
                try:
                    texts = wrong(Drawn(case, dtype, rng.randint(0, 9999)), "triton", device)
                except (RefusedError, UnpreparedError) as error:
                    if counts["refused"] < 3:
                        print("refused", str(error)[:300], flush=True)
                    counts["refused"] += 1
                    continue
            counts["wrong" if texts else "right"] += 1
            if texts:
                print("WRONG", shape, registers, dtype, case, texts, flush=True)
    print("checked", seed, counts, flush=True)


# --- time --------------------------------------------------------------------------------------


def inputs(cell: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    b, nq, nk, h, hk, d, _ = cell
    shapes = ((b, nq, h, d), (b, nk, hk, d), (b, nk, hk, d))
    q, k, v = (
        torch.randn(s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes
    )
    return q, k, v, torch.randn_like(q)


def variants(cell: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Return (backend, tiles of the backward, registers, tiles of the forward) by name."""
    b, nq, nk, _, hk, d, causal = cell
    found: dict[str, tuple[Any, ...]] = {
        "hopper": ("hopper", None, 0, None),
        "triton": ("triton", None, 0, None),
    }
    height, width = max(64, tiles.padded(nk)), max(64, tiles.padded(d))
    heads = b * hk
    for block_q, warps, stages, registers in BACKWARD.get((height, width), ()):
        parts = [1] if nq < 512 else [max(1, 264 // heads)]
        for count in dict.fromkeys(parts):
            name = f"short q{block_q} w{warps} s{stages} r{registers} p{count}"
            shape = Tiles(block_q, height, warps, stages, parts=count)
            found[name] = ("triton", shape, registers, None)
    if height <= 256:
        for shape in FORWARD:
            if shape.block_k <= height and shape.block_q <= max(64, tiles.padded(nq)):
                name = f"forward {shape.block_q} {shape.block_k} w{shape.warps} s{shape.stages}"
                found[name] = ("triton", None, 0, shape)
    return found


Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]


def calls_of(cell: tuple[Any, ...], data: tuple[torch.Tensor, ...]) -> tuple[Calls, dict[str, Any]]:
    """Return (forward, backward) of each variant, recorded, and their gradients."""
    q, k, v, dout = data
    causal, group = cell[6], cell[3] // cell[4]
    mask = rowmax.Causal() if causal else None
    found: Calls = {}
    grads: dict[str, Any] = {}
    for name, (backend, shape, registers, forward_tiles) in variants(cell).items():
        try:
            with forced(shape, registers, forward_tiles):
                def forward(backend: str = backend) -> Any:
                    return rowmax.attention(q, k, v, mask=mask, backend=backend)

                kept = [forward() for _ in range(3)]
                prepared = list(dispatch._prepared.values())[-1]
                tensors = Tensors(q, k, v)
                fast = lambda p=prepared, t=tensors: p.forward(t)  # noqa: E731
                out = kept[-1]
                back = lambda out=out: torch.autograd.grad(  # noqa: E731
                    out, (q, k, v), dout, retain_graph=True
                )
                if forward_tiles is None:
                    for _ in range(3):
                        grads[name] = back()
                else:
                    back = None
                torch.cuda.synchronize()
                first = None if shape is not None else fast
                found[name] = (first, back)
        except Exception as error:  # noqa: BLE001
            print("FAILED", name, repr(error)[:300], flush=True)
    for name, kind in PEERS.items():
        try:
            x = [t.transpose(1, 2) for t in (q, k, v)]

            def peer(kind: Any = kind, x: Any = x) -> Any:
                return sdpa(*x, is_causal=causal, enable_gqa=group > 1)

            with sdpa_kernel(kind):
                out = peer()
            dot = dout.transpose(1, 2)
            back = lambda out=out: torch.autograd.grad(  # noqa: E731
                out, (q, k, v), dot, retain_graph=True
            )
            grads[name] = back()
            with torch.no_grad(), sdpa_kernel(kind):
                peer()
            torch.cuda.synchronize()
            found[name] = (peer, back)
        except Exception as error:  # noqa: BLE001
            print("FAILED", name, repr(error)[:300], flush=True)
    return found, grads


def queued(call: Callable[[], Any], times: int) -> float:
    """Return microseconds of a call on the GPU, the host ahead of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.9e6 * (1 + 0.45 * times)))  # cycles: the host's time
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def clocked(call: Callable[[], Any], times: int) -> float:
    """Return microseconds of a call by the clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / times


def measure(seconds: float) -> None:
    end = time.monotonic() + seconds
    rows = []
    for cell_name, cell in CELLS.items():
        if time.monotonic() > end:
            print("out of time before", cell_name)
            break
        data = inputs(cell)
        calls, grads = calls_of(cell, data)
        for name, found in grads.items():
            peer = grads.get("cudnn") or grads.get("flash")
            if peer:
                off = max(
                    float((x.float() - y.float()).norm() / y.float().norm())
                    for x, y in zip(found, peer, strict=True)
                )
                if not off < 0.02:
                    print("DIFFERS", cell_name, name, off, flush=True)
        times: dict[tuple[str, str, str], list[float]] = {}
        jobs = [
            (name, way, call)
            for name, pair in calls.items()
            for way, call in zip(("fwd", "bwd"), pair, strict=True)
            if call is not None
        ]
        for turn in range(5):
            for n in range(len(jobs)):
                name, way, call = jobs[(n + turn * 5) % len(jobs)]
                among = sdpa_kernel(PEERS[name]) if name in PEERS else nullcontext()
                with torch.set_grad_enabled(way == "bwd"), among:
                    t = queued(call, 8)
                    times.setdefault((name, way, "gpu"), []).append(t)
                    if not name.startswith("forward") and turn < 3:
                        t = clocked(call, 20)
                        times.setdefault((name, way, "clock"), []).append(t)
        for way in ("fwd", "bwd"):
            print(f"--- {cell_name} {way}: gpu us, clock us")
            shown = [
                (median(times[name, way, "gpu"]), median(times.get((name, way, "clock"), [0])), name)
                for name in calls
                if (name, way, "gpu") in times
            ]
            for gpu, clock, name in sorted(shown):
                print(f"    {gpu:8.1f} {clock:8.1f}  {name}")
                rows.append((cell_name, way, name, round(gpu, 2), round(clock, 2)))
        sys.stdout.flush()
        del calls, grads, data
        torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "short-times.csv"), "w") as file:
        csv.writer(file).writerows([("cell", "way", "variant", "gpu_us", "clock_us"), *rows])


def host() -> None:
    """Print the host's microseconds of a backward: whole, in the Function, prepared, replayed."""
    from rowmax.gpu import replay
    from rowmax.operators import autograd as operators

    cell = CELLS["8x128 h16 d64"]
    data = inputs(cell)
    q, k, v, dout = data
    calls, _ = calls_of(cell, data)
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                spent.setdefault(name, []).append(1e6 * (time.perf_counter() - start))

        return run

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            return given[0].detach().clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return q, k, v

    nothing, clone = Nothing.apply(q, k, v), q.clone()
    some = {
        "python function alone": lambda: torch.autograd.grad(nothing, (q, k, v), dout,
                                                             retain_graph=True),
        "clone alone": lambda: torch.autograd.grad(clone, (q,), dout, retain_graph=True),
        **{name: pair[1] for name, pair in calls.items() if pair[1] is not None},
    }  # fmt: skip
    before = operators._Attention.backward, dispatch.Prepared.backward, replay.Record.__call__
    operators._Attention.backward = staticmethod(timed("function", before[0]))
    dispatch.Prepared.backward = timed("prepared", before[1])
    replay.Record.__call__ = timed("record", before[2])
    try:
        for turn in range(3):
            for name, call in some.items():
                spent.clear()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    call()
                whole = 1e4 * (time.perf_counter() - start)
                torch.cuda.synchronize()
                parts = {part: round(median(found), 1) for part, found in spent.items()}
                if turn:
                    print(f"host {name:30s} {whole:7.1f} us a call; medians {parts}", flush=True)
    finally:
        operators._Attention.backward = staticmethod(before[0])
        dispatch.Prepared.backward, replay.Record.__call__ = before[1:]


def everything() -> None:
    """Compile and check in processes of their own, then time."""
    me = [sys.executable, "-m", "tests.gpu.short_variants"]
    begun = time.monotonic()
    some = [subprocess.Popen([*me, "warm", str(n)]) for n in range(len(CELLS))]
    some += [subprocess.Popen([*me, "check", "40", str(n)]) for n in range(20, 32)]
    for one in some:
        try:
            one.wait(timeout=max(1, 65 - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            one.kill()
            print("killed", one.args, flush=True)
    print("compiled and checked", round(time.monotonic() - begun), "s", flush=True)
    subprocess.run([*me, "host"], timeout=25, check=False)
    left = max(20, 140 - (time.monotonic() - begun))
    subprocess.run([*me, "time", str(left - 15)], timeout=left)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    what, *numbers = [*sys.argv[1:], "all"][: len(sys.argv) or 1]
    if what == "check":
        check(float(numbers[0]), int(numbers[1]))
    elif what == "warm":
        cell = list(CELLS.values())[int(numbers[0])]
        calls_of(cell, inputs(cell))
    elif what == "host":
        host()
    elif what == "time":
        measure(float(numbers[0]))
    else:
        everything()


if __name__ == "__main__":
    main()
