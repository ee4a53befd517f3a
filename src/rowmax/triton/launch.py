"""Launching: what is known of a call before its pointers is worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem, Tensors
from .bundles import Constants, Numbers, Pointers
from .tiles import Tiles, tiles_for

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
        self._compiled: dict[int, Any] = {}

    def run(self, t: Pointers) -> None:
        """Launch on the current stream of the pointers' device."""
        if not t.q.is_cuda:  # the interpreter, or another kind of device
            self._compile_and_run(t)
        elif t.q.device.index != torch.cuda.current_device():
            with torch.cuda.device(t.q.device):
                self._run(t)
        else:
            self._run(t)

    def _run(self, t: Pointers) -> None:
        # Triton compiles anew where a pointer is None or is not aligned to 16 bytes. The handle
        # of a compiled kernel skips the look-up of which, much of a launch's time on the host.
        bits = present = 0
        for n, x in enumerate(t):
            if x is not None:
                bits |= x.data_ptr()
                present |= 1 << n
        if bits & 15 or torch.version.hip is not None:
            self._compile_and_run(t)
            return
        compiled = self._compiled.get(present)
        if compiled is None:
            self._compiled[present] = self._compile_and_run(t)
        else:
            compiled[self.grid](t, self.n, self.c)

    def _compile_and_run(self, t: Pointers) -> Any:
        return self.kernel[self.grid](
            t, self.n, self.c, num_warps=self.tiles.warps, num_stages=self.tiles.stages
        )


def planned(
    name: str,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    plan: Callable[..., Job],
    *more: Tensor,
) -> Job:
    """The job of this name for calls like this one: same problem, device, strides and tiles.

    ``plan(problem, tensors, tiles, *more)`` makes it where there is none yet.
    """
    q, k, v, bias, _, _, allowed, q_ids, k_ids, *_ = tensors
    given = (q, k, v, bias, allowed, q_ids, k_ids, *more)
    strides = [None if x is None else x.stride() for x in given]
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    key = (name, problem, q.device.index, tiles, *strides, *batches)
    job = _jobs.get(key)
    if job is None:
        if len(_jobs) >= _LIMIT:
            _jobs.clear()
        job = plan(problem, tensors, tiles or tiles_for(name, problem, q.device), *more)
        _jobs[key] = job
    return job
