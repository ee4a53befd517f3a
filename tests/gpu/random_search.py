"""A search over random calls on a GPU, compared with the dense definition in float64.

    python -m tests.gpu.random_search --minutes 8 --seed 0 --out random_search.csv
    python -m tests.gpu.random_search --tangents --minutes 8 --backend triton
    python -m tests.gpu.random_search --halves --dtype bfloat16,float16 --backend hopper
    python -m tests.gpu.random_search --lagging --dtype bfloat16 --backend hopper
    python -m tests.gpu.random_search --packed --dtype bfloat16,float16 --backend hopper
    python -m tests.gpu.random_search --parts --dtype bfloat16,float16 --backend hopper
    python -m tests.gpu.random_search --extremes --minutes 4
    python -m tests.gpu.random_search --siblings --minutes 4
    python -m tests.gpu.random_search --shrink failures.txt --minutes 6
    python -m tests.gpu.random_search --cells failures.txt  # with --tangents where they are of it
    python -m tests.gpu.random_search --memcheck 300 --processes 12 --out memcheck.csv

``tests/drawn.py`` draws everything that a call can vary. Most of the time goes into compiling, so
calls come in groups that share kernels: a group draws what is compiled in once, and each of its
calls the rest. Calls run in processes side by side. For a wrong answer, an error, or a process that
dies or hangs, the search writes Python that repeats the call, and continues.
``--device cpu --backend cpu,torch`` runs the same without a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.drawn import (
    CPU_BUDGET,
    GPU_BUDGET,
    Drawn,
    RefusedError,
    UnpreparedError,
    changed,
    draw_group,
    from_json,
    reduced,
    siblings,
    varied,
    wrong,
)
from tests.extreme_bias import random_wrong as extreme_wrong
from tests.gpu import results
from tests.gpu.compiled_in import compiled_in
from tests.gpu.kinds import takes_dtype, wrong_tangents
from tests.gpu.pool import (
    PROCESSES,
    VISIBLE,
    Event,
    Job,
    Pool,
    context_lives,
    default_processes,
    visible_gpus,
)
from tests.gpu.special_draws import DRAWS

EVERY = 20.0  # seconds between lines of progress
MOST_WRITTEN = 2000  # failures in full
MEMORY = 0.85  # share of a GPU's memory for its processes
#: most bytes for each score that the references allocate in float64
BYTES_A_SCORE = 200
SUMMARY = "searched:"
#: by the search's special calls, their name among results
NAMES = {
    "": "random calls",
    "halves": "random calls by halves of a step",
    "lagging": "random calls whose reference lags",
    "packed": "random packed calls with late runs",
    "groups": "random calls whose heads share keys",
    "extremes": "random calls with extreme biases",
    "siblings": "random calls between their siblings",
    "parts": "random calls whose keys are split",
    "dropout": "random calls with dropout",
    "windows": "random calls under windows",
    "documents": "random calls of documents",
}
FAILURES = ("wrong", "fault", "unprepared", "errors")
DTYPES = ("bfloat16", "float16", "float32", "float64")
SIBLINGS = 4

#: (drawn, backend, device) -> what is wrong; RefusedError, UnpreparedError
CheckCall = Callable[[Drawn, str, str], list[str]]
Cell = tuple[str, str]  # dtype, backend


class Group(NamedTuple):
    """Calls of one dtype and backend that share kernels."""

    seed: int
    dtype: str
    backend: str
    device: str
    calls: int
    budget: int
    #: "halves": the backward may compute halves of a step; "lagging": the reference may lag;
    #: "packed": tiles of the last sequences are in several runs; "extremes": biases as large as
    #: their dtype allows; "siblings": between calls that differ in one thing each
    special: str = ""


class Report(NamedTuple):
    """The result of a call.

    ``kind`` is right, wrong, fault, refused, no memory (for the references), or unprepared: a
    mistake of the search.
    """

    kind: str
    drawn: Drawn
    texts: list[str]


@dataclass
class Count:
    """The calls of one dtype and backend, by kind of their reports."""

    kinds: dict[str, int] = field(default_factory=dict)
    planned: int = 0

    def __getitem__(self, kind: str) -> int:
        return self.kinds.get(kind, 0)

    def add(self, kind: str) -> None:
        self.kinds[kind] = self[kind] + 1

    @property
    def calls(self) -> int:
        return self["right"] + self["wrong"] + self["fault"]

    @property
    def bad(self) -> int:
        return sum(self[kind] for kind in FAILURES)

    @property
    def result(self) -> str:
        """Return the words for a row of results."""
        bad = [f"{self[x]} {x}" for x in FAILURES if self[x]]
        if not (self.calls or bad):
            return f"not run: {self['refused']} refused"
        return ("wrong: " if bad else "right: ") + ", ".join([*bad, f"{self.calls} calls"])


# --- in the process of a group -----------------------------------------------------------------


def calls_of(group: Group) -> Iterator[Drawn]:
    """Yield the calls of a group."""
    rng = random.Random(f"{group.seed} {group.dtype} {group.backend}")
    case = draw_group(rng, group.dtype, group.backend, group.budget)
    if group.special in DRAWS:
        case = DRAWS[group.special](rng, case)
    same = None
    if group.backend in ("triton", "hopper"):
        same = partial(compiled_in, dtype=group.dtype, backend=group.backend)
    for n in range(group.calls):
        if n:
            case = varied(rng, case, group.budget, same)
        yield Drawn(case, group.dtype, rng.randrange(2**31))


def judged(drawn: Drawn, backend: str, device: str, check: CheckCall) -> Report:
    try:
        texts = check(drawn, backend, device)
        if device != "cpu":
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Report("no memory", drawn, [])
    except RefusedError as error:
        return Report("refused", drawn, [str(error)])
    except UnpreparedError:
        return Report("unprepared", drawn, [traceback.format_exc(limit=-4)[-1500:]])
    except Exception:
        return Report("fault", drawn, [traceback.format_exc(limit=-4)[-1500:]])
    return Report("wrong" if texts else "right", drawn, texts)


def run_group(group: Group, check: CheckCall) -> Iterator[Drawn | Report]:
    """Yield each call before it runs, and its report after it."""
    for drawn in calls_of(group):
        yield drawn
        report = judged(drawn, group.backend, group.device, check)
        yield report
        if report.kind in ("fault", "unprepared") and not context_lives(group.device):
            return


def second_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with tangents and second derivatives; of few elements, always so.

    A call that seems wrong runs with other numbers: errors of a few elements are random.
    """

    def texts(n: int) -> list[str]:
        call = replace(drawn, seed=drawn.seed + n).call(device)
        return wrong_tangents(call, n, backend) if call.leaves else []

    found = texts(0)
    if not found or any("NaN" in text or "infinite" in text for text in found):
        return found
    again = [{text.split(":")[0] for text in texts(n)} for n in range(1, 6)]
    return [text for text in found if sum(text.split(":")[0] in names for names in again) > 3]


def halved_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a call whose backward computes halves of a step."""
    from tests.gpu.hopper_direct import halved_steps

    with halved_steps():
        return wrong(drawn, backend, device)


def lagging_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a call whose reference lags.

    Raises:
        RefusedError: no reference lags.
    """
    from rowmax.gpu.hopper import host
    from tests.gpu.hopper_direct import lagging_references

    with lagging_references():
        found = wrong(drawn, backend, device)
        if not found and not any(p.constants.config.LAGS for p in host._PLANS.values()):
            raise RefusedError("no reference lags")
    return found


def packed_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a packed call whose last sequences have several runs of tiles.

    Raises:
        RefusedError: no kernel of it has runs.
    """
    from rowmax.gpu.hopper import backward_plan
    from tests.gpu.hopper_direct import late_runs

    with late_runs():
        found = wrong(drawn, backend, device)
        works = [work for plan in backward_plan.PLANS.values() for work in plan.works]
    if not found and all(work.config.LATE_RUNS == 1 for work in works):
        raise RefusedError("no kernel has late runs")
    return found


def groups_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a call whose query heads share keys, in any number of shares.

    Raises:
        RefusedError: no group has several shares.
    """
    from rowmax.gpu import launch
    from rowmax.gpu.hopper import backward_plan
    from tests.gpu.hopper_direct import any_shares

    with any_shares():
        found = wrong(drawn, backend, device)
        shares = [plan.shares for plan in backward_plan.PLANS.values()]
        shares += [job.numbers.parts or 1 for job in launch._jobs.values()]
    if not found and max(shares, default=1) == 1:
        raise RefusedError("no group has several shares")
    return found


def parts_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a call whose forward splits keys into any number of parts.

    Raises:
        RefusedError: no keys are split.
    """
    from rowmax.gpu.hopper import host
    from tests.gpu.hopper_direct import any_parts

    with any_parts():
        found = wrong(drawn, backend, device)
        parts = [plan.parts for plan in host._PLANS.values()]
    if not found and max(parts, default=1) == 1:
        raise RefusedError("no keys are split")
    return found


def siblings_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a call, between calls that differ from it in one thing each.

    Raises:
        RefusedError: the backend refuses the call itself.
    """
    dtypes = [x for x in DTYPES if takes_dtype(x, backend)]
    others = siblings(random.Random(drawn.seed), drawn, dtypes, SIBLINGS)
    found = []
    for one in (*others, drawn, others[0]):
        try:
            texts = wrong(one, backend, device)
        except (RefusedError, UnpreparedError):
            if one is drawn:
                raise
            continue
        found += [f"{_differences(one, drawn)}: {text}" for text in texts]
    return found


def _differences(one: Drawn, other: Drawn) -> str:
    """Return in what a call differs from another."""
    if one.dtype != other.dtype:
        return one.dtype
    here, there = changed(one.case), changed(other.case)
    names = [name for name in here | there if here.get(name) != there.get(name)]
    return ", ".join(f"{name}={here.get(name)}" for name in names) or "itself"


CHECKS = {
    "halves": halved_wrong,
    "lagging": lagging_wrong,
    "packed": packed_wrong,
    "groups": groups_wrong,
    "parts": parts_wrong,
    "dropout": wrong,
    "windows": wrong,
    "documents": wrong,
    "extremes": extreme_wrong,
    "siblings": siblings_wrong,
}


def run_call(drawn: Drawn, backend: str, device: str, check: CheckCall) -> Iterator[Report]:
    yield judged(drawn, backend, device, check)


# --- the search --------------------------------------------------------------------------------


class Search:
    """Groups in processes side by side, and the results of their calls."""

    def __init__(self, given: argparse.Namespace, check: CheckCall = wrong) -> None:
        self.given, self.check = given, check
        self.counts = {cell: Count() for cell in cells_of(given)}
        self.failed: list[tuple[str, str, Drawn, list[str]]] = []
        self.begin = time.time()
        #: the call that each group runs, None between two, and its reports so far
        self.running: dict[Group, tuple[Drawn | None, int]] = {}
        gpus = len(visible_gpus(given.device))
        memory = MEMORY / -(-given.processes // gpus)
        self.pool = Pool(run_group, given.processes, given.limit, given.device, memory=memory)

    def run(self) -> None:
        last = time.time()
        try:
            for event in self.pool.run(self.jobs(), self.begin + 60 * self.given.minutes):
                if event is not None:
                    self.add(event)
                if all(c.calls >= self.given.calls for c in self.counts.values()):
                    break
                if time.time() > last + self.given.every:
                    last = time.time()
                    self.tell()
        except KeyboardInterrupt:
            pass
        finally:
            self.tell()

    def jobs(self) -> Iterator[Job]:
        """Yield groups of the dtype with the fewest calls, of its backend with the fewest."""
        given, seed = self.given, self.given.seed * 1_000_000
        while True:
            planned: dict[str, int] = {}
            for (dtype, _), count in self.counts.items():
                planned[dtype] = planned.get(dtype, 0) + count.planned
            least = min(planned, key=lambda dtype: planned[dtype])
            some = [cell for cell in self.counts if cell[0] == least]
            cell = min(some, key=lambda cell: self.counts[cell].planned)
            self.counts[cell].planned += given.per_group
            seed += 1
            sizes = (given.per_group, given.budget, given.special)
            found = Group(seed, *cell, given.device, *sizes)
            yield Job((found, self.check))

    def add(self, event: Event) -> None:
        group: Group = event.job.args[0]
        call, reports = self.running.pop(group, (None, 0))
        count = self.counts[group.dtype, group.backend]
        if event.kind == "message" and isinstance(event.value, Drawn):
            self.running[group] = event.value, reports
        elif event.kind == "message":
            self.running[group] = None, reports + 1
            self.note(group, event.value)
        else:
            if call is not None:  # the process died or hung at this call
                self.note(group, Report("fault", call, [event.value]))
            elif event.kind == "fault":
                print("FAULT", group, event.value, flush=True)
            count.planned -= group.calls - reports

    def note(self, group: Group, report: Report) -> None:
        self.counts[group.dtype, group.backend].add(report.kind)
        if report.kind not in FAILURES:
            return
        key = f"{group.seed} {report.kind}"
        if all(other != key for other, *_ in self.failed):  # a group's failures are often alike
            print(report.kind.upper(), group.dtype, group.backend, *report.texts, flush=True)
            print(snippet(self.given, report.drawn, group.backend), flush=True)
        self.failed.append((key, group.backend, report.drawn, report.texts))

    def tell(self) -> None:
        given, seconds = self.given, time.time() - self.begin
        of = "random-search", NAMES[given.special]
        write_counts(given.out, *of, self.counts, given.device, seconds)
        write_failures(given, self.failed)
        calls, kernels = sum(c.calls for c in self.counts.values()), self.pool.kernels
        rate = f", {calls / kernels:.1f} calls a kernel" if kernels else ""
        print(f"{seconds:.0f} s: {calls} calls, {kernels} kernels{rate}")
        for (dtype, backend), c in self.counts.items():
            print(
                f"  {dtype} {backend}: {c.calls} calls, {c['wrong']} wrong, {c['fault']} faults, "
                f"{c['refused']} refused, {c['no memory']} without memory, "
                f"{c['unprepared']} unprepared",
                flush=True,
            )

    @property
    def bad(self) -> int:
        return sum(count.bad for count in self.counts.values())

    @property
    def idle(self) -> list[Cell]:
        """The dtypes and backends of which no call was computed: nothing was found out."""
        return [cell for cell, count in self.counts.items() if not count.calls]


def cells_of(given: argparse.Namespace) -> list[Cell]:
    return [(d, b) for d in given.dtypes for b in given.backends if takes_dtype(d, b)]


# --- files -------------------------------------------------------------------------------------


def write_counts(
    path: Path, kind: str, name: str, counts: dict[Cell, Count], device: str, seconds: float
) -> None:
    """Write a row for each dtype and backend."""
    rows = []
    for (dtype, backend), c in counts.items():
        found = (kind, name, dtype, backend, c.result, f"{seconds:.0f}")
        rows.append(results.Row(*found, *results.machine(device)))
    results.write(path, rows)


def write_failures(given: argparse.Namespace, failed: list[Any]) -> None:
    """Write Python for each failure, and the line that ``--shrink`` reads."""
    with given.failures.open("w") as file:
        for key, backend, drawn, texts in failed[:MOST_WRITTEN]:
            notes = "".join(f"# {line}\n" for text in texts for line in text.splitlines())
            file.write(f"# group {key}, {backend} on {given.device}\n{notes}")
            file.write(f"# drawn {backend} {drawn.as_json()}\n{snippet(given, drawn, backend)}\n")


def check_of(given: argparse.Namespace) -> CheckCall:
    if given.special:
        return CHECKS[given.special]
    return second_wrong if given.tangents else wrong


def snippet(given: argparse.Namespace, drawn: Drawn, backend: str) -> str:
    """Return Python that makes a call again and checks it as the search does."""
    check = check_of(given)
    module = "tests.gpu.random_search" if check.__module__ == "__main__" else check.__module__
    return drawn.snippet(backend, given.device, check.__name__, module)


def listed(path: Path) -> list[tuple[str, str, Drawn]]:
    """Return (group, backend, call) of each failure in a file."""
    found, key = [], ""
    for line in path.read_text().splitlines():
        if line.startswith("# group "):
            key = line
        elif line.startswith("# drawn "):
            _, _, backend, text = line.split(" ", 3)
            found.append((key, backend, from_json(text)))
    return found


# --- single calls, each in a process of its own ------------------------------------------------


def each_alone(
    calls: list[tuple[Drawn, str]],
    device: str,
    processes: int,
    limit: float,
    check: CheckCall = wrong,
) -> Iterator[tuple[Drawn, str, str]]:
    """Yield (call, backend, its result) as they come."""
    jobs = [Job((drawn, backend, device, check), fresh=True) for drawn, backend in calls]
    for event in Pool(run_call, processes, limit, device).run(jobs):
        if event is not None and event.kind != "end":
            drawn, backend, *_ = event.job.args
            if event.kind == "fault":
                yield drawn, backend, f"fault {event.value}"
            else:
                yield drawn, backend, " ".join([event.value.kind, *event.value.texts])


def in_a_child(given: argparse.Namespace, drawn: Drawn, backend: str) -> str:
    """Return the result of a call in a process of its own, which may die or hang."""
    calls = [(drawn, backend)]
    found = each_alone(calls, given.device, 1, given.limit, check_of(given))
    return next(result for *_, result in found)


def cells(given: argparse.Namespace) -> int:
    """Run every call of a file of failures again; return 1 if one is not right."""
    calls = [(drawn, backend) for _, backend, drawn in listed(given.cells)]
    bad, check = 0, check_of(given)
    found = each_alone(calls, given.device, given.processes, given.limit, check)
    for drawn, backend, result in found:
        bad += not result.startswith("right")
        print(f"{result}\n{snippet(given, drawn, backend)}", flush=True)
    print(f"{len(calls)} calls, {bad} not right")
    return int(bad > 0)


def shrink(given: argparse.Namespace) -> int:
    """Print the smallest calls that fail as the first failure of each group in a file does."""
    groups: dict[str, tuple[str, Drawn]] = {}
    for key, backend, drawn in listed(given.shrink):
        groups.setdefault(key, (backend, drawn))
    end = time.time() + 60 * given.minutes

    def reduce(item: tuple[str, tuple[str, Drawn]]) -> None:
        name, (backend, drawn) = item

        def result(other: Drawn) -> str:
            return in_a_child(given, other, backend)

        def fails(other: Drawn) -> bool:
            return time.time() < end and result(other).startswith(("wrong", "fault"))

        small = reduced(drawn, fails)
        text = snippet(given, small, backend)
        print(f"{name}\n# {result(small)}\n{text}", flush=True)

    with ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(reduce, groups.items()))
    return 0


# --- under compute-sanitizer -------------------------------------------------------------------


def sanitized(given: argparse.Namespace) -> int:
    """Run small calls in this process, for a sanitizer; the references are computed on the CPU."""
    warnings.simplefilter("ignore")
    counts = {cell: Count() for cell in cells_of(given)}
    end = time.time() + 60 * given.minutes
    check = partial(wrong, reference="cpu")
    seed = 0
    while sum(c.calls for c in counts.values()) < given.sanitize and time.time() < end:
        cell = list(counts)[seed % len(counts)]
        found = Group(given.seed * 1000 + seed, *cell, given.device, 5, 2_000_000)
        seed += 1
        for drawn in calls_of(found):
            if sum(c.calls for c in counts.values()) >= given.sanitize or time.time() > end:
                break
            if not _is_small(drawn):
                continue
            report = judged(drawn, cell[1], given.device, check)
            counts[cell].add(report.kind)
            if report.kind in FAILURES:
                text = drawn.snippet(cell[1], given.device)
                print(report.kind.upper(), *report.texts, text, flush=True)
    for (dtype, backend), c in counts.items():
        print(SUMMARY, dtype, backend, c.calls, c["wrong"] + c["fault"], flush=True)
    return int(any(c.bad for c in counts.values()))


def _is_small(drawn: Drawn) -> bool:
    case = drawn.case
    pairs = case.sequences or ((case.nq, case.nq if case.nk is None else case.nk),)
    return max(case.d, case.dv or 0) <= 160 and all(max(pair) <= 600 for pair in pairs)


def memcheck(given: argparse.Namespace) -> int:
    """Run processes under compute-sanitizer side by side; sum their calls and errors."""
    each = -(-given.memcheck // given.processes)
    gpus = visible_gpus(given.device)

    def child(n: int) -> tuple[str, int]:
        command = [given.sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
        command += ["-m", "tests.gpu.random_search", "--sanitize", str(each)]
        command += ["--seed", str(given.seed * 1000 + n), "--device", given.device]
        command += ["--dtype", ",".join(given.dtypes), "--backend", ",".join(given.backends)]
        command += ["--minutes", str(given.minutes * 0.85)]
        # each tensor has an allocation of its own: an access past its end is not in another
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        environment |= {VISIBLE: gpu} if (gpu := gpus[n % len(gpus)]) else {}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60 * given.minutes,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            return text.decode() if isinstance(text, bytes) else text, -1
        return done.stdout + done.stderr, done.returncode

    counts = {cell: Count() for cell in cells_of(given)}
    bad, begin = 0, time.time()
    with ThreadPoolExecutor(given.processes) as pool:
        for text, code in pool.map(child, range(given.processes)):
            errors = [int(x) for x in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
            summed = re.findall(rf"{SUMMARY} (\w+) (\w+) (\d+) (\d+)", text)
            for dtype, backend, calls, wrong_ones in summed:
                count = counts[dtype, backend]
                # the summary does not name the call of an error
                first = (dtype, backend) == tuple(summed[0][:2])
                count.kinds["errors"] = count["errors"] + (sum(errors) if first else 0)
                count.kinds["wrong"] = count["wrong"] + int(wrong_ones)
                count.kinds["right"] = count["right"] + int(calls) - int(wrong_ones)
                bad += int(wrong_ones)
            if code or not errors or not summed:
                bad += 1
                print(f"a process ended with {code}:\n{text[-3000:]}", flush=True)
            of = "memcheck", NAMES[""]
            write_counts(given.out, *of, counts, given.device, time.time() - begin)
            for (dtype, backend), c in counts.items():
                print(f"{dtype} {backend}: {c.calls} calls, {c['errors']} errors", flush=True)
    return int(bad > 0)


# --- the command line --------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, help=f"in all; {PROCESSES} on each GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32,bfloat16,float16", dest="dtypes")
    parser.add_argument("--backend", default="triton,hopper", dest="backends")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=float, default=math.inf, help="of each kind, then end")
    parser.add_argument("--per-group", type=int, default=32, help="calls that share kernels")
    parser.add_argument("--budget", type=int, help="scores of a call")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, without compiling")
    parser.add_argument("--every", type=float, default=EVERY, help="seconds from line to line")
    parser.add_argument("--out", type=Path, default=Path("random_search.csv"))
    parser.add_argument("--failures", type=Path, default=Path("failures.txt"))
    parser.add_argument("--one", help="a call to run here, as in a line '# drawn' of failures")
    parser.add_argument("--shrink", type=Path, help="failures to make small")
    parser.add_argument("--cells", type=Path, help="failures to run again, one by one")
    parser.add_argument("--tangents", action="store_true", help="and second derivatives, no others")
    special = {"dest": "special", "action": "store_const", "default": ""}
    parser.add_argument("--halves", const="halves", help="backwards by halves", **special)
    parser.add_argument("--lagging", const="lagging", help="references that lag", **special)
    parser.add_argument("--packed", const="packed", help="packed, with late runs", **special)
    parser.add_argument("--groups", const="groups", help="heads that share keys", **special)
    parser.add_argument("--parts", const="parts", help="forwards that split keys", **special)
    parser.add_argument("--dropout", const="dropout", help="calls with dropout", **special)
    parser.add_argument("--windows", const="windows", help="calls under windows", **special)
    parser.add_argument("--documents", const="documents", help="documents by ids", **special)
    parser.add_argument("--extremes", const="extremes", help="extreme biases", **special)
    parser.add_argument("--siblings", const="siblings", help="calls that hardly differ", **special)
    parser.add_argument("--sanitize", type=int, help="so many small calls in this process")
    parser.add_argument("--memcheck", type=int, help="so many in processes under a sanitizer")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    given = parser.parse_args(words)
    given.dtypes, given.backends = given.dtypes.split(","), given.backends.split(",")
    given.processes = given.processes or default_processes(given.device)
    if given.budget is None:
        given.budget = CPU_BUDGET if given.device == "cpu" else _gpu_budget(given.processes)
    return given


def _gpu_budget(processes: int) -> int:
    """Return the number of scores that fit into the memory of one of these processes."""
    memory = torch.cuda.get_device_properties(0).total_memory
    each = -(-processes // len(visible_gpus("cuda")))
    return min(GPU_BUDGET, int(MEMORY * memory / each / BYTES_A_SCORE))


def main() -> int:
    given = arguments()
    if given.one is not None:
        warnings.simplefilter("ignore")
        report = judged(from_json(given.one), given.backends[0], given.device, check_of(given))
        print(report.kind, *report.texts, flush=True)
        return int(report.kind in FAILURES)
    if given.cells is not None:
        return cells(given)
    if given.shrink is not None:
        return shrink(given)
    if given.sanitize is not None:
        return sanitized(given)
    if given.memcheck is not None:
        return memcheck(given)
    search = Search(given, check_of(given))
    search.run()
    for dtype, backend in search.idle:
        print(f"{dtype} {backend}: no call was computed")
    return int(search.bad > 0 or bool(search.idle))


if __name__ == "__main__":
    sys.exit(main())
