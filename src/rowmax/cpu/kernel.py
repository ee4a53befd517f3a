"""How the kernels are compiled, cached on disk, and run on threads."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numba import njit

from . import threads

_PATIENCE = 1.0  # seconds of compiling before a line says so


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    """Of this package's text. Numba's cache looks only at the file a kernel stands in; with
    this in the kernel's name it is compiled anew when any step of it has changed."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def kernel(function: Callable) -> Callable:
    """Compiled at its first call for a dtype, then taken from Numba's cache on disk."""
    function.__qualname__ = f"{function.__name__}_{_fingerprint()}"
    return njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)


def launch(worker: Callable, *arguments: object, tasks: int, flops: float) -> None:
    """Runs ``worker(*arguments, counters)`` on as many threads as the work is worth."""
    if tasks == 0:
        return
    counters = np.zeros(8, np.int64)
    wanted = min(torch.get_num_threads(), tasks, 1 + int(flops / 2e6))
    if not worker.signatures:  # pyright: ignore
        with _Notice():
            threads.run(lambda: worker(*arguments, counters), wanted)
        return
    threads.run(lambda: worker(*arguments, counters), wanted)


class _Notice:
    """A line on stderr when compiling takes long enough for a user to wonder."""

    def __enter__(self) -> None:
        self.timer = threading.Timer(_PATIENCE, self._print)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    @staticmethod
    def _print() -> None:
        text = "rowmax: compiling the CPU kernels for this machine (once, some seconds)"
        print(text, file=sys.stderr, flush=True)
