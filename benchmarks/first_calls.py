"""Time the first calls of a process: forward, then backward, with and without compiled kernels.

    python -m benchmarks.first_calls --csv first.csv                  (a GPU, about 100 s)
    python -m benchmarks.first_calls --head-dims 64 --repeats 5
    python -m benchmarks.first_calls --pause 3 --profile profiles
    python -m benchmarks.first_calls --device cpu --seconds 300

Each row is a process of its own. Of a head size the first has empty caches of compiled kernels and
of Python's compiled modules ("cold"); ``--repeats`` more find them filled ("warm"). A process
imports torch and rowmax, makes its tensors and differentiates a product of matrices, for which
torch imports SymPy. Then it times attention up to the end of its work on the device: its first
forward, its first backward after a pause, and each again.

    import      ms of ``import rowmax``, after torch
    forward     ms of the first forward with gradients
    backward    ms of the first backward
    again       ms of the second forward and backward, which record their launches
    error       greatest difference of out, dq, dk, dv of the first calls from torch's in float32

``--profile FOLDER`` writes what Python spent in each call, which makes a call slower. ``--stages``
prints each compiled kernel and the ms of its stages.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

COLUMNS = ("head_dim", "cache", "device", "import", "forward", "backward", "again", "error")
SIZE = (2, 2048, 8)  # sequences, tokens, heads


def main() -> int:
    """Run the processes; return 1 if one failed."""
    a = _arguments()
    if a.child is not None:
        print(json.dumps(_child(a, a.child)), flush=True)
        return 0
    start, failed = time.perf_counter(), False
    rows = []
    print(*(f"{name:>9}" for name in COLUMNS), flush=True)
    for d in a.head_dims:
        with tempfile.TemporaryDirectory() as cache:
            for nth in range(1 + a.repeats):
                left = a.seconds - (time.perf_counter() - start)
                if left < 5:
                    print("no time is left for more", flush=True)
                    break
                row = _run(a, d, cache, "warm" if nth else "cold", left)
                failed |= row is None
                if row is not None:
                    rows.append(row)
                    print(*(f"{row[name]!s:>9}" for name in COLUMNS), flush=True)
                    _write(a.csv, rows)
    return int(failed)


def _arguments() -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3, help="processes with a filled cache")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before the backward")
    parser.add_argument("--seconds", type=float, default=140.0, help="for all processes")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--profile", type=Path, default=None)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(a: argparse.Namespace, d: int, cache: str, kind: str, seconds: float) -> Any:
    """Return the row of a process, or None if it failed."""
    command = [sys.executable, "-m", "benchmarks.first_calls", "--child", str(d)]
    command += ["--device", a.device, "--pause", str(a.pause)]
    command += ["--dtype", a.dtype] if a.dtype else []
    command += ["--stages"] if a.stages else []
    command += ["--profile", str(a.profile / f"{d}-{kind}")] if a.profile else []
    places = {"TRITON_CACHE_DIR": "triton", "NUMBA_CACHE_DIR": "numba", "ROWMAX_CACHE": "rowmax"}
    places["PYTHONPYCACHEPREFIX"] = "python"
    env = os.environ | {name: str(Path(cache) / folder) for name, folder in places.items()}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, timeout=seconds, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)
        return None
    *printed, last = done.stdout.splitlines()
    for line in printed:
        print(line, flush=True)
    return {"head_dim": str(d), "cache": kind, **json.loads(last)}


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


# --- the timed process -------------------------------------------------------------------------


def _child(a: argparse.Namespace, d: int) -> dict[str, Any]:
    """Return the times of this process."""
    import torch

    start = time.perf_counter()
    import rowmax

    imported = time.perf_counter() - start
    cuda = a.device == "cuda"
    dtype = getattr(torch, a.dtype or ("bfloat16" if cuda else "float32"))
    b, n, h = SIZE
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(b, n, h, d, dtype=dtype, device=a.device, requires_grad=True) for _ in range(3)
    )
    dout = torch.randn_like(q)
    product = q[0, :64, 0] @ k[0, :64, 0].T
    torch.autograd.grad(product, (q, k), torch.ones_like(product))
    _wait(a.device)
    if a.stages:
        _print_stages()
    results, seconds = (), []
    for turn in ("first", "second"):
        out, forward = _timed(a, f"forward-{turn}", lambda: rowmax.attention(q, k, v, causal=True))
        time.sleep(a.pause if turn == "first" else 0.0)
        found, backward = _timed(
            a, f"backward-{turn}", lambda out=out: torch.autograd.grad(out, (q, k, v), dout)
        )
        results = results or (out, *found)
        seconds.append((forward, backward))
    error = max(
        (x - y).abs().max().item() for x, y in zip(results, _of_torch(q, k, v, dout), strict=True)
    )
    (first_forward, first_backward), again = seconds
    of_calls = (imported, first_forward, first_backward, sum(again))
    times = zip(COLUMNS[3:7], (round(1e3 * x, 1) for x in of_calls), strict=True)
    name = torch.cuda.get_device_name().split()[-1] if cuda else "cpu"
    return {"device": name, **dict(times), "error": error}


def _of_torch(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    """Return (out, dq, dk, dv) of torch's attention, in float32."""
    import torch

    inputs = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    found = torch.autograd.grad(out, inputs, dout.float().transpose(1, 2))
    return tuple(x.detach().transpose(1, 2) for x in (out, *found))


def _timed(a: argparse.Namespace, name: str, call: Any) -> tuple[Any, float]:
    """Return (result, seconds) of a call and its work on the device."""
    import cProfile
    import pstats

    profile = cProfile.Profile() if a.profile and name.endswith("first") else None
    start = time.perf_counter()
    found = call() if profile is None else profile.runcall(call)
    _wait(a.device)
    seconds = time.perf_counter() - start
    if profile is not None:
        path = a.profile.with_name(f"{a.profile.name}-{name}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            stats = pstats.Stats(profile, stream=file)
            stats.sort_stats("cumtime").print_stats(120)
            stats.sort_stats("tottime").print_stats(40)
    return found, seconds


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _print_stages() -> None:
    """Print the stages of each compiled kernel as it is ready."""
    from triton import knobs

    start = time.perf_counter()

    def listen(src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        at = 1e3 * (time.perf_counter() - start)
        thread = threading.current_thread().name
        stages = {"front": times.ir_initialization, **dict(times.lowering_stages)}
        text = "  ".join(f"{name} {x / 1e3:.0f}" for name, x in stages.items())
        print(
            f"  {src.name}: {'found' if cache_hit else 'compiled'} at {at:.0f} ms, {thread}: {text}"
        )

    knobs.compilation.listener = listen


if __name__ == "__main__":
    sys.exit(main())
