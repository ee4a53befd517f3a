"""Processes of one group, a device each, that end at a fixed time whatever they do.

The parent sends functions to ranks and waits for results. A rank that does not answer in time is
killed with all others: a collective whose peer is missing waits without end. Each rank also ends
itself at the fixed time, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: set in ranks before they import torch: multicast stays unused, and all sockets are of this host
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
#: set where the caller has not chosen: a host without a network has only this interface
USUAL = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
METHOD = "spawn"  # how processes begin; on a CPU "forkserver" does as well
START_LIMIT = 90.0  # seconds until a rank has imported torch and joined the group
GRACE = 5.0  # seconds for ranks to end by themselves


#: guards the environment, which a new process inherits
_LOCK = threading.Lock()


class RanksError(RuntimeError):
    """A rank raised, died or did not answer; the others may wait for it."""


class Rank(NamedTuple):
    """A process of the group: its number, their number, its device, and what it keeps."""

    rank: int
    size: int
    device: torch.device
    kept: dict[str, Any]


class Failure(NamedTuple):
    """An error of a function on one rank."""

    text: str


class Ranks:
    """Processes of one group: NCCL on GPUs, gloo on a CPU. Use as a context."""

    def __init__(self, size: int, device: str = "cuda", end: float | None = None) -> None:
        """Start ``size`` processes, each killed at the time ``end``, in 10 minutes if None."""
        self.size, self.device, self.alive = size, device, True
        self.end = time.time() + 600.0 if end is None else end
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context: Any = multiprocessing.get_context(METHOD)
        store = f"{self.folder.name}/store"
        with _environment(device):
            for rank in range(size):
                here, there = context.Pipe()
                given = (there, rank, size, device, store, self.end)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        try:
            self._results(range(size), START_LIMIT)
        except BaseException:
            self.close(grace=0.0)
            raise

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit: float,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return ``function(rank, *args)`` of each rank, or of ``only`` these.

        Raises:
            RanksError: a rank raised, died, or did not answer within ``limit`` seconds. All ranks
                are killed, except where every rank has answered.
        """
        found = self.attempt(function, *args, limit=limit, only=only)
        failed = [one.text for one in found if isinstance(one, Failure)]
        if failed:
            raise RanksError(failed[0])
        return found

    def attempt(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit: float,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the results as ``run`` does, with a Failure instead of an error."""
        ranks = range(self.size) if only is None else only
        sent = pickle.dumps((function, args))
        try:
            for rank in ranks:
                self.pipes[rank].send_bytes(sent)
        except OSError:
            self.close(grace=0.0)
            raise RanksError("a rank has ended") from None
        return self._results(ranks, limit)

    def _results(self, ranks: Sequence[int], limit: float) -> list[Any]:
        """Return what each rank sends, in order; kill all if one does not."""
        found: dict[int, Any] = {}
        begin = time.time()
        end = min(self.end, begin + limit)
        of = {self.pipes[rank]: rank for rank in ranks}
        while len(found) < len(of):
            left = [pipe for pipe, rank in of.items() if rank not in found]
            ready: Any = wait(left, max(0.0, end - time.time()))
            if not ready:
                late = ", ".join(str(of[pipe]) for pipe in left)
                failed = [x.text for x in found.values() if isinstance(x, Failure)]
                self.close(grace=0.0)
                why = failed[0] if failed else "no answer"
                raise RanksError(f"rank {late}: not done within {end - begin:.0f} s; {why}")
            for pipe in ready:
                try:
                    found[of[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.close(grace=0.0)
                    raise RanksError(f"rank {of[pipe]} has ended") from None
                if isinstance(found[of[pipe]], Failure):  # others may wait for this rank
                    end = min(end, time.time() + 2 * GRACE)
        return [found[rank] for rank in ranks]

    def close(self, grace: float = GRACE) -> None:
        """End the processes; kill those that run after ``grace`` seconds."""
        self.alive = False
        for pipe in self.pipes:
            pipe.close()
        end = time.time() + grace
        for process in self.processes:
            process.join(max(0.0, end - time.time()))
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(GRACE)
        self.folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """Set the environment that new processes inherit."""
    wanted = ENVIRONMENT | {key: x for key, x in USUAL.items() if key not in os.environ}
    if device == "cpu":
        wanted |= {"OMP_NUM_THREADS": "1"}
    with _LOCK:
        before = {key: os.environ.get(key) for key in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for key, x in before.items():
                if x is None:
                    del os.environ[key]
                else:
                    os.environ[key] = x


# --- in the process ----------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int, size: int, device: str, store: str, end: float) -> None:
    """Join the group, then run functions from the pipe until it closes."""
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_in_time, args=(end,), daemon=True).start()
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
        torch.set_num_threads(1)
    limit = timedelta(seconds=max(1.0, end - time.time()))
    options: Any = {"device_id": place} if device == "cuda" else {}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        timeout=limit,
        rank=rank,
        world_size=size,
        **options,
    )
    self = Rank(rank, size, place, {})
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        pipe.send_bytes(pickle.dumps(_answer(function, self, args)))
    # a communicator with work in flight waits at its end
    os._exit(0)


def _answer(function: Callable[..., Any], self: Rank, args: Any) -> Any:
    """Return the result of a function, or its error."""
    try:
        return function(self, *args)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".split("\n")[0]
        return Failure(f"rank {self.rank}: {first}\n{traceback.format_exc(limit=-4)[-1500:]}")


def _end_in_time(end: float) -> None:
    """End this process at a time, or when its parent is gone."""
    parent = multiprocessing.parent_process()
    while time.time() < end and parent is not None and parent.is_alive():
        time.sleep(0.5)
    os._exit(3)
