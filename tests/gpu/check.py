"""Run every check that needs a GPU; write a row for each.

    python -m tests.gpu.check --out result.csv --minutes 8
    python -m tests.gpu.check --kind cases,extremes --backend triton --after old.csv
    python -m tests.gpu.check --kind hopper-backward --tag "every barrier"
    python -m tests.gpu.check --device cpu --backend cpu,torch --only plain,causal
    compute-sanitizer --tool racecheck python -m tests.gpu.check --sanitize --only bias

The kinds are those of ``kinds.py``, the tags those of ``rowmax/testing/table.py``. Checks run in
processes side by side on every GPU of the host. Checks that do not begin in ``--minutes`` are left
for a later run with ``--after``, which keeps the rows that are right or refused.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import results
from tests.gpu.kinds import KINDS, ON_CPU, Check, run
from tests.gpu.pool import PROCESSES, Event, Job, Pool, default_processes, visible_gpus

EVERY = 20.0  # seconds between lines of progress
PATIENCE = 60.0  # seconds for checks that began before the end


class Report:
    """The rows so far."""

    def __init__(self, given: argparse.Namespace, rows: list[results.Row], total: int) -> None:
        self.path, self.rows, self.total = given.out, rows, total
        self.machine = results.machine(given.device)
        self.begin = self.last = time.time()

    def add(self, check: Check, result: str, seconds: float) -> None:
        row = results.Row(*check.key, result, f"{seconds:.2f}", *self.machine)
        self.rows.append(row)
        if not row.right and not row.refused:
            print("WRONG", *row[:5], flush=True)

    @property
    def bad(self) -> int:
        return sum(not row.right and not row.refused for row in self.rows)

    @property
    def left(self) -> int:
        return self.total - len(self.rows)

    def tell(self, every: float = 0.0) -> None:
        """Write the file and print a line, if ``every`` seconds have passed."""
        if time.time() < self.last + every:
            return
        self.last = time.time()
        results.write(self.path, self.rows)
        right, refused = sum(row.right for row in self.rows), sum(row.refused for row in self.rows)
        print(
            f"{right} right, {self.bad} wrong, {refused} refused, {self.left} not run, "
            f"{time.time() - self.begin:.0f} s",
            flush=True,
        )

    def tell_refusals(self) -> None:
        reasons = Counter(f"{row.kind}: {row.result}" for row in self.rows if row.refused)
        for reason, count in reasons.most_common():
            print(f"  {count} {reason}")


def ordered(checks: list[Check], seed: int) -> list[Check]:
    """Return checks in order: first those that run alone, then in fresh processes, then slow ones.

    The others are shuffled: neighbours in the table would compile the same kernels at once.
    """
    random.Random(seed).shuffle(checks)
    return sorted(checks, key=lambda check: (not check.alone, not check.fresh, not check.slow))


def events(checks: list[Check], given: argparse.Namespace, end: float) -> Iterator[Event | None]:
    """Yield the events of all checks; those of two GPUs come first, in pools of their own."""
    gpus = visible_gpus(given.device)
    pairs = [f"{a},{b}" for a, b in zip(gpus[::2], gpus[1::2], strict=False)]
    for count, visible in ((2, pairs), (1, gpus)):
        some = ordered([check for check in checks if check.gpus == count], given.seed)
        jobs = [Job((one,), one.alone, one.fresh, one.limit) for one in some]
        processes = min(given.processes, len(jobs))
        if jobs:
            pool = Pool(run, processes, given.limit, given.device, visible)
            yield from pool.run(jobs, end, PATIENCE)


def run_all(checks: list[Check], given: argparse.Namespace) -> int:
    """Run checks in a pool; return 1 if one is wrong or did not run."""
    kept = (
        [row for row in results.read(given.after) if row.right or row.refused]
        if given.after
        else []
    )
    known = {row.key for row in kept}
    todo = [check for check in checks if check.key not in known]
    report = Report(given, kept, len(kept) + len(todo))
    for event in events(todo, given, report.begin + 60 * given.minutes):
        if event is not None and event.kind != "end":
            fault = "fault: " * (event.kind == "fault")
            report.add(event.job.args[0], f"{fault}{event.value}", event.seconds)
        report.tell(EVERY)
    report.tell()
    report.tell_refusals()
    return int(report.bad > 0 or report.left > 0)


def run_here(checks: list[Check]) -> int:
    """Run checks in this process, for tools such as a sanitizer; return 1 if one is wrong."""
    warnings.simplefilter("ignore")
    bad = 0
    for check in checks:
        result = next(run(check))
        bad += result != "right" and not result.startswith("refused")
        print(*check.key, result, flush=True)
    print(f"{len(checks)} checks, {bad} wrong")
    return int(bad > 0)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", dest="kinds", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--backend", dest="backends", help="of the kinds of any backend")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.csv"))
    parser.add_argument("--after", type=Path, help="a result to go on from")
    parser.add_argument("--minutes", type=float, default=20.0, help="then no check begins")
    parser.add_argument("--quick", action="store_true", help="of cases, the covering ones only")
    parser.add_argument("--only", default="", help="texts, with commas; names have one of them")
    parser.add_argument("--tag", help="run the cases of this tag, not those of the kind")
    parser.add_argument("--processes", type=int, help=f"in all; {PROCESSES} on each GPU")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, without compiling")
    parser.add_argument("--repeats", type=int, default=20, help="of Hopper's direct calls")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument(
        "--sanitize", action="store_true", help="small cases in this process, references on the CPU"
    )
    given = parser.parse_args(words)
    cpu = given.device == "cpu"
    given.half_dtypes, given.reference = ("bfloat16", "float16"), None
    kinds = ON_CPU if cpu else tuple(KINDS)
    if given.sanitize:
        kinds = ("hopper-forward", "hopper-backward")
        given.tag, given.repeats = given.tag or "sanitizer", 0
        given.half_dtypes, given.reference = ("bfloat16",), "cpu"
    gpus = len(visible_gpus(given.device))
    if gpus < 2:
        kinds = tuple(kind for kind in kinds if kind != "two-devices")
    given.kinds = given.kinds.split(",") if given.kinds else kinds
    given.backends = (given.backends or ("cpu,torch" if cpu else "triton,hopper")).split(",")
    given.processes = given.processes or default_processes(given.device)
    given.only = given.only.split(",")
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"--kind: got {', '.join(unknown)}; want some of {', '.join(KINDS)}")
    if "two-devices" in given.kinds and gpus < 2:
        parser.error(f"--kind: two-devices needs two GPUs, there are {gpus}")
    return given


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    checks = [
        check
        for kind in given.kinds
        for check in KINDS[kind](given)
        if any(text in check.name for text in given.only)
    ]
    if not checks:
        print("no check has such a name")
        return 2
    return run_here(checks) if given.sanitize else run_all(checks, given)


if __name__ == "__main__":
    sys.exit(main())
