"""Threads that compile kernels before a call needs them.

A compile reads the source, which holds the interpreter's lock, and goes on in C++ and in ptxas,
without it. ``ROWMAX_COMPILE_AHEAD=0`` leaves all compiling to the calls that need the kernels.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

VARIABLE = "ROWMAX_COMPILE_AHEAD"
#: kernels that compile at a time
MOST = 3

Job = Callable[[], None]


def enabled() -> bool:
    """Return False if the environment leaves compiling to the calls that need the kernels."""
    given = os.environ.get(VARIABLE, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: got {given!r}; want 1 (the default) or 0")
    return given == "1"


class Threads:
    """At most ``MOST`` threads, which end when no job is left.

    An error of a job is dropped: the call that needs the kernel compiles it again, and raises.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all jobs and threads: those of a process before a fork."""
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._running: set[threading.Thread] = set()
        self._stopped = False

    def submit(self, jobs: list[Job]) -> None:
        """Add jobs, the first to start first."""
        with self._lock:
            if self._stopped:
                return
            self._jobs.extend(jobs)
            for _ in range(min(len(self._jobs), MOST - len(self._running))):
                # a thread that is no daemon would run all jobs before the interpreter exits
                thread = threading.Thread(target=self._run, name="rowmax-compile", daemon=True)
                thread.start()
                self._running.add(thread)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            with suppress(Exception):
                job()
            del job

    def wait(self) -> None:
        """Return when no job is left."""
        while True:
            with self._lock:
                some = next(iter(self._running), None)
            if some is None:
                return
            some.join()
            with self._lock:
                self._running.discard(some)

    def stop(self) -> None:
        """Drop the jobs that wait, and return when those that run have ended.

        A thread that returns from C++ to an interpreter that has ended would abort the process.
        """
        with self._lock:
            self._stopped = True
            self._jobs.clear()
        self.wait()


THREADS = Threads()
atexit.register(THREADS.stop)
os.register_at_fork(after_in_child=THREADS.reset)
