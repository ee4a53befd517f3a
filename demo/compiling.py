"""Compiles the CPU kernels in a child process, which can be stopped.

Numba's cache keeps the compiled code, and this process loads it in a second. Compiling takes 10 to
25 seconds of processor time for a dtype, minutes on a busy machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch

import rowmax

from .child import Child, read_arguments, report
from .clock import Clock

ORDER = ("float32", "bfloat16", "float64")
_SAME = {"float16": "float32"}  # the kernels compute both in float32


class Kernels:
    """The dtypes that a backend can compute without a long compilation."""

    def __init__(self, names: tuple[str, ...], clock: Clock) -> None:
        self.clock = clock
        self.child: Child | None = None
        self._loaded: set[str] = set()
        if "cpu" in names:
            self.child = Child("demo.compiling", *ORDER)

    def ready(self, name: str, dtype: torch.dtype) -> bool:
        """Return True if the backend can compute in this dtype now.

        Without a cache on disk this process must compile again, which must fit into the time.
        """
        if name != "cpu" or self.child is None:
            return True
        wanted = str(dtype).removeprefix("torch.")
        wanted = _SAME.get(wanted, wanted)
        if wanted in self._loaded:
            return True
        compiled = {n: (seconds, cached) for n, seconds, cached in self.child.lines}
        if wanted not in compiled:
            # a compiler that fails in the child also fails here: the checks then show the error
            return not self.child.running and self.child.error() is not None
        seconds, cached = compiled[wanted]
        if cached or self.clock.fits(seconds):
            self._loaded.add(wanted)
        return wanted in self._loaded

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    def wait(self) -> None:
        """Wait a short time for the child."""
        if self.child is not None:
            self.child.wait(min(0.2, self.clock.left))

    def describe(self) -> str:
        """Return a line of progress: the dtype that is being compiled."""
        done = [] if self.child is None else [line[0] for line in self.child.lines]
        rest = [name for name in ORDER if name not in done]
        return f"compiling the CPU kernels for {rest[0]}" if self.running and rest else ""

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child is not None:
            self.child.stop()


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile forward and backward for a dtype."""
    q = torch.ones(1, 8, 1, 8, dtype=dtype, requires_grad=True)
    out = rowmax.attention(q, q, q, backend="cpu")
    assert isinstance(out, torch.Tensor)
    out.sum().backward()


def compile_each(
    names: Iterable[str], compile_one: Callable[[torch.dtype], None] = compile_kernels
) -> Iterator[tuple[str, float, bool]]:
    """Yield (dtype, seconds it took, True if the code is kept on disk) for each dtype.

    rowmax warns where it finds no folder for Numba's cache.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names:
            start = time.monotonic()
            compile_one(getattr(torch, name))
            seconds = time.monotonic() - start
            yield name, seconds, not any("NUMBA_CACHE_DIR" in str(w.message) for w in caught)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in compile_each(read_arguments()):
        report(line)
