"""Launching: what is known of a call before its pointers is worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from ..problem import Problem, Tensors
from .bundles import Constants, Numbers, Pointers
from .tiles import Tiles, smaller, tiles_for

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

#: jobs kept, by everything that they depend on
_jobs: dict[Any, Job] = {}
_LIMIT = 4096


class Signature(NamedTuple):
    """What a kernel is compiled for, as Triton wants it told."""

    types: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]


class Job:
    """A kernel with its numbers, constants and grid; only pointers are missing.

    Kernels are compiled here and not by calling them, which would compile anew for every number
    that is 1 or a multiple of 16, and looks all of that up at every launch.
    """

    def __init__(self, kernel: Any, n: Numbers, c: Constants, tiles: Tiles, heads: int) -> None:
        self.kernel = kernel
        self.n = n
        self.c = c
        self.grid = (n.tiles * heads, 1, 1)
        self.tiles = tiles
        self.options = {
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            "enable_fp_fusion": True,
        }
        #: by what is there and what of it is aligned
        self._compiled: dict[tuple[bool | None, ...], Callable[..., None]] = {}

    def run(self, t: Pointers) -> None:
        """Launch on the current stream of the pointers' device."""
        if not t.q.is_cuda:  # the interpreter, or another kind of device
            options = {k: v for k, v in self.options.items() if k != "enable_fp_fusion"}
            self.kernel[self.grid](t, self.n, self.c, **options)
        elif t.q.device.index != torch.cuda.current_device():
            with torch.cuda.device(t.q.device):
                self._run(t)
        else:
            self._run(t)

    def _run(self, t: Pointers) -> None:
        addresses = tuple([None if x is None else x.data_ptr() for x in t])
        kind = tuple([x if x is None else x & 15 == 0 for x in addresses])
        ready = self._compiled.get(kind)
        if ready is None:
            ready = launcher(self.compile(t), self.grid)
            self._compiled[kind] = ready
        ready(addresses, self.n, self.c)

    def compile(self, t: Pointers, target: Any = None) -> Any:
        """The kernel for these pointers, on the current device or for another target."""
        types, constants, attributes = self.signature(t)
        source = ASTSource(self.kernel, types, constants, attributes)  # pyright: ignore
        return triton.compile(source, target=target, options=self.options)

    def signature(self, t: Pointers) -> Signature:
        found = Signature({}, {}, {})
        for i, (name, bundle) in enumerate((("t", t), ("n", self.n), ("c", self.c))):
            found.types[name] = _described(bundle, (i,), found)
        return found


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What launches a compiled kernel on the current stream of the device that is current now.

    As ``compiled[grid]`` does, but that what a profiler of Triton's would be told is put together
    only when one listens.
    """
    told = compiled[grid]
    device = torch.cuda.current_device()
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooks = knobs.runtime

    def ready(*args: Any) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            told(*args)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*grid, stream, function, metadata, None, None, None, *args)

    return ready


def _described(x: Any, path: tuple[int, ...], found: Signature) -> Any:
    """The type of an argument, or of each in a bundle; constants and alignments go to found."""
    if x is None or isinstance(x, tl.constexpr):
        found.constants[path] = None if x is None else x.value
        return "constexpr"
    if isinstance(x, Tensor):
        if x.data_ptr() % 16 == 0:
            found.attributes[path] = [["tt.divisibility", 16]]
        return _TYPES[x.dtype]
    if isinstance(x, float):
        return "fp32"
    if isinstance(x, int):
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    parts = [_described(y, (*path, i), found) for i, y in enumerate(x)]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


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
