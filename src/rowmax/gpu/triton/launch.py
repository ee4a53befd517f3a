"""Launching: what is known of a call before its pointers is worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...call.problem import Problem, Tensors
from ..compat import current_device
from ..compiled import Launch
from .bundles import Constants, Numbers, Pointers, prepared
from .tiles import Tiles, smaller, tiles_for

#: jobs kept, by everything that they depend on
_jobs: dict[Any, Job] = {}
_LIMIT = 4096


class Job:
    """A kernel with its numbers, constants and grid; only pointers are missing."""

    def __init__(self, kernel: Any, n: Numbers, c: Constants, tiles: Tiles, heads: int) -> None:
        self.kernel = kernel
        self.n = n
        self.c = c
        self.grid = (n.tiles * heads, 1, 1)
        self.tiles = tiles
        self.options = {
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            "enable_fp_fusion": True,  # whatever is the default: of triton 3.10 it is off
        }
        self.launch = Launch(kernel, self.grid, self.options)

    def run(self, t: Pointers) -> None:
        """Launch on the current stream of the pointers' device."""
        q = t.q
        if not q.is_cuda:
            if q.device.type == "cpu":  # the interpreter
                self.launch.public(t, self.n, self.c)
            else:
                with torch.get_device_module(q.device).device(q.device):
                    self.launch.public(t, self.n, self.c)
        elif q.get_device() != current_device():
            with torch.cuda.device(q.device):
                self.launch((), t, (self.n, self.c))
        else:
            self.launch((), t, (self.n, self.c))

    def compile(self, t: Pointers, target: Any) -> Any:
        """The kernel for these pointers and another target."""
        return self.launch.compile(t, self.n, self.c, target=target)


def launch(
    name: str,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    plan: Callable[..., Job],
    pointers: Callable[[Job, Tensors], Pointers],
    *more: Tensor,
) -> None:
    """Run the job of this name; with smaller tiles if it does not fit.

    The job, made by ``plan(problem, tensors, tiles, *more)``, serves every call with the same
    problem, device, strides and tiles. It is run on ``pointers(job, tensors)``, for tensors as
    kernels read them (``prepared``).
    """
    key = _key(name, problem, tensors, tiles, more)
    job = _jobs.get(key)
    q, k, v = tensors[:3]
    if job is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        # strides for which there is a job are such as ``prepared`` leaves alone
        tensors = prepared(tensors)
        key = _key(name, problem, tensors, tiles, more)
        job = _jobs.get(key)
    if job is not None:
        job.run(pointers(job, tensors))
        return
    chosen = tiles or tiles_for(name, problem, q.device)
    while True:
        job = plan(problem, tensors, chosen, *more)
        try:
            job.run(pointers(job, tensors))
        except OutOfResources:
            less = None if tiles else smaller(chosen)
            if less is None:
                raise
            chosen = less
            continue
        if len(_jobs) >= _LIMIT:
            _jobs.clear()
        _jobs[key] = job
        return


def _key(
    name: str,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    more: tuple[Tensor, ...],
) -> tuple[Any, ...]:
    """All that a job depends on. Which tensors there are the problem says."""
    strides = [x.stride() for x in tensors if x is not None]
    batches = ()
    if problem.documents:
        batches = [x.shape[0] for x in (tensors.q_ids, tensors.k_ids) if x is not None]
    return (
        name,
        problem,
        tensors.q.get_device(),
        tiles,
        *strides,
        *[x.stride() for x in more],
        *batches,
    )
