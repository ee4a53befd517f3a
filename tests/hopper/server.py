"""Runs kernels on the machine of ``machine.py`` for ``whole.py``, which has a Triton of its own.

Reads from standard input and writes to standard output, one pickle a launch: the kernel's name,
the number of blocks, arrays by number, and arguments that refer to them.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import numpy as np

from tests.hopper import language, machine

language.install()

from rowmax.gpu.hopper import backward_tiles  # noqa: E402
from rowmax.gpu.hopper.backward_args import Numbers, Pointers  # noqa: E402
from rowmax.gpu.hopper.backward_dbias import backward_dbias  # noqa: E402
from rowmax.gpu.hopper.backward_dkdv import backward_dkdv  # noqa: E402
from rowmax.gpu.hopper.backward_dq import backward_dq  # noqa: E402
from rowmax.gpu.hopper.backward_fused import backward  # noqa: E402
from rowmax.gpu.hopper.backward_lib import Constants  # noqa: E402

BUNDLES = {"Pointers": Pointers, "Numbers": Numbers}
KERNELS = {
    "backward": backward,
    "backward_dq": backward_dq,
    "backward_dkdv": backward_dkdv,
    "backward_dbias": backward_dbias,
}


def made(argument: Any, arrays: list[np.ndarray]) -> Any:
    kind, *of = argument
    if kind == "pointer":
        return machine.Pointer(arrays[of[0]], of[1])
    if kind == "descriptor":
        array, start, shape, strides, box = of
        size = arrays[array].dtype.itemsize
        steps = [size * n for n in strides]
        view = np.lib.stride_tricks.as_strided(arrays[array][start:], shape, steps)
        return machine.Descriptor(view, box)
    if kind == "none":
        return None
    if kind == "bundle":
        return BUNDLES[of[0]](*(made(x, arrays) for x in of[1]))
    if kind == "config":
        return Constants(getattr(backward_tiles, of[0])(**of[1]))
    return machine.scalar(of[0])


def main() -> None:
    while True:
        try:
            name, blocks, arrays, arguments, seed = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        random.seed(seed)
        try:
            machine.run(KERNELS[name], blocks, *(made(a, arrays) for a in arguments))
            answer: Any = arrays
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
