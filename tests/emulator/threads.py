"""Blocks and partitions as threads: their order, their waits, deadlocks and failures.

Every partition of every block is a thread. A wait that can never end raises ``Stuck`` at once:
every thread waits, no copy is in flight, and no condition holds. A loop that polls memory is not
seen as a wait; it raises after ``LIMIT`` seconds without progress.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

LIMIT = 60.0  # seconds without progress of any thread


class Stuck(RuntimeError):  # noqa: N818
    """A wait that does not end, or a thread that stops because another one failed."""


class Block(NamedTuple):
    """The place of a block in its grid."""

    pid: int
    programs: int


class Here(threading.local):
    """The state of the current thread."""

    def __init__(self) -> None:
        self.block = Block(0, 1)
        self.products: list[Any] = []  # issued, and not waited for
        self.stores: list[Any] = []  # issued; their sources may still be read
        self.in_flight: list[Any] = []  # read, and not yet in memory


class Wait(NamedTuple):
    """A thread that waits: for what, the condition that ends it, and how to wake the thread."""

    thread: str
    text: str
    ready: Callable[[], bool]
    bell: threading.Condition


here = Here()
#: guards barriers, memory and what follows
lock = threading.RLock()
#: checks at the end of every thread
at_end: list[Callable[[], None]] = []
_failures: list[BaseException] = []
_waits: dict[int, Wait] = {}
_active = 0  # threads that run or wait, and copies in flight
_last_progress = 0.0


def progress() -> None:
    """Record that something changed that a thread may wait for. The caller holds the lock."""
    global _last_progress
    _last_progress = time.monotonic()
    for wait in _waits.values():  # each thread that wakes in vain would take the lock twice
        if wait.ready():
            wait.bell.notify()


def _wake_all() -> None:
    """Let all that wait look for a failure or a deadlock. The caller holds the lock."""
    for wait in _waits.values():
        wait.bell.notify()


def check() -> None:
    """Raise if another thread failed, or nothing has happened for ``LIMIT`` seconds."""
    if _failures:
        raise Stuck("another thread failed")
    if time.monotonic() - _last_progress > LIMIT:
        raise Stuck(f"{threading.current_thread().name} polls without progress")


def wait_until(ready: Callable[[], bool], text: str) -> None:
    """Wait until ``ready``, which is called with the lock held."""
    thread = threading.current_thread()
    with lock:
        if ready():
            return
        bell = threading.Condition(lock)
        _waits[id(thread)] = Wait(thread.name, text, ready, bell)
        try:
            while not ready():
                if _failures:
                    raise Stuck("another thread failed")
                if _deadlocked() or time.monotonic() - _last_progress > LIMIT:
                    waits = "; ".join(f"{w.thread} waits for {w.text}" for w in _waits.values())
                    raise Stuck(waits)
                bell.wait(0.5)
        finally:
            del _waits[id(thread)]


def _deadlocked() -> bool:
    return len(_waits) >= _active and not any(wait.ready() for wait in _waits.values())


def _count(change: int) -> None:
    global _active
    with lock:
        _active += change
        if _deadlocked():
            _wake_all()


@contextmanager
def _counted(change: int) -> Iterator[None]:
    _count(change)
    try:
        yield
    finally:
        _count(-change)


def pause(seconds: float) -> None:
    """Sleep for up to so many seconds."""
    time.sleep(random.random() * seconds)


def pause_sometimes() -> None:
    """Let other threads come first, now and then."""
    if random.random() < 0.02:
        pause(1e-3)


def run_later(land: Callable[[], None]) -> None:
    """Call ``land`` up to a millisecond later, from another thread, with the lock held."""

    def run() -> None:
        pause(1e-3)
        with lock:
            land()
            progress()

    _start(run, (), here.block)


def _run_thread(function: Callable[..., Any], args: tuple[Any, ...], block: Block) -> None:
    here.block = block
    try:
        with np.errstate(all="ignore"):
            function(*args)
            for finish in at_end:
                finish()
    except BaseException as error:
        with lock:
            _failures.append(error)
            _wake_all()
    finally:
        _count(-1)


def _start(function: Callable[..., Any], args: tuple[Any, ...], block: Block) -> threading.Thread:
    _count(1)
    name = f"{getattr(function, '__name__', 'kernel')} of block {block.pid}"
    thread = threading.Thread(target=_run_thread, args=(function, args, block), name=name)
    thread.daemon = True
    thread.start()
    return thread


class Named:
    """A named barrier of a block: the threads that have arrived, and its phases so far."""

    def __init__(self) -> None:
        self.arrived = self.phase = 0

    def arrive(self, threads: int, count: int) -> int:
        """Add arrivals, and return the phase that they belong to. The caller holds the lock."""
        phase = self.phase
        self.arrived += threads
        if self.arrived > count:
            raise RuntimeError(f"a named barrier of {count} threads has {self.arrived} arrivals")
        if self.arrived == count:
            self.arrived, self.phase = 0, phase + 1
            progress()
        return phase


_named: dict[tuple[int, int], Named] = {}


def meet(number: int, threads: int, count: int, *, waits: bool) -> None:
    """Arrive at a named barrier of this block; ``waits``: until ``count`` threads have."""
    pause_sometimes()
    with lock:
        check()
        barrier = _named.setdefault((here.block.pid, number), Named())
        phase = barrier.arrive(threads, count)
    if waits:
        wait_until(lambda: barrier.phase > phase, f"named barrier {number}")


def warp_specialize(partitions: list[Any], warps: Any, registers: Any) -> None:
    """Run the partitions of a block, and return when all are done."""
    threads = [_start(function, args, here.block) for function, args in partitions]
    with _counted(-1):  # this thread only joins the others
        for thread in threads:
            thread.join()


def run_blocks(kernel: Callable[..., Any], programs: int, *args: Any) -> None:
    """Run a kernel over a grid, all blocks at once, and raise what one of them raised."""
    _failures.clear()
    _named.clear()
    with lock:
        progress()
    with _counted(1):  # no deadlock before all have started
        threads = [_start(kernel, args, Block(pid, programs)) for pid in range(programs)]
    for thread in threads:
        thread.join()
    if not _failures and any(barrier.arrived for barrier in _named.values()):
        raise RuntimeError("a named barrier is left with arrivals that no thread has waited for")
    first_cause = [e for e in _failures if not isinstance(e, Stuck)]
    if _failures:
        raise (first_cause or _failures)[0]
