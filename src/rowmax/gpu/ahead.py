"""Compile the kernels of a backward while its forward compiles and runs.

A forward that compiles goes through its backward first, without running it: tensors have no memory,
operations compute nothing, and launches are only noted. Threads compile what was noted
(``threads.py``). Nothing here raises: what fails is left to the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..call.problem import Problem, Tensors
from ..torch_compat import DispatchMode
from . import compat, threads
from .compiled import Launch, once_read, recorded_by
from .replay import EMPTY, VIEWS

#: operations that keep the memory of their argument; ``torch.tensor`` ends with the last
_SAME = VIEWS | {torch.ops.aten.lift_fresh.default}
#: the backward of (out, lse, dout)
Backward = Callable[[Tensor, Tensor, Tensor], Any]

#: launches, each with all arguments of its kernel
Launches = list[tuple[Launch, tuple[Any, ...]]]

#: kinds of calls whose backward has been compiled ahead. Lengths do not separate them: each step of
#: a growing cache has one of its own, and often no backward
_kinds: set[Any] = set()


class _Pretended(DispatchMode):
    """Operations on tensors of a device make results without memory, and compute nothing.

    Those on tensors of the CPU run: plans make tables there.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return _without_memory(func(*args, **kwargs))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in given if x.device.type == self.device]
        if not there or (func in _SAME and not any(map(_is_without_memory, there))):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        args, kwargs = tree_map_only(Tensor, lambda x: _strided(x, "meta"), (args, kwargs))
        found = func(*args, **kwargs)
        device = there[0].device
        return tree_map_only(Tensor, lambda x: _without_memory(_strided(x, device)), found)


def _strided(x: Tensor, device: Any) -> Tensor:
    """Return a new tensor of the sizes and strides of x, aligned like x."""
    start = x.storage_offset() % 16
    size = start + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    base = torch.empty(size if x.numel() else start, dtype=x.dtype, device=device)
    return base.as_strided(x.shape, x.stride(), start)


def _without_memory(x: Tensor) -> Tensor:
    """Return a new tensor, its memory given back. Its address is then 0, which is aligned."""
    x.untyped_storage().resize_(0)
    return x


def _is_without_memory(x: Tensor) -> bool:
    return x.numel() > 0 and x.untyped_storage().nbytes() == 0


def arguments(problem: Problem, tensors: Tensors, backward: Backward) -> Launches:
    """Return the launches of a backward with their arguments, as far as none depends on values."""
    q = tensors.q
    with _Pretended(q.device.type):
        with recorded_by(running=False) as found, suppress(Exception):
            out = q.new_empty(problem.out_shape)
            lse = q.new_empty(problem.lse_shape, dtype=problem.accumulator)
            backward(out, lse, q.new_empty(problem.out_shape))
        # a kernel with copies is a main one, and takes ten times as long as one over rows
        found.sort(key=lambda x: not x[0].copies)
        return [(launch, launch.arguments(t, bases)) for launch, t, bases in found]


def compile_ahead(problem: Problem, tensors: Tensors, backward: Backward, wanted: Any) -> Any:
    """Return a context for a first forward in which threads compile its backward's kernels.

    They begin once the forward has read its own source, which holds the interpreter's lock. Where
    the forward finds its kernel in Triton's cache, the backward will, too: nothing begins.
    """
    q = tensors.q
    if not (threads.enabled() and q.is_cuda) or torch.cuda.is_current_stream_capturing():
        return nullcontext()
    bias = None if problem.bias is None else tuple(n > 1 for n in problem.bias)
    lengths = {"batch": 0, "nq": 0, "nk": 0, "total_q": 0, "total_k": 0}
    kind = (problem._replace(bias=bias, allowed=None, **lengths), wanted)  # pyright: ignore
    if kind in _kinds:
        return nullcontext()

    def begin() -> None:
        _kinds.add(kind)
        with suppress(Exception):
            submit(problem, tensors, backward)

    return once_read(begin)


def submit(problem: Problem, tensors: Tensors, backward: Backward) -> None:
    """Let threads compile the kernels of a backward, the longest first."""
    with torch.cuda.device(tensors.q.device):
        every = arguments(problem, tensors, backward)
        jobs = (x.pending(*args) for x, args in every if compat.is_compiled(x.kernel))
        threads.THREADS.submit([job for job in jobs if job is not None])
