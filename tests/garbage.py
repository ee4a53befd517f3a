"""Fewer collections of garbage, which took a sixth of the time to compile and to emulate."""

from __future__ import annotations

import atexit
import gc


def collect_less() -> None:
    """Leave what is imported out of garbage collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.unfreeze)  # Triton prints what the end of a process finds alive
