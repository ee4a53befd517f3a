"""Kernels compiled before they are launched, and launched without what Triton looks up each time.

Calling a kernel would compile it anew for every number that is 1 or a multiple of 16, and works
out at every launch what all of its arguments are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from . import compat
from .assembler import assembling, current_arch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

_MOST_KERNELS = 1024
_MOST_READY = 64  # alignments of the pointers of one launch


class Kept:
    """A compiled kernel on one device, and the launches that use it."""

    def __init__(self, kernel: Any, device: int) -> None:
        self.kernel = kernel
        self.device = device
        self.users: WeakSet[Launch] = WeakSet()


#: by kernel, device, signature and options; the one used last is the last
_kernels: OrderedDict[Any, Kept] = OrderedDict()
_kernels_lock = threading.Lock()


def _evicted() -> list[Kept]:
    """Remove the oldest kernels past the bound. One that a launch or a CUDA graph may still run
    stays: from triton 3.9 on, a kernel that nothing refers to is unloaded from its device."""
    if len(_kernels) <= _MOST_KERNELS or compat.graphs_exist():
        return []
    unused = [key for key, x in _kernels.items() if not x.users]
    return [_kernels.pop(key) for key in unused[: len(_kernels) - _MOST_KERNELS]]


def _unload(evicted: list[Kept]) -> None:
    """Release kernels, each on its own device and once it has run."""
    while evicted:
        with torch.cuda.device(evicted[-1].device):
            torch.cuda.synchronize()
            evicted.pop()


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
        #: what launches (None: the public way) and its numbers, by which pointers there are and
        #: are aligned
        self._ready: dict[
            tuple[bool | None, ...], tuple[Callable[..., None] | None, tuple[Any, ...]]
        ] = {}

    def __call__(self, first: tuple[Any, ...], t: Any, last: tuple[Any, ...]) -> None:
        """Launch with the arguments ``(*first, t, *last)`` on the current stream.

        ``t`` holds tensors, or None where a term is missing; ``first`` holds descriptions of
        tensors, or None, always in the same places; ``last`` does not change from call to call.
        """
        kind = tuple([None if x is None else x.data_ptr() & 15 == 0 for x in t])
        found = self._ready.get(kind)
        if found is None:
            found = self._made_ready(kind, (*first, t, *last), last)
        ready, numbers = found
        if ready is None:
            self.public(*first, t, *last)
            return
        copies = [x for x in first if x is not None]
        ready(*copies, *[x.data_ptr() for x in t if x is not None], *numbers)

    def public(self, *args: Any) -> None:
        """Launch as users of Triton do: slower, but with nothing of Triton that is private."""
        with assembling(current_arch() if compat.is_compiled(self.kernel) else None) as more:
            self.kernel[self.grid](*args, **self.options, **more)

    def _made_ready(
        self, kind: tuple[bool | None, ...], args: tuple[Any, ...], last: tuple[Any, ...]
    ) -> tuple[Callable[..., None] | None, tuple[Any, ...]]:
        ready = None
        if compat.is_compiled(self.kernel):
            kept = self.loaded(*args)
            ready = compat.launcher(kept.kernel, self.grid, kept.device)
        found = ready, tuple(_given(last))
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[kind] = found
        return found

    def loaded(self, *args: Any) -> Kept:
        """The kernel for these arguments on the current device, compiled once for all launches."""
        signature = self.signature(*args)
        device = torch.cuda.current_device()
        key = (
            self.kernel,
            device,
            *(tuple(x.items()) for x in signature),
            *self.options.items(),
        )
        kept = self._found(key)
        if kept is not None:
            return kept
        kernel = self.compile(*args)
        # from which Triton makes its launcher, then given neither bundles nor constants: it
        # would take each apart at every launch. Before other threads find the kernel
        kernel.src.signature = dict(enumerate(signature.taken()))
        return self._found(key, Kept(kernel, device))

    def _found(self, key: Any, new: Kept | None = None) -> Any:
        """The kept kernel of a key, which this launch then uses; ``new`` where there is none."""
        evicted: list[Kept] = []
        with _kernels_lock:
            kept = _kernels.get(key, new)
            if kept is not None:
                kept.users.add(self)
                _kernels[key] = kept
                _kernels.move_to_end(key)
            if new is not None:
                evicted = _evicted()
        _unload(evicted)
        return kept

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
