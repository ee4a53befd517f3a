"""Compile each Numba kernel in one process at a time: the others wait, and load what it kept.

Parts of the tests run at once, and the first calls of all need the same kernels.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_held = threading.local()


def compile_once() -> None:
    """Make Numba wait for other processes, where it is installed."""
    if find_spec("numba") is None or sys.platform == "win32":
        return
    from numba.core import dispatcher

    compile_now = dispatcher.Dispatcher.compile

    def compile_alone(self: Any, sig: Any) -> Any:
        folder = self._cache.cache_path
        if folder is None:  # it keeps nothing
            return compile_now(self, sig)
        with _alone(Path(folder) / f"{self.py_func.__name__}.lock"):
            return compile_now(self, sig)

    dispatcher.Dispatcher.compile = compile_alone


@contextmanager
def _alone(path: Path) -> Any:
    """Hold the lock of a file, which this thread may hold already."""
    import fcntl

    held = _held.__dict__.setdefault("paths", set())
    if path in held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held.add(path)
        try:
            yield
        finally:
            held.remove(path)
