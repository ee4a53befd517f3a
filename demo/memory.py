"""The peak of memory: of the device where torch counts it, else of this process."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Memory:
    """Measures the peak of memory beyond what is held when it is constructed.

    On a CPU that is resident memory, by the high-water mark of the operating system. Outside Linux,
    or where the mark cannot be reset, an earlier and higher peak hides a later one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
        elif device.type == "cpu":
            self.start = _reset_high_water()

    def peak(self) -> int | None:
        """Return bytes, or None where the system does not report them."""
        if self.start is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        highest = _high_water()
        return None if highest is None else max(0, highest - self.start)


def _reset_high_water() -> int | None:
    """Reset the high-water mark to the current resident memory; return the mark."""
    if _CLEAR.exists():
        with suppress(OSError):
            _CLEAR.write_text("5")
    return _high_water()


def _high_water() -> int | None:
    """Return the most bytes that this process has had resident."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
