"""The Hopper forward on a Hopper GPU: the table of cases, odd lengths, features over every head
size, and repeats that must agree to the bit.

    python -m tests.gpu.hopper --out result.csv --minutes 5

Each case runs in a process of its own, killed after a time limit (a wrong count at a barrier
hangs), over memory filled with NaN, by the rule of ``tests/tolerance.py``. Cases that the backend
refuses are listed with its reason.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from rowmax.gpu.hopper import forward, supports
from rowmax.reference import dense
from tests.cases import CASES, Case, make
from tests.spoiled import padding_matters
from tests.tolerance import complaint, poisoned

LENGTHS = (
    (1, 1),
    (3, 3),
    (64, 1),
    (239, 1),
    (799, 3),
    (113, 203),
    (108, 256),
    (1023, 1024),
    (1024, 1023),
)
SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 72), (40, 40))
FEATURES = (
    {},
    {"causal": True},
    {"left": 100, "right": 30},
    {"causal": True, "left": 70, "softcap": 20.0},
    {"causal": True, "sink": True, "alibi": True},
    {"causal": True, "documents": "sorted"},
    {"lengths": (0.3, 0.0), "sink": True},
    {"bias": "1hqk", "causal": True},
    {"bias": "b11k"},
    {"hk": 1, "causal": True},
)
PACKED = ((5, 90), (0, 17), (300, 270), (33, 0), (1, 40), (700, 700))


def cases() -> list[Case]:
    odd = [
        Case(f"odd-{n}-{m}-{d}{'-causal' * c}", b=1, nq=n, nk=m, hq=4, hk=2, d=d, causal=c)
        for n, m in LENGTHS
        for d in (64, 128, 256)
        for c in (False, True)
    ]
    wide = [
        Case(f"wide-{d}-{dv}-{n}", nq=600, nk=728, d=d, dv=dv, **f)
        for d, dv in SIZES
        for n, f in enumerate(FEATURES)
    ]
    packed = [
        Case(f"packed-{d}-{dv}{'-causal' * c}", d=d, dv=dv, sequences=PACKED, causal=c, hk=2)
        for d, dv in SIZES
        for c in (False, True)
    ]
    return [*odd, *wide, *packed, *CASES]


def check(case: Case, dtype: str, repeats: int) -> list[str]:
    call = make(case, "cuda", getattr(torch, dtype))
    problem, tensors = call.problem()
    reason = supports(problem, "forward")
    if reason is not None:
        return ["refused: " + reason]
    ref = dense.attention(problem, tensors, torch.float64)
    std = dense.attention(problem, tensors, problem.dtype)
    with poisoned():
        got = forward(problem, tensors)
    found = [
        complaint(name, *three, problem.dtype)
        for name, *three in zip(("out", "lse"), got, ref, std, strict=True)
    ]
    found.append(padding_matters(problem, tensors, forward, got))
    for n in range(repeats):
        again = forward(problem, tensors)
        if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            return [*(text for text in found if text), f"repeat {n} differs"]
    return [text for text in found if text]


def job(case: Case, dtype: str, repeats: int) -> list[str]:
    try:
        return check(case, dtype, repeats)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hopper.csv"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="names that hold one of these, with commas")
    options = parser.parse_args()
    names = options.only.split(",")
    chosen = [case for case in cases() if any(name in case.name for name in names)]
    todo = [(case, dtype) for case in chosen for dtype in ("bfloat16", "float16")]
    random.Random(0).shuffle(todo)
    end = time.monotonic() + 60 * options.minutes
    rows, bad = [], 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        futures = {pool.submit(job, c, d, options.repeats): (c, d) for c, d in todo}
        try:
            for future in as_completed(futures, timeout=max(1.0, end - time.monotonic())):
                case, dtype = futures[future]
                found = future.result()
                wrong = [text for text in found if not text.startswith("refused")]
                rows.append((case.name, dtype, "; ".join(found)))
                if wrong:
                    bad += 1
                    print(case.name, dtype, *wrong, flush=True)
        except TimeoutError:
            print(f"out of time: {len(todo) - len(rows)} cases not run")
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([("case", "dtype", "complaints"), *rows])
    refused = sum(r[2].startswith("refused") for r in rows)
    print(f"{len(rows) - bad - refused} right, {bad} wrong, {refused} refused")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
