"""Launching: what is known of a call before its pointers is worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ..problem import Problem, Tensors
from .bundles import Constants, Numbers, Pointers
from .compiled import Launch
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
        self.options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        self.launch = Launch(kernel, self.grid, {**self.options, "enable_fp_fusion": True})

    def run(self, t: Pointers) -> None:
        """Launch on the current stream of the pointers' device."""
        if not t.q.is_cuda:  # the interpreter, or another kind of device
            self.kernel[self.grid](t, self.n, self.c, **self.options)
        elif t.q.device.index != torch.cuda.current_device():
            with torch.cuda.device(t.q.device):
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
    pointers: Callable[[Job], Pointers],
    *more: Tensor,
) -> None:
    """Run the job of this name with ``pointers(job)``; with smaller tiles if it does not fit.

    The job, made by ``plan(problem, tensors, tiles, *more)``, serves every call with the same
    problem, device, strides and tiles.
    """
    q, k, v, bias, _, _, allowed, q_ids, k_ids, *_ = tensors
    given = (q, k, v, bias, allowed, q_ids, k_ids, *more)
    strides = [None if x is None else x.stride() for x in given]
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    key = (name, problem, q.device.index, tiles, *strides, *batches)
    job = _jobs.get(key)
    if job is not None:
        job.run(pointers(job))
        return
    chosen = tiles or tiles_for(name, problem, q.device)
    while True:
        job = plan(problem, tensors, chosen, *more)
        try:
            job.run(pointers(job))
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
