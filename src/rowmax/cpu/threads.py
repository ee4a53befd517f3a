"""Run a function on several threads at once: on torch's own pool where it can be reached.

torch's pool is OpenMP's, and its idle threads spin for a while after each of torch's operations.
Work on other threads would compete with them; work on the same pool does not, and starts in
microseconds. Without OpenMP a pool of Python threads runs it: the kernels release the interpreter's
lock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(body: Callable[[], None], threads: int) -> None:
    """Call ``body`` once on each of up to ``threads`` threads, and wait for all of them.

    The body takes tasks from a shared counter until none is left, so fewer threads still complete
    all work.
    """
    if threads <= 1:
        body()
        return
    errors: list[BaseException] = []

    def guarded(_: object = None) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    compiled = _BODY(guarded)
    if not _run_by_openmp(ctypes.cast(compiled, ctypes.c_void_p), None, threads):
        others = [_pool(os.getpid()).submit(guarded) for _ in range(threads - 1)]
        guarded()
        for other in others:
            other.result()
    if errors:
        raise errors[0]


def run_compiled(address: int, data: Any, threads: int) -> None:
    """Call compiled code ``int64 f(void *data)`` on each of up to ``threads`` threads, and wait."""
    if threads <= 1 or not _run_by_openmp(address, data, threads):
        run(lambda: _compiled(address)(data), threads)


@lru_cache(maxsize=64)
def _compiled(address: int) -> Callable:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(address)


def _run_by_openmp(address: Any, data: Any, threads: int) -> bool:
    """Call the function at an address on threads of OpenMP; return False if it is not there."""
    parallel = None if _forked else _openmp()
    if parallel is None:
        return False
    parallel(address, data, threads, 0)
    return True


_forked = False


def _after_fork() -> None:
    """Disable OpenMP in a forked child: GNU's would wait for the threads of the parent."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=1)
def _openmp() -> Callable | None:
    """Return ``GOMP_parallel`` of the OpenMP library that torch has loaded (LLVM's has it, too)."""
    folder = Path(torch.__file__).parent / "lib"
    bundled = [p for pattern in ("libgomp*", "libomp*", "libiomp5*") for p in folder.glob(pattern)]
    for name in [None, *map(str, sorted(bundled))]:
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return function
    return None


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return one pool a process: a forked child gets its own."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="rowmax")
