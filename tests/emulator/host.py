"""The host's side of the emulator: kernel arguments made of torch tensors, and launches."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import threads
from .memory import Descriptor
from .values import Pointer, scalar


class TensorDescriptor:
    """A TMA descriptor as the host makes it, of a torch tensor; elements outside are zero."""

    def __init__(self, base: Any, shape: Any, strides: Any, box: Any, layout: Any) -> None:
        self.base, self.shape, self.strides, self.box = base, shape, strides, box
        self.layout, self.padding = layout, "zero"

    def over(self, base: Any) -> TensorDescriptor:
        """Return the descriptor of another tensor with the same strides."""
        return TensorDescriptor(base, self.shape, self.strides, self.box, self.layout)

    def descriptor(self) -> Descriptor:
        return Descriptor(self.base.as_strided(self.shape, self.strides).numpy(), self.box)


def pointer(t: Any) -> Pointer:
    """Return a pointer to the first element of a torch tensor, over the rest of its storage."""
    rest = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return Pointer(t.detach().as_strided((rest,), (1,)).numpy())


def argument(x: Any) -> Any:
    """Return an argument of the host as a kernel gets it."""
    if isinstance(x, TensorDescriptor):
        return x.descriptor()
    if hasattr(x, "data_ptr"):
        return pointer(x)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return scalar(x)
    if isinstance(x, tuple):
        parts = [argument(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def run(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run a kernel over ``programs`` blocks at once.

    Torch tensors become pointers, and descriptors, numbers and tuples what a kernel takes in their
    place. ``constants`` stay as they are.
    """
    threads.run_blocks(
        lambda *given: kernel(*given, **constants), programs, *(argument(x) for x in args)
    )


class Launch:
    """A launch in place of ``rowmax.gpu.compiled.Launch``."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        options: dict[str, Any],
        last: tuple[Any, ...] = (),
        copies: tuple[Any, ...] = (),
    ) -> None:
        self.kernel, self.grid, self.last, self.copies = kernel, grid, last, copies

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        both = zip(self.copies, bases, strict=True)
        copies = (None if x is None else x.over(base) for x, base in both)
        numbers, *constants = self.last
        args = (argument(x) for x in (*copies, t, numbers))
        threads.run_blocks(self.kernel, self.grid[0], *args, *constants)


class Grid:
    """A plain Triton kernel, launched as ``kernel[grid](...)``, one program after another."""

    def __init__(self, f: Any) -> None:
        self.f = f

    def __call__(self, *args: Any) -> Any:
        return self.f(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any) -> None:
            for pid in range(grid[0]):
                threads.here.thread.block = threads.Block(pid, grid[0])
                with np.errstate(all="ignore"):
                    self.f(*(x if isinstance(x, int) else argument(x) for x in args))

        return launch
