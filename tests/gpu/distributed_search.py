"""A search over random calls across ranks, compared with the dense definition in float64.

    python -m tests.gpu.distributed_search --ranks 2 --minutes 4 --out distributed_search.csv
    python -m tests.gpu.distributed_search --ranks 3 --device cpu --minutes 2
    python -m tests.gpu.distributed_search --ranks 2 --one '{"call": ...}'

``tests/distributed/drawn.py`` draws the calls, and how ranks share them. Several groups of ranks
run side by side (``--groups``). Ranks that hang or die are replaced. A line of JSON for each
failure repeats its call.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.ranks import Ranks, RanksError
from rowmax.distributed.strategies import STRATEGIES
from tests.distributed.drawn import DTYPES, Spread, judged, spread_of, spreads
from tests.gpu.random_search import FAILURES, Count, write_counts

EVERY = 20.0  # seconds between lines of progress
LIMIT = 240.0  # seconds of a call, compiling included
#: scores of a call
GPU_BUDGET, CPU_BUDGET = 2_000_000, 20_000
#: backends of calls; None is that of the device
GPU_BACKENDS, CPU_BACKENDS = (None, None, "triton"), ("torch", "torch", "torch", "cpu")
GROUPS = 6
NAMES = "distributed-search", "random calls"


class Search:
    """Random calls that groups of ranks take, and their results."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        names = (f"{given.ranks} ranks {name}" for name in ("auto", *STRATEGIES))
        self.counts = {cell: Count() for cell in itertools.product(DTYPES, names)}
        self.begin = self.last = time.time()
        self.end = self.begin + 60 * given.minutes
        self.seeds = itertools.count(given.seed * 1_000_000)
        self.lock = threading.Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(self.given.groups) as pool:
            for _ in pool.map(self.serve, range(self.given.groups)):
                pass
        self.tell()

    def serve(self, _: int) -> None:
        """Run calls on a group of ranks of its own; start another group after a hang."""
        ranks: Ranks | None = None
        try:
            for one in self.calls():
                if ranks is None or not ranks.alive:
                    ranks = Ranks(self.given.ranks, self.given.device, self.end + LIMIT)
                kind, texts = result_of(ranks, one)
                with self.lock:
                    self.note(one, kind, texts)
        finally:
            if ranks is not None:
                ranks.close()

    def calls(self) -> Iterator[Spread]:
        """Yield calls until the end."""
        given = self.given
        on_cpu = given.device == "cpu"
        kinds = CPU_BACKENDS if on_cpu else GPU_BACKENDS
        while True:
            with self.lock:
                seed = next(self.seeds)
            dtype = given.dtypes[seed % len(given.dtypes)]
            for one in spreads(seed, given.ranks, dtype, kinds, given.budget):
                if time.time() > self.end:
                    return
                yield one

    def note(self, one: Spread, kind: str, texts: list[str]) -> None:
        name = f"{self.given.ranks} ranks {one.strategy}"
        self.counts[one.drawn.dtype, name].add(kind)
        if kind in FAILURES:
            print(kind.upper(), *texts, one.as_json(), sep="\n", flush=True)
        if time.time() > self.last + EVERY:
            self.tell()

    def tell(self) -> None:
        """Write the file and print a line."""
        self.last = time.time()
        ran = {cell: count for cell, count in self.counts.items() if count.kinds}
        seconds = self.last - self.begin
        write_counts(self.given.out, *NAMES, ran, self.given.device, seconds)
        kinds = ("right", "wrong", "fault", "refused")
        totals = (f"{sum(count[kind] for count in ran.values())} {kind}" for kind in kinds)
        print(f"{seconds:.0f} s: {', '.join(totals)}", flush=True)

    @property
    def bad(self) -> int:
        return sum(count.bad for count in self.counts.values())

    @property
    def calls_made(self) -> int:
        return sum(count.calls for count in self.counts.values())


def result_of(ranks: Ranks, one: Spread) -> tuple[str, list[str]]:
    """Return the kind of a call's result (right, wrong, refused or fault), and what it says."""
    try:
        return ranks.run(judged, one, limit=LIMIT)[0]
    except RanksError as error:
        return "fault", [str(error)]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=",".join(DTYPES), dest="dtypes", help="of groups")
    parser.add_argument("--budget", type=int, help="scores of a call")
    parser.add_argument("--groups", type=int, help=f"of ranks, side by side; {GROUPS} on GPUs")
    parser.add_argument("--out", type=Path, default=Path("distributed_search.csv"))
    parser.add_argument("--one", help="a call to run, as a failure's line has it")
    given = parser.parse_args(words)
    given.dtypes = given.dtypes.split(",")
    if unknown := set(given.dtypes) - set(DTYPES):
        parser.error(f"--dtype: got {', '.join(unknown)}; want some of {', '.join(DTYPES)}")
    on_gpus = given.device == "cuda"
    given.budget = given.budget or (GPU_BUDGET if on_gpus else CPU_BUDGET)
    most = GROUPS if on_gpus else 1
    given.groups = given.groups or max(1, min(most, (os.cpu_count() or 1) // (2 * given.ranks)))
    if on_gpus and torch.cuda.device_count() < given.ranks:
        parser.error(f"--ranks: got {given.ranks}; this host has {torch.cuda.device_count()} GPUs")
    return given


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    if given.one is not None:
        with Ranks(given.ranks, given.device) as ranks:
            kind, texts = result_of(ranks, spread_of(given.one))
        print(kind, *texts, sep="\n")
        return int(kind in FAILURES)
    search = Search(given)
    search.run()
    return int(search.bad > 0 or not search.calls_made)


if __name__ == "__main__":
    sys.exit(main())
