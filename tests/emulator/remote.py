"""Launch kernels on an emulator in another process, from one that has a Triton of its own."""

from __future__ import annotations

import atexit
import pickle
import random
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rowmax.gpu.compiled import Launch
from rowmax.gpu.hopper.tiles import Constants


class RemoteLaunch(Launch):
    """A launch in place of ``rowmax.gpu.hopper.host.GluonLaunch``; ``start`` comes first."""

    server: subprocess.Popen

    @classmethod
    def start(cls) -> None:
        """Start the process with the emulator."""
        command = [sys.executable, "-m", "tests.emulator.server"]
        pipe = subprocess.PIPE
        cls.server = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        atexit.register(cls.server.communicate)  # ends it, and waits for that

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        storages = Storages()
        arguments = [describe(x, storages) for x in self.arguments(t, bases)]
        arrays = [whole.numpy() for whole in storages.wholes]
        kernel, seed = _name_of(self.kernel.fn), random.randrange(1 << 30)
        job = (kernel, self.grid[0], arrays, arguments, seed)
        stdin, stdout = self.server.stdin, self.server.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump(job, stdin, pickle.HIGHEST_PROTOCOL)
        stdin.flush()
        answer = pickle.load(stdout)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        for whole, array in zip(storages.wholes, answer, strict=True):
            whole.copy_(torch.from_numpy(array))


class Storages:
    """The storages of a launch's tensors, each sent once, as a whole."""

    def __init__(self) -> None:
        self.wholes: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def place(self, t: Tensor) -> tuple[int, int]:
        """Return (number of the storage, offset in it) of a tensor."""
        key = t.untyped_storage().data_ptr()
        if key not in self._numbers:
            self._numbers[key] = len(self.wholes)
            self.wholes.append(torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()))
        n = self._numbers[key]
        assert self.wholes[n].dtype == t.dtype
        return n, int(t.storage_offset())


def describe(x: Any, storages: Storages) -> tuple[Any, ...]:
    """Return an argument as ``server.argument`` reads it."""
    if isinstance(x, tl.constexpr):
        x = x.value
    if x is None:
        return ("none",)
    if isinstance(x, TensorDescriptor):
        shape = [int(n) for n in x.shape]
        return ("descriptor", *storages.place(x.base), shape, list(x.strides), x.block_shape)
    if isinstance(x, Tensor):
        return ("pointer", *storages.place(x))
    if isinstance(x, Constants):
        return ("config", _name_of(type(x)), _name_of(type(x.config)), asdict(x.config))
    if isinstance(x, tuple):
        return ("record", _name_of(type(x)), [describe(y, storages) for y in x])
    assert isinstance(x, (int, float)), x
    return ("number", x)


def _name_of(x: Any) -> tuple[str, str]:
    return x.__module__, x.__name__
