"""Measure tiles on the current device, for ``rowmax tune``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...call.problem import Options, Problem, Tensors, problem_of
from ..launch import launch
from ..preprocess import padded_rows
from ..tiles import BOTH_UP_TO, Kind, Limits, Tiles, candidates, kind_of, limits_of, table
from .backward_dkdv import DK, DKDV, DV
from .backward_dq import DQ
from .forward import forward

#: the number of candidates of each job, in the rule's order
CANDIDATES = 10
#: lengths of the sequences that candidates are measured on
LENGTHS = (1024, 4096)
#: the errors of candidates that a device cannot run
_REFUSALS = (OutOfResources, RuntimeError)


class Trial(NamedTuple):
    """A measurement: the tiles of a kind and their median time, None where they do not run."""

    kind: Kind
    tiles: Tiles
    ms: float | None


def trials(
    d: int, dtype: torch.dtype, causal: bool, tokens: int = 16384, device: str = "cuda"
) -> list[tuple[Kind, Tiles, Callable[[], Any]]]:
    """Return every candidate of every job of a head size, short and long, each with its call."""
    found = []
    for n in LENGTHS:
        shape = (max(1, tokens // n), n, max(1, 2048 // d), d)
        q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        tensors = Tensors(q, k, v)
        problem = problem_of(tensors, Options(scale=d**-0.5, right=0 if causal else None))
        jobs = ["dk", "dv"] if d > BOTH_UP_TO else ["dkdv"]
        for job in ("forward", *jobs, "dq"):
            kind, run = kind_of(job, problem), _runner(job, problem, tensors, dout)
            found += [
                (kind, one, partial(run, one))
                for one in tried(kind, limits_of(q.device), causal and job != "forward")
            ]
    return found


def tried(kind: Kind, limits: Limits, split: bool) -> list[Tiles]:
    """Return the tiles in use, then the rule's candidates; if ``split``, with two loops as well."""
    shipped = table(kind, limits)
    every = [*([shipped] if shipped else []), *islice(candidates(kind, limits), CANDIDATES)]
    if split:
        every = [replace(tiles, split=x) for tiles in every for x in (False, True)]
    return list(dict.fromkeys(every))


def _runner(job: str, problem: Problem, tensors: Tensors, dout: Tensor) -> Callable[[Tiles], Any]:
    """Return a function that runs a job with given tiles, over numbers of a usual size."""
    if job == "forward":
        return lambda tiles: forward(problem, tensors, tiles)
    lse2 = torch.full(padded_rows(problem), 13.0, device=dout.device)
    made = {"dout": dout, "lse2": lse2, "delta": torch.zeros_like(lse2)}
    written = zip(("dq", "dk", "dv"), tensors, strict=False)
    made |= {name: torch.empty_like(x) for name, x in written if x is not None and name in job}
    spec = {"dq": DQ, "dkdv": DKDV, "dk": DK, "dv": DV}[job]
    return lambda tiles: launch(spec, problem, tensors, tiles, made)


def compiled(calls: Iterable[Callable[[], Any]], device: torch.device) -> Iterator[None]:
    """Call each once, many at a time; yield when one is done, whether it can run or not.

    Compiling takes longer than measuring, and mostly releases Python's lock.
    """
    ready, given = None, ()
    if device.type == "cuda":
        triton.runtime.driver.active.get_current_target()  # builds the driver, in one thread
        ready, given = torch.cuda.set_device, (device,)
    pool = ThreadPoolExecutor(initializer=ready, initargs=given)
    try:
        for done in as_completed([pool.submit(call) for call in calls]):
            if not isinstance(done.exception(), _REFUSALS):
                done.result()
            yield
    finally:
        pool.shutdown(cancel_futures=True)


def measure(kind: Kind, tiles: Tiles, call: Callable[[], Any]) -> Trial:
    """Return the median time of a candidate, compiled first if need be."""
    try:
        call()
        ms = triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")  # pyright: ignore
    except _REFUSALS:
        return Trial(kind, tiles, None)
    return Trial(kind, tiles, float(ms))  # pyright: ignore


def winners(done: list[Trial]) -> dict[str, Tiles]:
    """Return the fastest tiles of each kind."""
    best: dict[str, Trial] = {}
    for trial in done:
        name = str(trial.kind)
        if trial.ms is not None and (name not in best or trial.ms < (best[name].ms or 0.0)):
            best[name] = trial
    return {name: trial.tiles for name, trial in best.items()}
