"""Compiles the CPU kernels for the demo in a child process, which can be stopped.

The compiled code stays in Numba's cache, from which this process loads it in a second. Compiling
takes about 10 to 25 seconds of processor time for a dtype, minutes on a busy machine.
"""

from __future__ import annotations

import time
from types import TracebackType

import torch

from .child import Child, arguments, report
from .clock import Clock

#: float16 is computed in float32, and bfloat16 without instructions of its own, too
ORDER = ("float32", "bfloat16", "float64")
_SAME = {"float16": "float32"}


class Kernels:
    """Says for which dtypes a backend can be called without a long compilation."""

    def __init__(self, names: tuple[str, ...], clock: Clock) -> None:
        self.clock = clock
        self.child: Child | None = None
        self._begun: set[str] = set()
        if "cpu" in names:
            self.child = Child("rowmax.cli.compiling", *ORDER)

    def ready(self, name: str, dtype: torch.dtype) -> bool:
        """Return True if the backend computes in this dtype at once.

        Without a cache on disk this process has to compile once more, which must fit.
        """
        if name != "cpu" or self.child is None:
            return True
        wanted = str(dtype).removeprefix("torch.")
        wanted = _SAME.get(wanted, wanted)
        if wanted in self._begun:
            return True
        found = {n: (seconds, kept) for n, seconds, kept in self.child.lines}
        if wanted not in found:
            # a compiler that fails does so here as well, at once: the checks then show why
            return not self.child.running and self.child.complaint() is not None
        seconds, kept = found[wanted]
        if kept or self.clock.fits(seconds):
            self._begun.add(wanted)
        return wanted in self._begun

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    def wait(self) -> None:
        """Wait a moment for the child."""
        if self.child is not None:
            self.child.wait(min(0.2, self.clock.left))

    def describe(self) -> str:
        """Return what is being compiled, for a line of progress."""
        done = [] if self.child is None else [line[0] for line in self.child.lines]
        rest = [name for name in ORDER if name not in done]
        return f"compiling the CPU kernels for {rest[0]}" if self.running and rest else ""

    def __enter__(self) -> Kernels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.child is not None:
            self.child.stop()


def compile_for(dtype: torch.dtype) -> float:
    """Compile both directions for a dtype; return the seconds it took."""
    import rowmax

    start = time.monotonic()
    q = torch.ones(1, 8, 1, 8, dtype=dtype, requires_grad=True)
    out = rowmax.attention(q, q, q, backend="cpu")
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    return time.monotonic() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in arguments():
        seconds = compile_for(getattr(torch, name))
        from rowmax.cpu.kernel import kept

        report((name, seconds, kept()))
