"""The Hopper backward on a Hopper GPU: the table of cases, odd lengths, features over every head
size, the Triton backend's answers to the same, and repeats that must agree to the bit.

    python -m tests.gpu.hopper_backward --out result.csv --minutes 5 [--first] [--only NAME]
        [--after result.csv]

Each case runs in a process that is killed after a time limit, over memory filled with NaN, by the
rule of ``tests/tolerance.py``. ``--first`` runs a dozen small cases that touch every barrier.
Cases that the backend refuses are listed with its reason; what an earlier result has right
(``--after``) is taken from there.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from triton import __version__ as triton_version

from rowmax.call.problem import Gradients, Wanted
from rowmax.gpu import hopper, triton
from rowmax.reference.tolerance import GRADIENT, LIMITS
from tests.cases import CASES, LEAVES, Case, make
from tests.gpu import children
from tests.spoiled import padding_matters_backward
from tests.tolerance import complaint, cotangents, expected, poisoned

LENGTHS = (
    (1, 1),
    (3, 3),
    (64, 1),
    (239, 1),
    (799, 3),
    (1, 300),
    (113, 203),
    (108, 256),
    (1023, 1024),
    (1024, 1023),
)
SIZES = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (192, 192), (80, 72), (40, 40))
FEATURES = (
    {},
    {"causal": True},
    {"left": 100, "right": 30},
    {"causal": True, "left": 70, "softcap": 20.0},
    {"causal": True, "sink": True, "alibi": True},
    {"causal": True, "sink": True},
    {"causal": True, "documents": "sorted"},
    {"lengths": (0.3, 0.0), "sink": True},
    {"bias": "bhqk"},
    {"bias": "1hqk", "causal": True},
    {"bias": "b11k"},
    {"hk": 1, "causal": True},
    {"hk": 2, "layout": "bhnd"},
    {"hk": 2, "bias": "b1qk", "causal": True},
    {"hk": 2, "bias": "11qk", "left": 100, "right": 30},
    {"hk": 2, "bias": "1hqk", "causal": True, "softcap": 20.0, "alibi": True},
    {"hk": 2, "bias": "1hqk", "lengths": (0.7, 0.2), "causal": True},
    {"hk": 2, "bias": "11qk", "documents": "batched", "left": 100},
    {"bias": "b1qk", "lengths": (0.0, 0.7)},
)
COLUMNS = ("case", "dtype", "deterministic", "complaints", "device", "torch", "triton", "date")
PACKED = ((5, 90), (0, 17), (300, 270), (33, 0), (1, 40), (700, 700))


def cases() -> list[Case]:
    odd = [
        Case(f"odd-{n}-{m}-{d}{'-causal' * c}", b=1, nq=n, nk=m, hq=4, hk=2, d=d, causal=c)
        for d in (64, 128, 256)
        for n, m in LENGTHS
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


def first() -> list[Case]:
    """One tile of each kind, then several, then what changes the order of the tiles."""
    return [
        Case(f"first-{n}-{m}-{d}{'-causal' * c}", b=1, nq=n, nk=m, hq=1, d=d, causal=c)
        for n, m, d, c in (
            (64, 128, 64, False),
            (64, 128, 128, False),
            (1, 1, 64, False),
            (64, 1, 128, True),
            (256, 256, 64, False),
            (256, 256, 128, True),
            (300, 520, 64, True),
            (520, 300, 128, False),
        )
    ] + [
        Case("first-heads", b=3, nq=1000, hq=8, hk=2, d=128, causal=True),
        Case("first-window", nq=1000, nk=1100, hq=4, d=64, left=100, right=20),
        Case("first-lengths", b=2, nq=300, nk=500, d=128, lengths=(0.4, 0.0)),
        Case("first-packed", d=64, sequences=PACKED, causal=True, hk=2),
        Case("first-shared-bias", nq=300, nk=328, hq=4, hk=2, d=64, bias="1hqk", causal=True),
        Case(
            "first-shared-bias-lengths", nq=200, nk=328, hq=2, d=64, bias="1hqk", lengths=(0.7, 0.2)
        ),
        Case(
            "first-shared-bias-heads", nq=200, nk=328, hq=2, d=128, bias="b1qk", lengths=(0.0, 0.7)
        ),
        Case(
            "first-shared-bias-documents",
            nq=328,
            hq=4,
            hk=2,
            bias="11qk",
            documents="sorted",
            d=64,
            causal=True,
        ),
        Case(
            "first-shared-bias-batched",
            b=3,
            nq=200,
            nk=328,
            hq=4,
            hk=2,
            bias="1hqk",
            documents="batched",
            d=64,
            causal=True,
        ),
        Case("first-own-bias", nq=300, nk=328, hq=4, hk=2, d=128, bias="bhqk", causal=True),
        Case("first-own-bias-lengths", nq=200, nk=328, hq=2, d=64, bias="bhqk", lengths=(0.4, 0.0)),
        Case("first-own-bias-window", nq=300, nk=328, hq=2, d=64, bias="bhqk", left=90, right=20),
        Case("first-own-bias-documents", nq=200, hq=2, d=64, bias="bhqk", documents="sorted"),
        Case("first-row-bias", nq=300, nk=331, hq=4, hk=2, d=128, bias="b11k", causal=True),
        Case("first-row-bias-lengths", nq=100, nk=331, hq=2, d=64, bias="b11k", lengths=(0.7, 0.2)),
        Case("first-row-bias-wide", nq=150, nk=201, hq=2, d=256, bias="1h1k"),
        Case("first-column-bias", nq=131, nk=201, hq=2, d=64, bias="1hq1", sink=True),
        Case("first-softcap-sink", nq=500, d=128, softcap=20.0, sink=True, causal=True),
    ]


def check(case: Case, dtype: str, deterministic: bool, repeats: int) -> list[str]:
    call = make(case, "cuda", getattr(torch, dtype))
    problem, tensors = call.problem()
    problem = problem._replace(deterministic=deterministic)
    reason = hopper.supports(problem, "backward")
    if reason is not None:
        return ["refused: " + reason]
    dout, dlse = cotangents(call)
    want = expected(call, dout, dlse)
    # of the reference, rounded: what is wrong is then the backward's
    out, lse = want.ref.out.to(problem.dtype), want.ref.lse.float()
    if case.packed:
        out, lse, dout, dlse = (t[None] for t in (out, lse, dout, dlse))
    lacked = hopper.lacks(problem, "backward")
    wanted = Wanted(*(name in call.leaves and f"d{name}" not in lacked for name in LEAVES))
    given = (problem, tensors, out, lse, dout, dlse, wanted)

    with poisoned():
        got = hopper.backward(*given)
    torch.cuda.synchronize()
    found = judged(got, want, lacked)
    wide = max(problem.d, problem.dv) > 128
    reached = padding_matters_backward(
        problem,
        tensors,
        (out, lse, dout, dlse),
        wanted,
        hopper.backward,
        got,
        lambda name: deterministic or wide or name != "q",
    )
    found += [reached] if reached else []
    twin = triton.backward(*given)
    for name, x, y in zip(LEAVES, got, twin, strict=True):
        if x is None or y is None:
            continue
        off, size = ((t.double()).norm().item() for t in (x.double() - y.double(), y))
        if not off <= 2 * LIMITS[problem.dtype] * size + 1e-6 * y.numel() ** 0.5:
            found.append(f"d{name}: {off:.3g} from the Triton backend's, of size {size:.3g}")
    for n in range(repeats):
        again = hopper.backward(*given)
        for name, x, y in zip(LEAVES, got, again, strict=True):
            if x is None or y is None or torch.equal(x, y):
                continue
            if deterministic or name != "q":
                return [*found, f"repeat {n}: d{name} differs"]
            off, size = (t.double().norm().item() for t in (x.double() - y.double(), y))
            if not off <= LIMITS[problem.dtype] * size + 1e-6 * y.numel() ** 0.5:
                return [*found, f"repeat {n}: dq differs by {off:.3g} of {size:.3g}"]
    return found


def judged(got: Gradients, want, lacked: Mapping[str, str]) -> list[str]:
    """What is wrong with the gradients, but for those that are not to be there."""
    found = []
    for name, ref in want.ref.gradients.items():
        if f"d{name}" in lacked:
            continue
        x: Tensor | None = getattr(got, name)
        if x is None:
            found.append(f"d{name}: missing")
            continue
        x, std = x.view(ref.shape), want.std.gradients[name]
        found.append(
            complaint(f"d{name}", x, ref, std, want.dtype, GRADIENT, want.noise[f"d{name}"])
        )
    return [text for text in found if text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hopper_backward.csv"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a case may take")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--after", type=Path, help="a result to go on from")
    options = parser.parse_args()
    chosen = [c for c in (first() if options.first else cases()) if options.only in c.name]
    jobs = [
        (case, dtype, deterministic, options.repeats)
        for case in chosen
        for dtype in ("bfloat16", "float16")
        for deterministic in (False, True)
    ]
    if not options.first:
        random.Random(options.seed).shuffle(jobs)
    rows, bad = right_before(options.after) if options.after else [], 0
    known = {tuple(row[:3]) for row in rows}
    jobs = [job for job in jobs if (job[0].name, job[1], str(job[2])) not in known]
    begin = time.monotonic()
    about = (
        torch.cuda.get_device_name(),
        torch.__version__,
        triton_version,
        datetime.date.today().isoformat(),
    )
    for job, found in children.run(
        check, jobs, options.workers, options.limit, 60 * options.minutes
    ):
        case, dtype, deterministic, _ = job
        wrong = [text for text in found if not text.startswith("refused")]
        rows.append((case.name, dtype, str(deterministic), "; ".join(found), *about))
        bad += bool(wrong)
        if wrong:
            print(case.name, dtype, "deterministic" * deterministic, *wrong, flush=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *sorted(rows)])
    refused = sum(row[3].startswith("refused") for row in rows)
    print(
        f"{len(rows) - bad - refused} right, {bad} wrong, {refused} refused, "
        f"{len(jobs) + len(known) - len(rows)} not run, {time.monotonic() - begin:.0f} s"
    )
    return int(bad > 0 or len(rows) < len(jobs) + len(known))


def right_before(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        rows = [tuple(row[name] for name in COLUMNS) for row in csv.DictReader(file)]
    return [row for row in rows if not row[3] or row[3].startswith("refused")]


if __name__ == "__main__":
    sys.exit(main())
