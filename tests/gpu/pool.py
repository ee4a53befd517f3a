"""Jobs in processes of their own, spread over the GPUs of this host.

A wrong count at a barrier hangs a kernel, and with it its process. A process that dies, or sends
no message for a while, is killed and replaced; its job is a fault, and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

import torch

COMPILE_LIMIT = 300.0  # seconds that kernels may compile between two messages
START_LIMIT = 300.0  # seconds until a process has imported everything
MOST_FAILED_STARTS = 3  # failures in a row for each process: then nothing can run
PROCESSES = 14  # on each GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: guards the environment, which a new process inherits
_ENVIRONMENT = threading.Lock()
_POOLS = itertools.count()


class Job(NamedTuple):
    """Arguments of the pool's work."""

    args: tuple[Any, ...]
    alone: bool = False  # no other job runs on its GPU
    fresh: bool = False  # its process runs no other job, before or after
    limit: float = 0.0  # seconds without a message, if not those of the pool


class Event(NamedTuple):
    """A message that the work of a job yielded, its end, or the reason of its fault."""

    job: Job
    kind: Literal["message", "end", "fault"]
    value: Any
    seconds: float  # since the job began


def visible_gpus(device: str) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for the processes on each GPU; [None] for a CPU."""
    if device == "cpu":
        return [None]
    names = os.environ.get(VISIBLE)
    if names is None:
        names = ",".join(map(str, range(torch.cuda.device_count())))
    found: list[str | None] = [name for name in names.split(",") if name]
    if not found:
        raise RuntimeError("this host has no GPU; want --device cpu")
    return found


def default_processes(device: str) -> int:
    return min(PROCESSES * len(visible_gpus(device)), os.cpu_count() or 1)


class Pool:
    """Processes that run ``work(*job.args)``, an iterator whose values are sent as messages.

    ``limit`` is the seconds without a message after which a job hangs, without the time that
    kernels compile. ``memory`` is the fraction of its GPU's memory that a process may allocate; 0
    for no limit.
    """

    def __init__(
        self,
        work: Callable[..., Iterator[Any]],
        processes: int,
        limit: float,
        device: str = "cuda",
        gpus: Sequence[str | None] | None = None,
        memory: float = 0.0,
    ) -> None:
        self.work, self.processes, self.limit, self.device = work, processes, limit, device
        self.gpus = visible_gpus(device) if gpus is None else gpus
        self.memory = memory
        self._workers: list[_Worker] = []
        self._first = next(_POOLS)  # pools of one process each are spread as well
        self._kernels = 0  # compiled by processes that have ended
        self._failed_starts = 0

    @property
    def kernels(self) -> int:
        """Return how many kernels all processes have compiled."""
        return self._kernels + sum(int(w.clock[3]) for w in self._workers)

    def run(
        self, jobs: Iterable[Job], end: float = math.inf, patience: float = 0.0
    ) -> Iterator[Event | None]:
        """Yield events as they come, and None at least once a second.

        No job begins after the time ``end``. Jobs that still run are ended ``patience`` seconds
        later, without an event.
        """
        size = len(jobs) if isinstance(jobs, Sequence) else self.processes
        queue = _Queue(jobs)
        try:
            for n in range(min(self.processes, size) if time.time() < end else 0):
                self._workers.append(self._started(self.gpus[(self._first + n) % len(self.gpus)]))
            while time.time() < end + patience:
                if time.time() >= end:
                    queue.close()
                for worker in [w for w in self._workers if w.ready]:
                    self._give(worker, queue)
                if not any(w.job is not None for w in self._workers) and not queue:
                    return
                wait([w.pipe for w in self._workers], timeout=0.2)
                for worker in list(self._workers):
                    yield from self._read(worker, queue)
                yield None
        finally:
            for worker in self._workers:
                self._end(worker)
            self._workers.clear()

    def _started(self, gpu: str | None) -> _Worker:
        return _Worker(self.work, self.device, gpu, self.memory)

    def _replace(self, worker: _Worker, queue: _Queue) -> None:
        """End a process and, if there are more jobs, start another on its GPU."""
        self._end(worker)
        n = self._workers.index(worker)
        self._workers[n : n + 1] = [self._started(worker.gpu)] if queue else []

    def _end(self, worker: _Worker) -> None:
        self._kernels += int(worker.clock[3])
        worker.clock[3] = 0
        worker.end()

    def _give(self, worker: _Worker, queue: _Queue) -> None:
        """Give an idle process the first job that it may run."""
        busy = [w.job for w in self._workers if w.gpu == worker.gpu and w.job is not None]
        if any(job.alone for job in busy):
            return
        job = queue.take(lambda job: not (job.alone and busy) and not (job.fresh and worker.jobs))
        if job is not None:
            worker.give(job)
        elif worker.jobs and sum(not w.jobs for w in self._workers) < queue.fresh:
            self._replace(worker, queue)

    def _read(self, worker: _Worker, queue: _Queue) -> Iterator[Event]:
        """Yield the events of a process; replace it if it died or hangs."""
        try:
            while worker.pipe.poll():
                kind, value = worker.pipe.recv()
                if kind == "ready":
                    worker.ready, self._failed_starts = True, 0
                    continue
                event = worker.event(kind, value)
                if kind != "message":
                    worker.job, worker.since = None, time.time()
                yield event
        except (EOFError, OSError):
            worker.process.join(10)
            why = f"its process died ({worker.process.exitcode})"
        else:
            why = worker.hangs(self.limit)
        if why is None:
            return
        if worker.job is not None:
            event = worker.event("fault", why)
            worker.job = None
            yield event
        elif not worker.jobs:
            self._failed_starts += 1
            if self._failed_starts > MOST_FAILED_STARTS * self.processes:
                raise RuntimeError(f"no process can start: {why}")
        self._replace(worker, queue)


class _Queue:
    """Jobs in order. Jobs that no idle process may run yet are kept."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._kept: list[Job] = []

    def __bool__(self) -> bool:
        if not self._kept:
            self._kept += itertools.islice(self._jobs, 1)
        return bool(self._kept)

    @property
    def fresh(self) -> int:
        return sum(job.fresh for job in self._kept)

    def take(self, fits: Callable[[Job], bool]) -> Job | None:
        """Remove and return the first job that fits, or None."""
        for n, job in enumerate(self._kept):
            if fits(job):
                return self._kept.pop(n)
        for job in self._jobs:
            if fits(job):
                return job
            self._kept.append(job)
        return None

    def close(self) -> None:
        self._jobs, self._kept = iter(()), []


class _Worker:
    """A process and its job."""

    def __init__(self, work: Any, device: str, gpu: str | None, memory: float) -> None:
        context: Any = multiprocessing.get_context("spawn")
        if device == "cpu" and gpu is None:  # forks of a process that has imported the work
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([getattr(work, "func", work).__module__])
        self.gpu = gpu
        self.pipe, other = context.Pipe()
        #: time of the last message, seconds of compiling since then, time at which the compiler
        #: began (0 while it does not run), kernels compiled
        self.clock = context.Array("d", 4, lock=False)
        arguments = (other, self.clock, work, device, memory)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with _ENVIRONMENT:
            before = os.environ.get(VISIBLE)
            if gpu is not None:
                os.environ[VISIBLE] = gpu
            try:
                self.process.start()
            finally:
                os.environ.pop(VISIBLE, None)
                if before is not None:
                    os.environ[VISIBLE] = before
        other.close()
        self.ready = False
        self.job: Job | None = None
        self.jobs = 0  # so far
        self.since = time.time()  # the job, or the wait for the process, began

    def give(self, job: Job) -> None:
        self.job, self.ready, self.since = job, False, time.time()
        self.jobs += 1
        self.clock[0], self.clock[1], self.clock[2] = self.since, 0.0, 0.0
        with contextlib.suppress(OSError):  # the process has died: the next read reports it
            self.pipe.send(job)

    def event(self, kind: Any, value: Any) -> Event:
        assert self.job is not None
        return Event(self.job, kind, value, time.time() - self.since)

    def hangs(self, limit: float) -> str | None:
        """Return why the process must be killed, or None."""
        now, (began, compiled, since, _) = time.time(), list(self.clock)
        if self.job is None:
            late = not self.ready and now - self.since > START_LIMIT
            return f"not ready in {START_LIMIT:.0f} s" if late else None
        compiling = now - since if since else 0.0
        if compiled + compiling > COMPILE_LIMIT:
            return f"compiling takes more than {COMPILE_LIMIT:.0f} s"
        limit = self.job.limit or limit
        if now - began - compiled - compiling > limit:
            return f"hangs: no message in {limit:.0f} s"
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


# --- in the process ----------------------------------------------------------------------------


def _serve(pipe: Connection, clock: Any, work: Any, device: str, memory: float) -> None:
    """Run jobs from the pipe until an error breaks the device's context."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if device != "cpu":
        _time_compiling(clock)
        if memory:
            torch.cuda.set_per_process_memory_fraction(memory)
    while True:
        pipe.send(("ready", None))
        job = pipe.recv()
        try:
            for message in work(*job.args):
                clock[0], clock[1], clock[2] = time.time(), 0.0, 0.0
                pipe.send(("message", message))
        except Exception:
            pipe.send(("fault", traceback.format_exc(limit=-4)[-1500:]))
        else:
            pipe.send(("end", None))
        if job.fresh or not context_lives(device):
            os._exit(0)
        if device != "cpu":
            torch.cuda.empty_cache()


def context_lives(device: str) -> bool:
    """Return False once an error has broken the device's context: every later call fails."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except Exception:
        return False
    return True


def _time_compiling(clock: Any) -> None:
    """Write the times and the number of compiled kernels to the clock."""
    try:
        from rowmax.gpu import compiled
    except ImportError:
        return
    real = compiled.Launch.compile

    def timed(*args: Any, **keywords: Any) -> Any:
        clock[2] = time.time()
        try:
            return real(*args, **keywords)
        finally:
            clock[1] += time.time() - clock[2]
            clock[2] = 0.0
            clock[3] += 1

    compiled.Launch.compile = timed
