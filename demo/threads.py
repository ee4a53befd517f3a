"""The choice of the number of threads on a machine that other programs keep busy.

The threads of an operation wait for each other at its end. If one of them waits for a core, all of
them do, and two threads can be fifty times slower than one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ROUNDS = 9
SECONDS = 2.0  # time limit of a measurement of a number of threads


@contextmanager
def best_threads() -> Iterator[None]:
    """Use torch's number of threads, or a single one if that is measured to be faster."""
    before = torch.get_num_threads()
    try:
        single = before > 1 and _seconds(1) < _seconds(before)
        torch.set_num_threads(1 if single else before)
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(threads: int) -> float:
    """Return the median time of a few operations like those of a small model."""
    torch.set_num_threads(threads)
    x = torch.ones(256, 256)
    rounds = []
    while len(rounds) < ROUNDS and sum(rounds) < SECONDS:
        start = time.monotonic()
        for _ in range(8):
            (x @ x).relu_().sum()
        rounds.append(time.monotonic() - start)
    return statistics.median(rounds)
