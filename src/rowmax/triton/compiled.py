"""Kernels compiled before they are launched, and launched without what Triton looks up each time.

Calling a kernel would compile it anew for every number that is 1 or a multiple of 16, and works
out at every launch what all of its arguments are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import ASTSource

from .assembler import assembling

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

#: what was compiled and loaded, by kernel, signature, options and device
_kernels: dict[Any, Any] = {}


class Signature(NamedTuple):
    """What a kernel is compiled for, as Triton wants it told."""

    types: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]

    def taken(self) -> list[Any]:
        """The types of what the compiled kernel takes, one by one."""
        return [x for x in _leaves(self.types.values()) if x != "constexpr"]


class Launch:
    """A kernel with a grid and all of its arguments but a bundle of pointers."""

    source: Any = ASTSource  # of the language that the kernel is written in

    def __init__(self, kernel: Any, grid: tuple[int, int, int], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.options = options
        #: what launches and the numbers that it takes, by which pointers there are and are aligned
        self._ready: dict[tuple[bool | None, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, first: tuple[Any, ...], t: Any, last: tuple[Any, ...]) -> None:
        """Launch with the arguments ``(*first, t, *last)`` on the current stream.

        ``t`` holds tensors, or None where a term is missing; ``first`` holds descriptions of
        tensors, or None, always in the same places; ``last`` does not change from call to call.
        """
        kind = tuple([None if x is None else x.data_ptr() & 15 == 0 for x in t])
        found = self._ready.get(kind)
        if found is None:
            found = launcher(self.loaded(*first, t, *last), self.grid), tuple(_given(last))
            self._ready[kind] = found
        ready, numbers = found
        copies = [x for x in first if x is not None]
        ready(*copies, *[x.data_ptr() for x in t if x is not None], *numbers)

    def loaded(self, *args: Any) -> Any:
        """The kernel for these arguments on the current device, compiled once for all launches."""
        signature = self.signature(*args)
        key = (
            self.kernel,
            torch.cuda.current_device(),
            *(tuple(x.items()) for x in signature),
            *self.options.items(),
        )
        found = _kernels.get(key)
        if found is None:
            found = self.compile(*args)
            # from which Triton makes its launcher, then given neither bundles nor constants: it
            # would take each apart at every launch. Before other threads find the kernel
            found.src.signature = dict(enumerate(signature.taken()))
            _kernels[key] = found
        return found

    def compile(self, *args: Any, target: Any = None) -> Any:
        """The kernel for these arguments, for the current device or for another target."""
        source = self.source(self.kernel, *self.signature(*args))
        target = target or triton.runtime.driver.active.get_current_target()
        with assembling(target.arch) as more:
            return triton.compile(source, target=target, options={**self.options, **more})

    def signature(self, *args: Any) -> Signature:
        found = Signature({}, {}, {})
        for i, (name, x) in enumerate(zip(self.kernel.arg_names, args, strict=True)):
            found.types[name] = _described(x, (i,), found)
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


def _leaves(x: Any) -> Iterator[Any]:
    """What is in a bundle, and in those within it."""
    for y in x:
        if isinstance(y, tuple):
            yield from _leaves(y)
        else:
            yield y


def _given(last: tuple[Any, ...]) -> list[Any]:
    """The numbers among the last arguments, which alone a compiled kernel takes."""
    return [x for x in _leaves(last) if x is not None and not isinstance(x, tl.constexpr)]


def _described(x: Any, path: tuple[int, ...], found: Signature) -> Any:
    """The type of an argument, or of each in a bundle; constants and alignments go to found."""
    if x is None or isinstance(x, tl.constexpr):
        found.constants[path] = None if x is None else x.value
        return "constexpr"
    if isinstance(x, Tensor):
        if x.data_ptr() % 16 == 0:
            found.attributes[path] = (("tt.divisibility", 16),)
        return _TYPES[x.dtype]
    if isinstance(x, float):
        return "fp32"
    if isinstance(x, int):
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    if hasattr(x, "block_shape"):  # what a copy engine is told of a tensor
        box = ", ".join(map(str, x.block_shape))
        return f"tensordesc<{_TYPES[x.base.dtype][1:]}[{box}],{x.layout!r}>"
    parts = [_described(y, (*path, i), found) for i, y in enumerate(x)]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
