"""Blocks and partitions as threads: their order, their waits, deadlocks and failures.

Every partition of every block is a thread, a greenlet here: one of them runs at a time, until it
waits, pauses or ends. Then the thread or the copy of the earliest time comes next. Time is a number
that pauses and copies move by random amounts, so nothing sleeps, and a seed of ``random`` gives the
same order again. A wait that can never end raises ``Stuck``: nothing is left that may come next. A
loop that polls memory raises after ``LIMIT`` seconds of that time without progress.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

LIMIT = 1.0  # seconds without progress of any thread


class Stuck(RuntimeError):  # noqa: N818
    """A wait that does not end, or a thread that stops because another one failed."""


class Block(NamedTuple):
    """The place of a block in its grid."""

    pid: int
    programs: int


class Thread:
    """A partition of a block, or the caller of a launch. The caller lets the others run."""

    def __init__(self, name: str, block: Block, run: Callable[[], None] | None = None) -> None:
        self.name, self.block, self.ended = name, block, False
        self.products: list[Any] = []  # issued, and not waited for
        self.stores: list[Any] = []  # issued; their sources may still be read
        self.in_flight: list[Any] = []  # read, and not yet in memory
        self.greenlet = greenlet(run) if run else getcurrent()


class Here:
    """The current thread."""

    def __init__(self) -> None:
        self.thread = Thread("the caller", Block(0, 1))


class Wait(NamedTuple):
    """The wait of a thread: its name in errors, and the condition that ends it."""

    text: str
    ready: Callable[[], bool]


here = Here()
#: checks at the end of every thread
at_end: list[Callable[[], None]] = []
_failures: list[BaseException] = []
_waits: dict[Thread, Wait] = {}
#: threads that may run and copies that land, by time
_events: list[tuple[float, int, Thread | Callable[[], None]]] = []
_numbers = itertools.count()
_now = _last_progress = 0.0
_caller = here.thread


def _at(time: float, event: Thread | Callable[[], None]) -> None:
    heapq.heappush(_events, (time, next(_numbers), event))


def progress() -> None:
    """Record that something changed that a thread may wait for."""
    global _last_progress
    _last_progress = _now
    for thread in [thread for thread, wait in _waits.items() if wait.ready()]:
        _wake(thread)


def _wake(thread: Thread) -> None:
    del _waits[thread]
    _at(_now + random.random() * 1e-4, thread)


def _fail(error: BaseException) -> None:
    """Record a failure, which ends every wait."""
    _failures.append(error)
    for thread in list(_waits):
        _wake(thread)


def check() -> None:
    """Raise if another thread failed, or nothing has happened for ``LIMIT`` seconds."""
    if _failures:
        raise Stuck("another thread failed")
    if _now - _last_progress > LIMIT:
        raise Stuck(f"{here.thread.name} polls without progress")


def _next() -> Thread | None:
    """Return the thread that comes next, after the copies that land before it."""
    global _now
    while True:
        if not _events:
            if not _waits:
                return None
            _fail(Stuck("; ".join(f"{t.name} waits for {w.text}" for t, w in _waits.items())))
        _now, _, event = heapq.heappop(_events)
        if isinstance(event, Thread):
            return event
        try:
            event()
        except Exception as error:
            _fail(error)


def _run_all() -> None:
    """Run all threads to their ends, as the caller."""
    while (thread := _next()) is not None:
        here.thread = thread
        thread.greenlet.switch()
    here.thread = _caller


def wait_until(ready: Callable[[], bool], text: str) -> None:
    """Wait until ``ready``."""
    while not ready():
        if _failures:
            raise Stuck("another thread failed")
        if here.thread is _caller:
            raise Stuck(f"a program waits for {text}")
        _waits[here.thread] = Wait(text, ready)
        _caller.greenlet.switch()


def pause(seconds: float) -> None:
    """Let others come first, for up to so many seconds."""
    if here.thread is not _caller:
        _at(_now + random.random() * seconds, here.thread)
        _caller.greenlet.switch()


def pause_sometimes() -> None:
    """Let other threads come first, now and then."""
    if random.random() < 0.1:
        pause(1e-3)


def run_later(land: Callable[[], None]) -> None:
    """Call ``land`` up to a millisecond later."""

    def run() -> None:
        land()
        progress()

    _at(_now + random.random() * 1e-3, run)


def _start(function: Callable[..., Any], args: tuple[Any, ...], block: Block) -> Thread:
    def run() -> None:
        try:
            with np.errstate(all="ignore"):
                function(*args)
                for finish in at_end:
                    finish()
        except BaseException as error:
            _fail(error)
        thread.ended = True
        progress()

    thread = Thread(f"{getattr(function, '__name__', 'kernel')} of block {block.pid}", block, run)
    _at(_now + random.random() * 1e-4, thread)
    return thread


class Named:
    """A named barrier of a block: the threads that have arrived, and its phases so far."""

    def __init__(self) -> None:
        self.arrived = self.phase = 0

    def arrive(self, threads: int, count: int) -> int:
        """Add arrivals, and return the phase that they belong to."""
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
    check()
    barrier = _named.setdefault((here.thread.block.pid, number), Named())
    phase = barrier.arrive(threads, count)
    if waits:
        wait_until(lambda: barrier.phase > phase, f"named barrier {number}")


def warp_specialize(partitions: list[Any], warps: Any, registers: Any) -> None:
    """Run the partitions of a block, and return when all are done."""
    threads = [_start(function, args, here.thread.block) for function, args in partitions]
    for thread in threads:
        wait_until(lambda thread=thread: thread.ended, "its partitions")


def run_blocks(kernel: Callable[..., Any], programs: int, *args: Any) -> None:
    """Run a kernel over a grid, all blocks at once, and raise what one of them raised."""
    _failures.clear()
    _named.clear()
    progress()
    for pid in range(programs):
        _start(kernel, args, Block(pid, programs))
    _run_all()
    if not _failures and any(barrier.arrived for barrier in _named.values()):
        raise RuntimeError("a named barrier is left with arrivals that no thread has waited for")
    first_cause = [e for e in _failures if not isinstance(e, Stuck)]
    if _failures:
        raise (first_cause or _failures)[0]
