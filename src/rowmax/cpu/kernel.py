"""Kernels: compile them, keep them on disk, run them on threads."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.core import event

from ..call.inputs import HEAD_TERMS
from . import threads
from .numba_compat import KERNEL

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    """Return a hash of the text of the kernels and rules, and of the terms that heads.py reads.

    Numba's cache compares only the file of a kernel. With the hash in its name, a kernel is
    compiled again when any of its functions has changed.
    """
    here = Path(__file__).parent
    paths = (*sorted(here.glob("*.py")), *sorted((here.parent / "rules").glob("*.py")))
    texts = (path.read_bytes() for path in paths)
    terms = repr(HEAD_TERMS).encode()
    return hashlib.sha256(b"".join((*texts, terms))).hexdigest()[:12]


#: each kernel, and True if its compiled code is kept on disk
_KERNELS: dict[Callable, bool] = {}


def kernel(function: Callable) -> Callable:
    """Compile at the first call for a dtype; later processes load it from Numba's cache on disk.

    Where Numba finds no folder for its cache, each process compiles for itself.
    """
    function.__qualname__ = f"{function.__name__}_{_fingerprint()}"
    compiled = njit(nogil=True, error_model="numpy", boundscheck=False, **KERNEL)(function)
    _KERNELS[compiled] = True
    try:
        compiled.enable_caching()
    except RuntimeError:  # "no locator available": neither the package nor the home can be written
        _KERNELS[compiled] = False
        _warn_uncached()
    return compiled


@lru_cache(maxsize=64)
def address_of(compiled: Any, dtype: types.Type) -> int:
    """Return the address of a kernel of one pointer to a dtype, for callers in C."""
    given = (types.CPointer(dtype),)
    compiled.compile(given)
    made = compiled.overloads[given]
    return made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)


def kept() -> bool:
    """Return True if compiled kernels stay on disk for later processes."""
    return all(_KERNELS.values())


@lru_cache(maxsize=1)
def _warn_uncached() -> None:
    warnings.warn(
        "rowmax: no folder can be written to keep the compiled CPU kernels in, so every process "
        "compiles them anew; set NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


class _Notice(event.Listener):
    """Log a line before a kernel is compiled. Loading from the cache raises no such event."""

    def on_start(self, event: event.Event) -> None:
        compiled = (event.data or {}).get("dispatcher")
        if compiled is None or compiled not in _KERNELS:
            return
        where = "kept for later processes" if _KERNELS[compiled] else "not kept for later processes"
        logger.warning(
            "rowmax: compiling %s for this processor and dtype "
            "(up to about 30 seconds of processor time; %s)",
            *(compiled.__name__, where),
        )

    def on_end(self, event: event.Event) -> None:
        """Log nothing."""


event.register("numba:compile", _Notice())


#: the last counter: tiles that hold inf or NaN where operands are bfloat16
COUNTERS, INFINITE = 8, 7


def launch(worker: Callable, *arguments: object, tasks: int, flops: float) -> bool:
    """Run ``worker(*arguments, counters)`` on ``min(tasks, 1 + flops / 2e6)`` threads or fewer.

    Return False if its results are wrong because operands of bfloat16 are not finite.
    """
    counters = np.zeros(COUNTERS, np.int64)
    if tasks == 0:
        return True
    wanted = min(torch.get_num_threads(), tasks, 1 + int(flops / 2e6))
    threads.run(lambda: worker(*arguments, counters), wanted)
    return not counters[INFINITE]
