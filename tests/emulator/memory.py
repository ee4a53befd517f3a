"""Shared memory, barriers (mbarrier) and copies by the tensor memory accelerator (TMA).

Each of these is as unkind as the hardware may be. Shared memory begins as NaN. The destination of
a load is NaN from its issue until the copy lands, up to a millisecond later. A store reads its
source as late as the wait for it, and may reach global memory later than that.
"""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np

from . import threads
from .threads import here
from .values import DTYPES, DType, Tensor, raw


class Shared:
    """A buffer of shared memory, or a part of one."""

    def __init__(self, a: np.ndarray, dtype: DType) -> None:
        self.a, self.dtype = a, dtype

    shape = property(lambda self: list(self.a.shape))

    def index(self, i: Any) -> Shared:
        i = int(raw(i))
        assert 0 <= i < self.a.shape[0], f"buffer {i} of {self.a.shape[0]}"
        return Shared(self.a[i], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        at = [slice(None)] * self.a.ndim
        at[dim] = slice(start, start + length)
        return Shared(self.a[tuple(at)], self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.a.transpose(order), self.dtype)

    def load(self, layout: Any) -> Tensor:
        threads.pause_sometimes()
        return Tensor(self.a.copy())

    def store(self, value: Tensor) -> None:
        threads.pause_sometimes()
        assert value.a.dtype == self.a.dtype, (value.a.dtype, self.a.dtype)
        self.a[...] = value.a


def allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
    """Return barriers, or a buffer of NaN (integers: -1)."""
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Barriers(shape[0])
    empty = np.nan if dtype.kind.kind == "f" else -1
    return Shared(np.full(shape, empty, dtype.kind), dtype)


def reinterpret(buffer: Shared, dtype: DType, shape: list[int], layout: Any) -> Any:
    """Return the same memory with another dtype or shape."""
    if dtype.kind != buffer.a.dtype:
        a = buffer.a.view(dtype.kind).reshape(shape)
        assert np.shares_memory(a, buffer.a)
        return Shared(a, dtype)
    if shape[-1] < buffer.a.shape[-1]:
        return Strips(buffer, shape)
    a = buffer.a.reshape(shape)
    assert np.shares_memory(a, buffer.a)
    return Shared(a, dtype)


class Strips:
    """A buffer in the order of memory: strips of 64 columns, one after another.

    A member of the view is rows of a strip, or several strips (``Folded``).
    """

    def __init__(self, buffer: Shared, shape: list[int]) -> None:
        width = shape[-1]
        parts = buffer.a.shape[-1] // width
        rows = buffer.a.reshape(-1, parts, width).transpose(1, 0, 2)
        each, of_strip = (max(1, n) for n in (parts // shape[0], shape[0] // parts))
        self.a = rows.reshape(parts // each, each, of_strip, -1, width)
        assert np.shares_memory(self.a, buffer.a)
        self.shape, self.dtype = shape, buffer.dtype

    def index(self, i: Any) -> Shared:
        n, part = divmod(int(raw(i)), self.a.shape[2])
        return Folded(self.a[n, :, part], self.dtype, self.shape[1:])


class Folded(Shared):
    """A part of a buffer that is read and written in another shape."""

    def __init__(self, a: np.ndarray, dtype: DType, shape: list[int]) -> None:
        super().__init__(a, dtype)
        self._shape = list(shape)

    shape = property(lambda self: self._shape)

    def load(self, layout: Any) -> Tensor:
        return super().load(layout).reshape(self.shape)

    def store(self, value: Tensor) -> None:
        super().store(value.reshape(self.a.shape))


class Barrier:
    """An mbarrier: arrivals and bytes of the current phase that are missing."""

    def __init__(self) -> None:
        self.count = self.pending = self.phase = self.bytes = 0

    def settle(self) -> None:
        """Begin the next phase if nothing is missing."""
        assert self.count > 0, "a barrier is used before it is initialised"
        assert self.pending >= 0, "too many arrivals"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            threads.progress()


class Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, n: int) -> None:
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        i = int(raw(i))
        assert 0 <= i < len(self.barriers), f"barrier {i} of {len(self.barriers)}"
        return self.barriers[i]


class mbarrier:  # noqa: N801
    """The operations on barriers, in place of Gluon's module."""

    class MBarrierLayout:
        pass

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count
        bar.phase = bar.bytes = 0

    @staticmethod
    def expect(bar: Barrier, size: int, pred: Any = True) -> None:
        if bool(pred):
            bar.bytes += size
            bar.pending -= 1
            bar.settle()

    @staticmethod
    def arrive(bar: Barrier, *, count: int = 1, pred: Any = True) -> None:
        threads.pause_sometimes()
        if bool(pred):
            bar.pending -= count
            bar.settle()

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
        if bool(pred):
            parity = int(raw(phase))
            assert parity in (0, 1), f"phase {parity}"
            assert bar.count > 0, "a barrier is used before it is initialised"
            threads.wait_until(lambda: bar.phase != parity, f"a barrier, phase {parity}")


class Descriptor:
    """A TMA descriptor: copies boxes of a numpy array of any rank."""

    def __init__(self, a: np.ndarray, box: list[int]) -> None:
        assert a.ndim == len(box)
        self.a, self.box, self.dtype, self.layout = a, box, DTYPES[a.dtype], None
        size = int(np.prod(box)) * a.dtype.itemsize
        self.block_type = types.SimpleNamespace(nbytes=size, shape=box)

    def region(self, at: list[int]) -> tuple[Any, Any]:
        """Return (slices of the array, slices of the box) inside the array, from ``at``."""
        whole, part = [], []
        for n, size, i in zip(self.a.shape, self.box, at, strict=True):
            assert i >= 0, "a copy from before its tensor"
            m = max(0, min(size, n - i))
            whole.append(slice(i, i + m) if m else slice(0, 0))
            part.append(slice(0, m))
        return tuple(whole), tuple(part)


def _coordinates(at: Any) -> list[int]:
    return [int(raw(i)) for i in at]


def tma_load(desc: Descriptor, at: Any, bar: Barrier, to: Shared) -> None:
    """Copy a box to shared memory, later; elements outside the array are zero."""
    assert to.shape == list(desc.box), (to.shape, desc.box)
    at = _coordinates(at)
    to.a[...] = np.nan  # the copy may overwrite the buffer at once

    def land() -> None:
        box = np.zeros(desc.box, desc.a.dtype)
        whole, part = desc.region(at)
        box[part] = desc.a[whole]
        to.a[...] = box.reshape(to.a.shape)
        bar.bytes -= desc.block_type.nbytes
        bar.settle()

    threads.run_later(land)


def tma_store(desc: Descriptor, at: Any, source: Shared) -> None:
    """Copy a box to global memory."""
    here.thread.stores.append((False, desc, _coordinates(at), source))


def tma_add(desc: Descriptor, at: Any, source: Shared) -> None:
    """Add a box to global memory."""
    here.thread.stores.append((True, desc, _coordinates(at), source))


def tma_store_wait(n: int) -> None:
    """Read the sources of this thread's stores, as late as the program allows."""
    assert n == 0, "only waits for all stores are modelled"
    threads.pause(5e-4)
    # additions come first: nothing orders copies of one group
    for add, desc, at, source in sorted(here.thread.stores, key=lambda store: not store[0]):
        here.thread.in_flight.append((add, desc, at, source.a.reshape(desc.box).copy()))
    here.thread.stores.clear()
    if random.random() < 0.3:  # global memory holds them now, or when the program waits for that
        land_stores()


def land_stores() -> None:
    """Write to global memory what this thread's stores have read."""
    while here.thread.in_flight:
        add, desc, at, box = here.thread.in_flight.pop(0)
        whole, part = desc.region(at)
        if add:
            desc.a[whole] += box[part]
        else:
            desc.a[whole] = box[part]
        threads.progress()


def _finish() -> None:
    assert not here.thread.stores, "a copy was never waited for"
    land_stores()


threads.at_end.append(_finish)
