"""Run kernels on the emulator for another process, which has a Triton of its own.

``remote.RemoteLaunch`` starts this module. It reads jobs from standard input and writes answers to
standard output, each a pickle: the arrays after the launch, or a sentence about what failed.
"""

from __future__ import annotations

import importlib
import pickle
import random
import sys
from typing import Any, NamedTuple

import numpy as np

from tests import emulator
from tests.emulator import memory, threads, values
from tests.garbage import collect_less


class Job(NamedTuple):
    """A launch. Arguments refer to arrays by number, and to classes and kernels by name."""

    kernel: tuple[str, str]  # module and name
    blocks: int
    arrays: list[np.ndarray]
    arguments: list[tuple[Any, ...]]
    seed: int


def argument(description: tuple[Any, ...], arrays: list[np.ndarray]) -> Any:
    """Return a kernel's argument as ``remote.RemoteLaunch`` describes it."""
    kind, *of = description
    if kind == "pointer":
        return values.Pointer(arrays[of[0]], of[1])
    if kind == "descriptor":
        array, start, shape, strides, box = of
        size = arrays[array].dtype.itemsize
        steps = [size * n for n in strides]
        view = np.lib.stride_tricks.as_strided(arrays[array][start:], shape, steps)
        return memory.Descriptor(view, box)
    if kind == "none":
        return None
    if kind == "record":
        return _named(of[0])(*(argument(x, arrays) for x in of[1]))
    if kind == "config":
        return _named(of[0])(_named(of[1])(**of[2]))
    return values.scalar(of[0])


def _named(name: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(name[0]), name[1])


def main() -> None:
    emulator.install()
    collect_less()
    while True:
        try:
            job = Job(*pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        random.seed(job.seed)
        try:
            arguments = (argument(x, job.arrays) for x in job.arguments)
            threads.run_blocks(_named(job.kernel), job.blocks, *arguments)
            answer: Any = job.arrays
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
