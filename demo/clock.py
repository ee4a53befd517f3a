"""One clock for the whole demo: the time that is left, and the work that still fits into it.

A kernel cannot be interrupted, so time is predicted before work is started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MARGIN = 1.5  # on predictions, because the load of the machine varies


class Clock:
    """Seconds from a start to an end. ``spent`` seconds have passed already."""

    def __init__(
        self, seconds: float, now: Callable[[], float] = time.monotonic, spent: float = 0.0
    ) -> None:
        self.seconds = seconds
        self.now = now
        self.start = now() - spent

    @property
    def elapsed(self) -> float:
        return self.now() - self.start

    @property
    def left(self) -> float:
        """Return the seconds until the end, 0 after it."""
        return max(0.0, self.seconds - self.elapsed)

    def fits(self, seconds: float) -> bool:
        """Return True if work that is predicted to take that long ends in time."""
        return 0 < self.left >= MARGIN * seconds

    def until(self, share: float) -> Clock:
        """Return the same clock with an earlier end, at a share of all its seconds.

        A part that ends early leaves its time to the later ones.
        """
        return Clock(self.seconds * share, self.now, self.elapsed)


def process_age() -> float:
    """Return the seconds since this process started, 0 where the system does not say.

    The import of torch alone takes many seconds on a busy machine.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def load_average() -> float | None:
    """Return the mean number of running tasks of the last minute, None on Windows."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
