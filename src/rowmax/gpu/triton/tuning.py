"""Measuring tiles on the device at hand: what ``rowmax tune`` does."""

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
from .backward import plan_key_gradients, plan_query_gradients
from .bundles import ROW_UNIT, pointers
from .forward import forward
from .launch import launch
from .tiles import BOTH_UP_TO, Kind, Limits, Tiles, candidates, kind_of, limits_of, table

#: of each job, in the rule's order
CANDIDATES = 10
#: of the sequences that candidates are measured on
LENGTHS = (1024, 4096)
#: how candidates fail that a device cannot run
_REFUSALS = (OutOfResources, RuntimeError)


class Trial(NamedTuple):
    """One measurement: the tiles of a kind and their median time, None where they do not run."""

    kind: Kind
    tiles: Tiles
    ms: float | None


def trials(
    d: int, dtype: torch.dtype, causal: bool, tokens: int = 16384, device: str = "cuda"
) -> list[tuple[Kind, Tiles, Callable[[], Any]]]:
    """Every candidate of every job of one head size, short and long, each with a call of it."""
    found = []
    for n in LENGTHS:
        shape = (max(1, tokens // n), n, max(1, 2048 // d), d)
        q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        tensors = Tensors(q, k, v)
        problem = problem_of(tensors, Options(scale=d**-0.5, right=0 if causal else None))
        jobs = ["dk", "dv"] if d > BOTH_UP_TO else ["key_gradients"]
        for job in ("forward", *jobs, "query_gradients"):
            kind, run = kind_of(job, problem), _runner(job, problem, tensors, dout)
            found += [
                (kind, one, partial(run, one))
                for one in tried(kind, limits_of(q.device), causal and job != "forward")
            ]
    return found


def tried(kind: Kind, limits: Limits, split: bool) -> list[Tiles]:
    """What is in use, then the rule's candidates; with loops of their own for full tiles too."""
    shipped = table(kind, limits)
    every = [*([shipped] if shipped else []), *islice(candidates(kind, limits), CANDIDATES)]
    if split:
        every = [replace(tiles, split=x) for tiles in every for x in (False, True)]
    return list(dict.fromkeys(every))


def _runner(job: str, problem: Problem, tensors: Tensors, dout: Tensor) -> Callable[[Tiles], Any]:
    """A call of one job by its tiles, over numbers of the size that they have in use."""
    if job == "forward":
        return lambda tiles: forward(problem, tensors, tiles)
    b, h, n = problem.lse_shape
    rows = dout.new_empty((b, h, -(-n // ROW_UNIT) * ROW_UNIT), dtype=torch.float32)
    t = pointers(tensors)._replace(
        dout=dout,
        lse2=torch.full_like(rows, 13.0),
        rest=torch.zeros_like(rows) if problem.natural else None,
        delta=torch.zeros_like(rows),
        dq=torch.empty_like(tensors.q) if job == "query_gradients" else None,
        dk=torch.empty_like(tensors.k) if job in ("key_gradients", "dk") else None,
        dv=torch.empty_like(tensors.v) if job in ("key_gradients", "dv") else None,
    )
    plan = plan_query_gradients if job == "query_gradients" else plan_key_gradients
    return lambda tiles: launch(job, problem, tensors, tiles, plan, lambda *_: t, dout)


def compiled(calls: Iterable[Callable[[], Any]], device: torch.device) -> Iterator[None]:
    """Call all once, many at a time; yields when one is done, whether it can run or not.

    Compiling takes longer than measuring, and most of it leaves Python's lock alone.
    """
    ready, given = None, ()
    if device.type == "cuda":
        triton.runtime.driver.active.get_current_target()  # made at its first use: not by many
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
    """The median time of a candidate, compiled first if need be."""
    try:
        call()
        ms = triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")  # pyright: ignore
    except _REFUSALS:
        return Trial(kind, tiles, None)
    return Trial(kind, tiles, float(ms))  # pyright: ignore


def winners(done: list[Trial]) -> dict[str, Tiles]:
    """The fastest tiles of each kind."""
    best: dict[str, Trial] = {}
    for trial in done:
        name = str(trial.kind)
        if trial.ms is not None and (name not in best or trial.ms < (best[name].ms or 0.0)):
            best[name] = trial
    return {name: trial.tiles for name, trial in best.items()}
