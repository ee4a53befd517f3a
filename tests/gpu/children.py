"""Jobs in processes of their own, each killed when it takes too long: a wrong count at a barrier
hangs a kernel, and its process with it, but not the others."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any


def _serve(pipe: Connection, work: Callable[..., list[str]]) -> None:
    while True:
        job = pipe.recv()
        if job is None:
            return
        try:
            found = work(*job)
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
        pipe.send(found)


class _Child:
    def __init__(self, context: Any, work: Callable[..., list[str]]) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), daemon=True)
        self.process.start()
        other.close()
        self.job: Any = None
        self.since = 0.0

    def give(self, job: Any) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def run(
    work: Callable[..., list[str]], jobs: list[tuple], workers: int, limit: float, total: float
) -> Iterator[tuple[tuple, list[str]]]:
    """(job, what ``work(*job)`` found) as they come; what is not done after ``total`` is left.

    A job that takes more than ``limit`` seconds, or whose process dies, has that for a finding.
    """
    context = multiprocessing.get_context("spawn")
    todo = list(reversed(jobs))
    children: list[_Child] = []
    end = time.monotonic() + total
    try:
        while (todo or any(c.job is not None for c in children)) and time.monotonic() < end:
            while todo and len(children) < workers:
                children.append(_Child(context, work))
                children[-1].give(todo.pop())
            ready = wait([c.pipe for c in children], timeout=1.0)
            for child in list(children):
                if child.pipe in ready:
                    try:
                        found = child.pipe.recv()
                    except (EOFError, OSError):
                        found = [f"its process died ({child.process.exitcode})"]
                    yield child.job, found
                    child.job = None
                    if found and found[0].startswith("its process died"):
                        child.end()
                        children.remove(child)
                    elif todo:
                        child.give(todo.pop())
                    else:
                        child.end()
                        children.remove(child)
                elif time.monotonic() - child.since > limit:
                    yield child.job, [f"hangs: not done in {limit:.0f} s"]
                    child.end()
                    children.remove(child)
    finally:
        for child in children:
            child.end()
