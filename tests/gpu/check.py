"""The whole table on a GPU, and what only a GPU can show. One script runs it all.

    python -m tests.gpu.check --backend triton --out result.csv [--minutes 5] [--after result.csv]

Each case runs forward and backward in a process of its own pool, against the dense definition in
float64 on the same device, by the rule of ``tests/tolerance.py``, over memory that was filled
with NaN. Then: 200 repeats that must agree to the bit, odd lengths, tensors of more than 2^31
elements, CUDA graphs and streams. The result is a CSV, a row for each check, written anew with
every line of progress; what was not started after ``--minutes`` is left out, and what an earlier
result has right (``--after``) is taken from there.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import os
import queue
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.cases import CASES, COVERING, Case, make
from tests.tolerance import answer, complaints, cotangents, expected, poisoned

#: (case, dtype, times the table's lengths)
Item = tuple[Case, str, int]
#: ("case", Item), ("repeat", Case) or ("extreme", its name), and the backend
Job = tuple[str, Any, str]
#: (name, dtype, times the table's lengths, complaints, seconds)
Row = tuple[str, str, int, list[str], float]

EVERY = 20  # seconds, a line of progress
PATIENCE = 60  # seconds, for what began before the end
MOST_RESTARTS = 50

ODD_LENGTHS = (
    (1, 1),
    (3, 3),
    (64, 1),
    (239, 1),
    (799, 3),
    (113, 203),
    (108, 256),
    (1023, 1024),
    (1024, 1023),
    (4224, 4224),
)


def odd_lengths() -> list[Case]:
    return [
        Case(f"odd-{nq}-{nk}-{d}{'-causal' * c}", b=1, nq=nq, nk=nk, hq=4, hk=2, d=d, causal=c)
        for nq, nk in ODD_LENGTHS
        for d in (64, 128)
        for c in (False, True)
    ]


def repeated() -> list[Case]:
    """Each way that a gradient is summed."""
    more: dict[str, Any] = {"b": 4, "nq": 1000, "nk": 1100, "hq": 8, "hk": 2, "d": 64}
    return [
        Case("repeat-causal", causal=True, **more),
        Case("repeat-dropout", dropout=0.1, sink=True, **more),
        Case("repeat-bias", bias="1hqk", causal=True, **more),
        Case("repeat-bias-row", bias="b11k", **more),
        Case("repeat-bias-column", bias="1hq1", **more),
        Case("repeat-documents", documents="batched", causal=True, **more),
        Case("repeat-packed", sequences=((300, 300), (0, 7), (1500, 1700)), causal=True, hk=2),
        Case("repeat-wide", d=256, causal=True, **{k: v for k, v in more.items() if k != "d"}),
    ]


def items(quick: bool) -> list[Item]:
    # Heads of 512 need sums that a reference in the same dtype has no memory problem with, so
    # every case of the table runs at its own size and at eight times that.
    table: list[Item] = [(c, "bfloat16", 8) for c in (COVERING if quick else CASES)]
    table += [(c, d, 1) for c in COVERING for d in ("float32", "float16")]
    if not quick:
        table += [(c, "float32", 1) for c in CASES if c not in COVERING]
        table += [(c, "bfloat16", 1) for c in odd_lengths()]
    return table


def check(item: Item, backend: str) -> list[str]:
    """What is wrong with one case; nothing, if all is well."""
    case, dtype, size = item
    torch.backends.cuda.matmul.allow_tf32 = False
    call = make(case, "cuda", getattr(torch, dtype), size=size)
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend=backend)
    return complaints(got, want)


def check_repeats(case: Case, backend: str, times: int = 200) -> list[str]:
    call = make(case, "cuda", torch.bfloat16)
    grads = cotangents(call)
    first = answer(call, *grads, backend=backend)
    for n in range(times):
        again = answer(call, *grads, backend=backend)
        for (name, a, _), (_, b, _) in zip(first.items(), again.items(), strict=True):
            if not torch.equal(a, b):
                return [f"{name} differs in repeat {n}"]
    return []


def run(job: Job) -> Row:
    """(name, dtype, size, complaints, seconds) of one job, in a worker."""
    warnings.simplefilter("ignore")
    kind, item, backend = job
    start = time.perf_counter()
    key = key_of(job)
    try:
        if kind == "case":
            wrong = check(item, backend)
        elif kind == "repeat":
            wrong = check_repeats(item, backend)
        else:
            from tests.gpu import extremes

            wrong = getattr(extremes, item)(backend)
        torch.cuda.synchronize()
    except Exception:
        wrong = [traceback.format_exc(limit=-3)[-700:]]
    return *key, wrong, time.perf_counter() - start


def key_of(job: Job) -> tuple[str, str, int]:
    """(name, dtype, size)"""
    kind, item, _ = job
    return name_of(job), *(item[1:] if kind == "case" else ("bfloat16", 1))


def name_of(job: Job) -> str:
    kind, item, _ = job
    return item if kind == "extreme" else str(item[0] if kind == "case" else item)


def work(jobs: Any, rows: Any, end: float) -> None:
    """A worker: jobs until there are none or the time is over; one that breaks the device's
    context ends it with a status of 1."""
    while (job := jobs.get()) is not None and time.time() < end:
        rows.put(run(job))
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            sys.exit(1)


def run_all(
    jobs: list[Job], processes: int, end: float, progress: Callable[[list[Row]], None]
) -> list[Row]:
    """Every job that begins before ``end``, in processes of their own.

    One that breaks its process, or has it killed, gets another started for those that follow.
    Who is not done a while after the end hangs, and is not waited for.
    """
    context = multiprocessing.get_context("spawn")
    todo, rows = context.Queue(), context.Queue()
    for job in [*jobs, *[None] * processes]:
        todo.put(job)

    def started() -> Any:
        process = context.Process(target=work, args=(todo, rows, end), daemon=True)
        process.start()
        return process

    workers = [started() for _ in range(processes)]
    found: list[Row] = []
    told, restarts = time.time(), 0
    while time.time() < end + PATIENCE:
        for n, process in enumerate(workers):
            if process.exitcode not in (None, 0) and restarts < MOST_RESTARTS:
                restarts += 1
                print(f"a process ended with {process.exitcode}", flush=True)
                workers[n] = started()
        alive = any(p.is_alive() for p in workers)  # asked first: what it said last is read below
        try:
            row = rows.get(timeout=1.0)
        except queue.Empty:
            if not alive:
                break
        else:
            found.append(row)
            if row[3]:
                print("WRONG", *row[:3], *row[3], flush=True)
        if time.time() > told + EVERY:
            told = time.time()
            progress(found)
    todo.cancel_join_thread()  # nobody takes what is left
    for process in workers:
        process.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.csv"))
    parser.add_argument("--minutes", type=float, default=20.0, help="then no check is started")
    parser.add_argument("--quick", action="store_true", help="the covering cases alone")
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--after", type=Path, help="a result to go on from")
    given = parser.parse_args()
    from tests.gpu import extremes

    jobs: list[Job] = [("extreme", name, given.backend) for name in extremes.SMALL]
    jobs += [("repeat", case, given.backend) for case in repeated()]
    jobs += [("case", item, given.backend) for item in items(given.quick)]
    large: list[Job] = [("extreme", name, given.backend) for name in extremes.LARGE]
    rows = right_before(given.after) if given.after else []
    known = {row[:3] for row in rows}
    jobs, large = (
        [job for job in part if given.only in name_of(job) and key_of(job) not in known]
        for part in (jobs, large)
    )
    start, every = time.time(), len(rows) + len(jobs) + len(large)

    def progress(more: list[Row]) -> None:
        done = [*rows, *more]
        _write(given.out, done)
        bad = sum(bool(row[3]) for row in done)
        print(f"{len(done)} of {every}, {bad} wrong, {time.time() - start:.0f} s", flush=True)

    end = start + 60 * given.minutes
    rows += run_all(jobs, min(given.processes, max(len(jobs), 1)), end, progress)
    rows += run_all(large, 1, end, progress)  # one after the other: they do not share the memory
    bad, left = sum(bool(row[3]) for row in rows), every - len(rows)
    _write(given.out, rows)
    print(f"{len(rows)} checks, {bad} wrong, {left} not run, {time.time() - start:.0f} s")
    return 1 if bad or left else 0


def right_before(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [
            (row["check"], row["dtype"], int(row["times_length"]), [], float(row["seconds"]))
            for row in csv.DictReader(file)
            if row["result"] == "right"
        ]


def _write(path: Path, rows: list[Row]) -> None:
    import triton

    about = (
        torch.cuda.get_device_name(),
        torch.__version__,
        triton.__version__,
        datetime.date.today().isoformat(),
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "check",
                "dtype",
                "times_length",
                "result",
                "seconds",
                "device",
                "torch",
                "triton",
                "date",
            ]
        )
        for name, dtype, size, wrong, seconds in sorted(rows, key=lambda r: r[:3]):
            result = "; ".join(wrong) if wrong else "right"
            writer.writerow([name, dtype, size, result, f"{seconds:.2f}", *about])


if __name__ == "__main__":
    sys.exit(main())
