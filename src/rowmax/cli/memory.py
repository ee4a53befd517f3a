"""The peak of memory: of the device where that counts it, else of this process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Memory:
    """Counts from where it is made: ``peak()`` is what was held beyond that, at most.

    On a CPU that is resident memory, by the kernel's own high-water mark. Where the mark cannot
    be set back (outside Linux, or forbidden), an earlier and higher peak hides a later one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start: int | None = torch.cuda.memory_allocated(device)
        elif device.type == "cpu":
            self.start = _reset()
        else:
            self.start = None

    def peak(self) -> int | None:
        """Bytes, or None where they cannot be known."""
        if self.start is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        highest = _high_water()
        return None if highest is None else max(0, highest - self.start)


def _reset() -> int | None:
    """Set the high-water mark back to what is resident now, and say where it is."""
    if _CLEAR.exists():
        try:
            _CLEAR.write_text("5")
        except OSError:
            return _high_water()
    return _high_water()


def _high_water() -> int | None:
    """The most that this process has had resident, in bytes."""
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
