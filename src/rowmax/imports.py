"""A context for imports of backends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: a process that froze more objects keeps them so; Python 3.12 itself freezes 375
_FROZEN = 1000


@contextmanager
def without_collections(module: str) -> Iterator[None]:
    """Collect no garbage in this context, which imports a module, if the process collects any.

    Imports make many objects, and they stay. That of Triton used to begin a collection of all
    objects, which takes 95 ms after an import of torch. Objects of the context are old at once.
    Else the same collection would begin in the first backward. Younger garbage is collected before.
    All of it takes milliseconds, so a module that is imported already has a context that does
    nothing.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FROZEN:
            gc.freeze()  # moves all objects to another list
            gc.unfreeze()  # moves that list to the oldest generation
        gc.enable()
