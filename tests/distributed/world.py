"""Worlds of processes on one CPU, each started once and used by many tests."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

WAIT = 120.0  # seconds for one function


class RankError(AssertionError):
    """An error of a rank, with its traceback."""


class World:
    """Processes of one gloo group. ``run`` calls a function on each of them."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        # children of a server that has imported torch once
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.programs"])
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            given = (there, rank, size, f"{self.folder.name}/store", timeout)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(rank, *args)`` on each rank."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))

    def result(self, rank: int, wait: float = WAIT) -> Any:
        """Return the result of a rank, or its error."""
        if not self.pipes[rank].poll(wait):
            raise TimeoutError(f"rank {rank} did not answer in {wait} s")
        good, value = pickle.loads(self.pipes[rank].recv_bytes())
        return value if good else RankError(f"rank {rank}: {value}")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of ``function(rank, *args)``, one for each rank."""
        self.start(function, *args)
        found = [self.result(rank) for rank in range(self.size)]
        for one in found:
            if isinstance(one, RankError):
                raise one
        return found

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{store}", timedelta(seconds=timeout)), rank=rank, world_size=size
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        torch.manual_seed(rank)  # ranks draw different numbers
        try:
            answer = (True, function(rank, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
