"""A search over random calls on a GPU, against the dense definition in float64.

    python -m tests.gpu.random_search --minutes 8 --processes 14 --seed 0 --out random_search.csv
    python -m tests.gpu.random_search --shrink failures.txt --processes 8 --minutes 6
    python -m tests.gpu.random_search --cells failures.txt --processes 8
    python -m tests.gpu.random_search --memcheck 300 --processes 12 --out memcheck.csv

Everything that a call can vary is drawn (``tests/drawn.py``). Compiling takes the time, so calls
come in groups that share kernels: a group draws what is compiled in once, each of its calls the
rest. Calls run in processes side by side; one that dies or hangs is replaced, and the call that
it was at counts as a fault. A wrong answer is written down, with Python that makes it again, and
the search goes on. ``--device cpu --backend cpu,torch`` runs the same without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.drawn import (
    CPU_BUDGET,
    GPU_BUDGET,
    Drawn,
    RefusedError,
    UnpreparedError,
    from_json,
    group,
    reduced,
    varied,
    wrong,
)

EVERY = 20.0  # seconds, a line of progress
COMPILE_LIMIT = 300.0  # seconds that kernels of one call may take to compile
MOST_WRITTEN = 2000  # failures in full
#: bytes for each score that the references hold at the most, in float64
BYTES_A_SCORE = 200
SUMMARY = "searched:"

#: (drawn, backend, device) -> what is wrong; RefusedError, UnpreparedError
Check = Callable[[Drawn, str, str], list[str]]


class Job(NamedTuple):
    """A group of calls of one dtype and backend."""

    seed: int
    dtype: str
    backend: str
    device: str
    calls: int
    budget: int


class Report(NamedTuple):
    """Of one call. ``kind``: right, wrong, fault, refused, no memory for the references, or
    unprepared, which is a mistake of the search's own."""

    kind: str
    drawn: Drawn
    texts: list[str]
    kernels: int  # compiled by this process so far


@dataclass
class Count:
    """What came of the calls of one dtype and backend."""

    kinds: dict[str, int] = field(default_factory=dict)
    planned: int = 0

    def __getitem__(self, kind: str) -> int:
        return self.kinds.get(kind, 0)

    def add(self, kind: str) -> None:
        self.kinds[kind] = self[kind] + 1

    @property
    def calls(self) -> int:
        return self["right"] + self["wrong"] + self["fault"]


# --- a worker ----------------------------------------------------------------------------------


def calls_of(job: Job) -> Any:
    """The calls of a group, one by one."""
    from tests.gpu.compiled_in import compiled_in

    rng = random.Random(f"{job.seed} {job.dtype} {job.backend}")
    case = group(rng, job.dtype, job.backend, job.budget)
    same = None
    if job.backend in ("triton", "hopper"):
        same = partial(compiled_in, dtype=job.dtype, backend=job.backend)
    for n in range(job.calls):
        if n:
            case = varied(rng, case, job.budget, same)
        yield Drawn(case, job.dtype, rng.randrange(2**31))


def judged(drawn: Drawn, backend: str, device: str, check: Check) -> tuple[str, list[str]]:
    """(kind, texts) of a report."""
    try:
        texts = check(drawn, backend, device)
        if device != "cpu":
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "no memory", []
    except RefusedError as error:
        return "refused", [str(error)]
    except UnpreparedError:
        return "unprepared", [traceback.format_exc(limit=-4)[-1500:]]
    except Exception:
        return "fault", [traceback.format_exc(limit=-4)[-1500:]]
    return ("wrong" if texts else "right"), texts


def serve(pipe: Connection, clock: Any, check: Check, fraction: float) -> None:
    """A worker: jobs from the pipe until there are no more; the call that it is at, and what came
    of it, go back. An error that breaks the device's context ends the process."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if torch.cuda.is_available() and fraction:
        torch.cuda.set_per_process_memory_fraction(fraction)
    _time_compiling(clock)
    while (job := pipe.recv()) is not None:
        for drawn in calls_of(job):
            clock[0] = time.time()
            clock[1] = clock[2] = 0.0
            pipe.send(drawn)
            kind, texts = judged(drawn, job.backend, job.device, check)
            pipe.send(Report(kind, drawn, texts, int(clock[3])))
            if kind in ("fault", "unprepared") and not _context_lives(job.device):
                os._exit(1)
        pipe.send(None)


def _context_lives(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except Exception:
        return False
    return True


def _time_compiling(clock: Any) -> None:
    """Keep in the clock when compiling began (0: it does not), how long it took in this call, and
    how many kernels it made."""
    try:
        from rowmax.gpu import compiled
    except ImportError:
        return
    real = compiled.Launch.compile

    def timed(*args: Any, **keywords: Any) -> Any:
        clock[2] = time.time()
        try:
            return real(*args, **keywords)
        finally:
            clock[1] += time.time() - clock[2]
            clock[2] = 0.0
            clock[3] += 1

    compiled.Launch.compile = timed


class Worker:
    """A process with what it is at."""

    def __init__(self, check: Check, fraction: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        #: when the call began, seconds of it spent compiling, since when it compiles, kernels made
        self.clock = context.Array("d", 4, lock=False)
        self.process = context.Process(
            target=serve, args=(other, self.clock, check, fraction), daemon=True
        )
        self.process.start()
        other.close()
        self.job: Job | None = None
        self.call: Drawn | None = None

    def hangs(self, limit: float) -> str | None:
        """Why the call that it is at is given up, or None."""
        if self.call is None:
            return None
        now, (began, compiled, since, _) = time.time(), list(self.clock)
        compiling = now - since if since else 0.0
        if compiled + compiling > COMPILE_LIMIT:
            return f"compiling takes more than {COMPILE_LIMIT:.0f} s"
        if now - began - compiled - compiling > limit:
            return f"hangs: not done in {limit:.0f} s"
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


# --- the search --------------------------------------------------------------------------------


class Search:
    """Workers side by side, and what came of their calls."""

    def __init__(self, given: argparse.Namespace, check: Check = wrong) -> None:
        self.given = given
        self.check = check
        self.counts = {(d, b): Count() for d in given.dtypes for b in given.backends}
        self.counts = {(d, b): c for (d, b), c in self.counts.items() if _may(d, b)}
        self.kernels = 0
        self.ended: dict[str, int] = {}
        self.failed: list[tuple[str, str, Drawn, list[str]]] = []
        self.begun = time.time()
        self.seed = given.seed * 1_000_000
        self.fraction = 0.85 / given.processes

    def run(self) -> None:
        given, workers = self.given, list[Worker]()
        end = self.begun + 60 * given.minutes
        told = time.time()
        try:
            while time.time() < end and not self.done:
                while len(workers) < given.processes:
                    workers.append(self.started())
                for worker in [w for w in workers if not self.heard(w)]:
                    worker.end()
                    workers.remove(worker)
                if time.time() > told + given.every:
                    told = time.time()
                    self.tell()
                wait([w.pipe for w in workers], timeout=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            for worker in workers:
                worker.end()
            self.tell()

    def started(self) -> Worker:
        worker = Worker(self.check, self.fraction)
        self.give(worker)
        return worker

    def give(self, worker: Worker) -> None:
        """A group of the dtype with the fewest calls and, of its backends, that with the fewest."""
        given = self.given
        dtypes = {d: sum(c.planned for (e, _), c in self.counts.items() if e == d)
                  for d, _ in self.counts}  # fmt: skip
        dtype = min(dtypes, key=lambda d: dtypes[d])
        of_dtype = {b: c.planned for (d, b), c in self.counts.items() if d == dtype}
        backend = min(of_dtype, key=lambda b: of_dtype[b])
        self.seed += 1
        worker.job = Job(self.seed, dtype, backend, given.device, given.per_group, given.budget)
        self.counts[dtype, backend].planned += given.per_group
        worker.pipe.send(worker.job)

    def heard(self, worker: Worker) -> bool:
        """Take in what a worker has to say; False if it is to be replaced."""
        try:
            while worker.pipe.poll():
                said = worker.pipe.recv()
                if said is None:
                    self.give(worker)
                elif isinstance(said, Drawn):
                    worker.call = said
                else:
                    worker.call = None
                    self.take(worker, said)
        except (EOFError, OSError):
            worker.process.join(10)
            code = worker.process.exitcode
            self.lost(worker, f"its process died ({code})")
            return False
        why = worker.hangs(self.given.limit)
        if why is not None:
            self.lost(worker, why)
        return why is None

    def lost(self, worker: Worker, why: str) -> None:
        assert worker.job is not None
        self.counts[worker.job.dtype, worker.job.backend].planned -= self.given.per_group // 2
        if worker.call is not None:
            self.take(worker, Report("fault", worker.call, [why], int(worker.clock[3])))
        self.kernels += int(worker.clock[3])
        worker.clock[3] = 0

    def take(self, worker: Worker, report: Report) -> None:
        assert worker.job is not None
        job = worker.job
        self.counts[job.dtype, job.backend].add(report.kind)
        self.ended[str(worker.process.pid)] = report.kernels
        if report.kind in ("wrong", "fault", "unprepared"):
            first = all(f[0] != f"{job.seed} {report.kind}" for f in self.failed)
            self.failed.append(
                (f"{job.seed} {report.kind}", job.backend, report.drawn, report.texts)
            )
            if first:  # of its group: the others are likely to be the same
                print(report.kind.upper(), job.dtype, job.backend, *report.texts, flush=True)
                print(report.drawn.snippet(job.backend, job.device), flush=True)

    def tell(self) -> None:
        given = self.given
        write_counts(given.out, self.counts, given.device)
        write_failures(given.failures, self.failed, given.device)
        parts = [
            f"{d} {b}: {c.calls} calls, {c['wrong']} wrong, {c['fault']} faults, "
            f"{c['refused']} refused, {c['no memory']} without memory, "
            f"{c['unprepared']} unprepared"
            for (d, b), c in self.counts.items()
        ]
        calls, kernels = sum(c.calls for c in self.counts.values()), sum(self.ended.values())
        rate = f", {calls / kernels:.1f} calls a kernel" if kernels else ""
        print(f"{time.time() - self.begun:.0f} s: {calls} calls, {kernels} kernels{rate}")
        print("  " + "\n  ".join(parts), flush=True)

    @property
    def done(self) -> bool:
        """True once every dtype and backend has had as many calls as were asked for."""
        return all(c.calls >= self.given.calls for c in self.counts.values())

    @property
    def bad(self) -> int:
        return sum(c["wrong"] + c["fault"] + c["unprepared"] for c in self.counts.values())


def _may(dtype: str, backend: str) -> bool:
    """False where a backend takes no call of a dtype."""
    return dtype not in {"hopper": ("float32", "float64"), "triton": ("float64",)}.get(backend, ())


# --- files -------------------------------------------------------------------------------------


def about(device: str) -> list[str]:
    """Device, torch, triton, date."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = ""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return [name, torch.__version__, version, datetime.date.today().isoformat()]


def write_counts(path: Path, counts: dict[tuple[str, str], Count], device: str) -> None:
    names = ["dtype", "backend", "calls", "wrong", "faults", "device", "torch", "triton", "date"]
    rows = [[d, b, c.calls, c["wrong"], c["fault"]] for (d, b), c in counts.items()]
    _write(path, names, rows, device)


def _write(path: Path, names: list[str], rows: list[list[Any]], device: str) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        csv.writer(file).writerows([names, *(row + about(device) for row in rows)])
    part.replace(path)


def write_failures(path: Path, failed: list[Any], device: str) -> None:
    """Python for each failure, and the line that ``--shrink`` reads."""
    with path.open("w") as file:
        for key, backend, drawn, texts in failed[:MOST_WRITTEN]:
            notes = "".join(f"# {line}\n" for text in texts for line in text.splitlines())
            file.write(f"# group {key}, {backend} on {device}\n{notes}")
            file.write(f"# drawn {backend} {drawn.as_json()}\n{drawn.snippet(backend, device)}\n")


# --- one call in a process of its own ----------------------------------------------------------


def one(backend: str, device: str, text: str) -> int:
    """Run one call and say what came of it; 1 if that is a fault or wrong."""
    warnings.simplefilter("ignore")
    kind, texts = judged(from_json(text), backend, device, wrong)
    print(kind, *texts, flush=True)
    return int(kind in ("wrong", "fault"))


def in_a_child(drawn: Drawn, backend: str, device: str, limit: float) -> str:
    """What came of a call in a process of its own: it may die or hang."""
    command = [sys.executable, "-m", "tests.gpu.random_search", "--device", device]
    command += ["--backend", backend, "--one", drawn.as_json()]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"fault hangs: not done in {limit:.0f} s"
    words = found.stdout.strip()
    if not words.startswith(("right", "wrong", "fault", "refused", "no memory", "unprepared")):
        return f"fault its process died ({found.returncode}) {found.stderr.strip()[-500:]}"
    return words


def listed(path: Path) -> list[tuple[str, str, Drawn]]:
    """(group, backend, call) of each failure in a file."""
    found, key = [], ""
    for line in path.read_text().splitlines():
        if line.startswith("# group "):
            key = line
        elif line.startswith("# drawn "):
            _, _, backend, text = line.split(" ", 3)
            found.append((key, backend, from_json(text)))
    return found


def cells(given: argparse.Namespace) -> int:
    """Run every call of a file of failures again, each in a process of its own."""
    every = listed(given.cells)

    def said(item: tuple[str, str, Drawn]) -> str:
        return in_a_child(item[2], item[1], given.device, given.limit + COMPILE_LIMIT)

    bad = 0
    with ThreadPoolExecutor(given.processes) as pool:
        for (_, backend, drawn), words in zip(every, pool.map(said, every), strict=True):
            bad += not words.startswith("right")
            print(f"{words}\n{drawn.snippet(backend, given.device)}", flush=True)
    print(f"{len(every)} calls, {bad} not right")
    return int(bad > 0)


def shrink(given: argparse.Namespace) -> None:
    """The smallest calls that fail as the first failure of each group in a file does."""
    groups: dict[str, tuple[str, Drawn]] = {}
    for key, backend, drawn in listed(given.shrink):
        groups.setdefault(key, (backend, drawn))
    end = time.time() + 60 * given.minutes

    def reduce(item: tuple[str, tuple[str, Drawn]]) -> None:
        name, (backend, drawn) = item

        def fails(other: Drawn) -> bool:
            if time.time() > end:
                return False
            words = in_a_child(other, backend, given.device, given.limit + COMPILE_LIMIT)
            return words.startswith(("wrong", "fault"))

        small = reduced(drawn, fails)
        said = in_a_child(small, backend, given.device, given.limit + COMPILE_LIMIT)
        print(f"{name}\n# {said}\n{small.snippet(backend, given.device)}", flush=True)

    with ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(reduce, groups.items()))


# --- under compute-sanitizer -------------------------------------------------------------------


def sanitized(given: argparse.Namespace) -> int:
    """Draw small calls in this process, which a sanitizer watches; the references are the CPU's."""
    warnings.simplefilter("ignore")
    cells = [(d, b) for d in given.dtypes for b in given.backends if _may(d, b)]
    counts = {cell: Count() for cell in cells}
    end = time.time() + 60 * given.minutes
    check = partial(wrong, reference="cpu")
    done = seed = 0
    bad = 0
    while done < given.sanitize and time.time() < end:
        dtype, backend = cells[seed % len(cells)]
        job = Job(given.seed * 1000 + seed, dtype, backend, given.device, 5, 2_000_000)
        seed += 1
        for drawn in calls_of(job):
            if done >= given.sanitize or time.time() > end:
                break
            if not _is_small(drawn):
                continue
            kind, texts = judged(drawn, backend, given.device, check)
            counts[dtype, backend].add(kind)
            done += kind in ("right", "wrong", "fault")
            if kind in ("wrong", "fault", "unprepared"):
                bad += 1
                print(kind.upper(), *texts, drawn.snippet(backend, given.device), flush=True)
    for (dtype, backend), c in counts.items():
        print(SUMMARY, dtype, backend, c.calls, c["wrong"] + c["fault"], flush=True)
    return int(bad > 0)


def _is_small(drawn: Drawn) -> bool:
    case = drawn.case
    pairs = case.sequences or ((case.nq, case.nq if case.nk is None else case.nk),)
    return max(case.d, case.dv or 0) <= 160 and all(max(pair) <= 600 for pair in pairs)


def memcheck(given: argparse.Namespace) -> int:
    """Children under compute-sanitizer, side by side; their calls and errors, summed."""
    each = -(-given.memcheck // given.processes)
    end = 60 * given.minutes

    def child(n: int) -> tuple[str, int]:
        command = [given.sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
        command += ["-m", "tests.gpu.random_search", "--sanitize", str(each)]
        command += ["--seed", str(given.seed * 1000 + n), "--device", given.device]
        command += ["--dtype", ",".join(given.dtypes), "--backend", ",".join(given.backends)]
        command += ["--minutes", str(given.minutes * 0.85)]
        # allocations of their own, so that what is past one is not in another
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            found = subprocess.run(
                command, capture_output=True, text=True, timeout=end, env=environment
            )
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            return text.decode() if isinstance(text, bytes) else text, -1
        return found.stdout + found.stderr, found.returncode

    counts: dict[tuple[str, str], list[int]] = {
        (d, b): [0, 0] for d in given.dtypes for b in given.backends if _may(d, b)
    }
    bad = 0
    with ThreadPoolExecutor(given.processes) as pool:
        for text, code in pool.map(child, range(given.processes)):
            errors = [int(x) for x in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
            summed = re.findall(rf"{SUMMARY} (\w+) (\w+) (\d+) (\d+)", text)
            for dtype, backend, calls, wrong_ones in summed:
                count = counts[dtype, backend]
                count[0] += int(calls)
                # which of its calls an error belongs to the summary does not say
                count[1] += sum(errors) if (dtype, backend) == tuple(summed[0][:2]) else 0
                bad += int(wrong_ones)
            if code or not errors or not summed:
                bad += 1
                print(f"a child ended with {code}:\n{text[-3000:]}", flush=True)
            rows = [["memcheck", *cell, *count] for cell, count in counts.items()]
            names = ["tool", "dtype", "backend", "calls", "errors"]
            _write(given.out, [*names, "device", "torch", "triton", "date"], rows, given.device)
            print(*(f"{d} {b}: {c} calls, {e} errors" for _, d, b, c, e in rows), flush=True)
    return int(bad > 0)


# --- the command line --------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32,bfloat16,float16", dest="dtypes")
    parser.add_argument("--backend", default="triton,hopper", dest="backends")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=float, default=math.inf, help="of each kind, then end")
    parser.add_argument("--per-group", type=int, default=32, help="calls that share kernels")
    parser.add_argument("--budget", type=int, help="scores of a call")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds a call, compiling aside"
    )
    parser.add_argument("--every", type=float, default=EVERY, help="seconds from line to line")
    parser.add_argument("--out", type=Path, default=Path("random_search.csv"))
    parser.add_argument("--failures", type=Path, default=Path("failures.txt"))
    parser.add_argument("--one", help="a call, as the lines '# drawn' of failures have it")
    parser.add_argument("--shrink", type=Path, help="failures to make small")
    parser.add_argument("--cells", type=Path, help="failures to run again, one by one")
    parser.add_argument("--sanitize", type=int, help="so many small calls in this process")
    parser.add_argument("--memcheck", type=int, help="so many in processes under a sanitizer")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    given = parser.parse_args(words)
    given.dtypes, given.backends = given.dtypes.split(","), given.backends.split(",")
    if given.budget is None:
        given.budget = CPU_BUDGET if given.device == "cpu" else _gpu_budget(given.processes)
    return given


def _gpu_budget(processes: int) -> int:
    """As many scores as the memory of one of so many processes has room for."""
    if not torch.cuda.is_available():
        return GPU_BUDGET
    memory = torch.cuda.get_device_properties(0).total_memory
    return min(GPU_BUDGET, int(0.85 * memory / processes / BYTES_A_SCORE))


def main() -> int:
    given = arguments()
    if given.one is not None:
        return one(given.backends[0], given.device, given.one)
    if given.cells is not None:
        return cells(given)
    if given.shrink is not None:
        shrink(given)
        return 0
    if given.sanitize is not None:
        return sanitized(given)
    if given.memcheck is not None:
        return memcheck(given)
    search = Search(given)
    search.run()
    return int(search.bad > 0)


if __name__ == "__main__":
    sys.exit(main())
