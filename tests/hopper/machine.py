"""A machine on which the Hopper kernels run without a GPU: slow, and as unkind as it may be.

``language.install`` puts it in the place of Triton's Gluon, before ``rowmax.gpu.hopper`` is
imported; a kernel is then Python that runs on numpy. Every partition of every block is a thread.
Copies land late and in any order; a product is made when it is waited for, from what its operands
hold by then; memory begins as NaN. A barrier that gets too many arrivals, a number that is read
before its product was waited for, or a thread that waits for too long is an error.

What it cannot show is what the compiler makes of layouts, and fences.
"""

from __future__ import annotations

import random
import re
import threading
import time
import types
from copy import copy
from typing import Any

import numpy as np

LIMIT = 60.0  # seconds that a thread may wait
_here = threading.local()
_lock = threading.Condition()
_failed: list[BaseException] = []


class Stuck(RuntimeError):  # noqa: N818
    pass


def _until(ready: Any, what: str) -> None:
    end = time.monotonic() + LIMIT
    with _lock:
        while not ready():
            if _failed:
                raise Stuck("another thread failed")
            if time.monotonic() > end:
                raise Stuck(f"{threading.current_thread().name} waits for {what}")
            _lock.wait(0.5)


def _dawdle() -> None:
    if random.random() < 0.02:
        time.sleep(random.random() * 1e-3)


# --- numbers -----------------------------------------------------------------------------------


class DType:
    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, np.dtype(kind)

    primitive_bitwidth = property(lambda self: 8 * self.kind.itemsize)

    def __repr__(self) -> str:
        return self.name


float32, float16 = DType("fp32", np.float32), DType("fp16", np.float16)
bfloat16 = DType("bf16", np.float32)
int32, int64, int1 = DType("i32", np.int32), DType("i64", np.int64), DType("i1", np.bool_)
_OF = {d.kind: d for d in (float16, int32, int64, int1, float32)}


def raw(x: Any) -> Any:
    return x.a if isinstance(x, Tensor) else x


class Tensor:
    """A tensor or a scalar: what operators, casts and shapes need."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)
        if self.a.dtype == np.float64:
            self.a = self.a.astype(np.float32)

    dtype = property(lambda self: _OF[self.a.dtype])
    shape = property(lambda self: list(self.a.shape))
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype: DType) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(self.a.astype(dtype.kind))

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.a.reshape(*shape))

    def expand_dims(self, axis: int) -> Tensor:
        return Tensor(np.expand_dims(self.a, axis))

    def permute(self, order: Any) -> Tensor:
        return Tensor(self.a.transpose(order))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.a[..., 0]), Tensor(self.a[..., 1])

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.a[at])

    def __bool__(self) -> bool:
        return bool(self.a)

    def __index__(self) -> int:
        return int(self.a)

    def __invert__(self) -> Tensor:
        return Tensor(~self.a)

    def __neg__(self) -> Tensor:
        return Tensor(-self.a)


def _operator(f: Any) -> Any:
    def run(a: Any, b: Any) -> Any:
        if isinstance(b, Pointer):
            return NotImplemented
        with np.errstate(all="ignore"):
            return Tensor(f(_same(raw(a), raw(b)), _same(raw(b), raw(a))))

    return run


def _same(a: Any, b: Any) -> Any:
    """Python numbers take the type of the other side, as they do in Triton."""
    if isinstance(a, (bool, int, float)) and isinstance(b, np.ndarray) and b.dtype.kind != "b":
        kind = b.dtype if isinstance(a, int) or b.dtype.kind == "f" else np.float32
        return np.asarray(a, kind)
    return a


def _quotient(a: Any, b: Any) -> Any:  # toward zero, as the hardware has it
    return np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b)).astype(
        np.result_type(a, b)
    )


_OPERATORS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b, "floordiv": _quotient,
    "mod": lambda a, b: a - b * _quotient(a, b), "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "rshift": lambda a, b: a >> b,
    "lshift": lambda a, b: a << b,
}  # fmt: skip
for _name, _f in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operator(_f))
    setattr(Tensor, f"__r{_name}__", (lambda g: lambda b, a: g(a, b))(_operator(_f)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _operator(getattr(np.ndarray, f"__{_name}__")))
Tensor.__hash__ = None  # pyright: ignore


class Pointer:
    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        assert memory.ndim == 1
        self.memory, self.at = memory, np.asarray(at, np.int64)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + np.asarray(raw(other), np.int64))

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=_OF[self.memory.dtype])


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    at = pointer.at
    if mask is None:
        assert (at >= 0).all(), "a load before its tensor"
        return Tensor(pointer.memory[at])
    at, ok = np.broadcast_arrays(at, raw(mask))
    found = np.full(at.shape, other, pointer.memory.dtype)
    found[ok] = pointer.memory[at[ok]]
    assert (at[ok] >= 0).all(), "a load before its tensor"
    return Tensor(found)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, ok, x = np.broadcast_arrays(pointer.at, raw(mask), raw(value))
    assert (at[ok] >= 0).all(), "a store before its tensor"
    pointer.memory[at[ok]] = x[ok]


def atomic(change: Any) -> Any:
    def run(pointer: Pointer, value: Any, **_: Any) -> Tensor:
        time.sleep(random.random() * 2e-4)
        with _lock:
            if _failed:
                raise Stuck("another thread failed")
            before = pointer.memory[pointer.at].copy()
            pointer.memory[pointer.at] = change(before, raw(value))
            return Tensor(before)

    return run


# --- shared memory, barriers, copies -----------------------------------------------------------


class Shared:
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
        _dawdle()
        return Tensor(self.a.copy())

    def store(self, value: Tensor) -> None:
        _dawdle()
        assert value.a.dtype == self.a.dtype, (value.a.dtype, self.a.dtype)
        self.a[...] = value.a


def reinterpret(buffer: Shared, dtype: DType, shape: list[int], layout: Any) -> Shared:
    if dtype.kind != buffer.a.dtype:
        a = buffer.a.view(dtype.kind).reshape(shape)
        assert np.shares_memory(a, buffer.a)
        return Shared(a, dtype)
    if shape[-1] < buffer.a.shape[-1]:
        return Strips(buffer, shape)  # pyright: ignore
    a = buffer.a.reshape(shape)
    assert np.shares_memory(a, buffer.a)
    return Shared(a, dtype)


class Strips:
    """A block by rows as they lie in memory: columns of 64 at a time, one under the other."""

    def __init__(self, buffer: Shared, shape: list[int]) -> None:
        width = shape[-1]
        parts = buffer.a.shape[-1] // width
        rows = buffer.a.reshape(-1, parts, width).transpose(1, 0, 2)
        self.a = rows.reshape(parts, shape[0] // parts, *shape[1:])
        assert np.shares_memory(self.a, buffer.a)
        self.dtype = buffer.dtype

    def index(self, i: Any) -> Shared:
        part, n = divmod(int(raw(i)), self.a.shape[1])
        return Shared(self.a[part, n], self.dtype)


class Bar:
    def __init__(self) -> None:
        self.count = 0

    def settle(self) -> None:
        assert self.pending >= 0, "too many arrivals"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            _lock.notify_all()


class Bars:
    def __init__(self, n: int) -> None:
        self.bars = [Bar() for _ in range(n)]

    def index(self, i: Any) -> Bar:
        i = int(raw(i))
        assert 0 <= i < len(self.bars)
        return self.bars[i]


class mbarrier:  # noqa: N801
    class MBarrierLayout:
        pass

    @staticmethod
    def init(bar: Bar, count: int) -> None:
        bar.count = bar.pending = count
        bar.phase = bar.bytes = 0

    @staticmethod
    def expect(bar: Bar, size: int, pred: Any = True) -> None:
        if bool(pred):
            with _lock:
                bar.bytes += size
                bar.pending -= 1
                bar.settle()

    @staticmethod
    def arrive(bar: Bar, *, count: int = 1, pred: Any = True) -> None:
        _dawdle()
        if bool(pred):
            with _lock:
                bar.pending -= count
                bar.settle()

    @staticmethod
    def wait(bar: Bar, phase: Any, pred: Any = True) -> None:
        if bool(pred):
            parity = int(raw(phase))
            assert parity in (0, 1)
            _until(lambda: bar.phase != parity, f"a barrier, phase {parity}")


class Descriptor:
    """What copies boxes of a numpy array of any rank."""

    def __init__(self, a: np.ndarray, box: list[int]) -> None:
        assert a.ndim == len(box)
        self.a, self.box, self.dtype, self.layout = a, box, _OF[a.dtype], None
        size = int(np.prod(box)) * a.dtype.itemsize
        self.block_type = types.SimpleNamespace(nbytes=size, shape=box)

    def region(self, at: list[int]) -> tuple[Any, Any]:
        """(where in the array, where in the box)."""
        whole, part = [], []
        for n, size, i in zip(self.a.shape, self.box, at, strict=True):
            assert i >= 0, "a copy from before its tensor"
            m = max(0, min(size, n - i))
            whole.append(slice(i, i + m) if m else slice(0, 0))
            part.append(slice(0, m))
        return tuple(whole), tuple(part)


def _coordinates(at: Any) -> list[int]:
    return [int(raw(i)) for i in at]


def tma_load(desc: Descriptor, at: Any, bar: Bar, to: Shared) -> None:
    assert list(to.a.shape) == list(desc.box)
    at = _coordinates(at)
    to.a[...] = np.nan  # what is there may be gone at once

    def land() -> None:
        time.sleep(random.random() * 1e-3)
        box = np.zeros(desc.box, desc.a.dtype)
        whole, part = desc.region(at)
        box[part] = desc.a[whole]
        with _lock:
            to.a[...] = box
            bar.bytes -= desc.block_type.nbytes
            bar.settle()

    threading.Thread(target=land, daemon=True).start()


def tma_add(desc: Descriptor, at: Any, source: Shared) -> None:
    pending = _here.__dict__.setdefault("adds", [])
    pending.append((desc, _coordinates(at), source))


def tma_store(desc: Descriptor, at: Any, source: Shared) -> None:
    pending = _here.__dict__.setdefault("stores", [])
    pending.append((desc, _coordinates(at), source))


def tma_store_wait(n: int) -> None:
    """Buffers are read as late as this, by what is known to the program."""
    assert n == 0
    time.sleep(random.random() * 5e-4)
    flying = _here.__dict__.setdefault("flying", [])
    for kind in ("adds", "stores"):
        for desc, at, source in _here.__dict__.pop(kind, []):
            flying.append((kind, desc, at, source.a.reshape(desc.box).copy()))
    if random.random() < 0.3:  # in memory at once, or when that is waited for
        _land()


def _land() -> None:
    """All copies are in memory."""
    flying = _here.__dict__.setdefault("flying", [])
    while flying:
        kind, desc, at, box = flying.pop(0)
        whole, part = desc.region(at)
        with _lock:
            if kind == "adds":
                desc.a[whole] += box[part]
            else:
                desc.a[whole] = box[part]


# --- products ----------------------------------------------------------------------------------


class Flying:
    """The accumulator of a product that was not waited for."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: Any) -> None:
        self.given = a, b, acc, bool(use_acc)
        self.made: Tensor | None = None

    def make(self) -> None:
        if self.made is None:
            a, b, acc, use_acc = self.given
            if isinstance(acc, Flying):
                acc.make()
                acc = acc.made
            with np.errstate(all="ignore"):
                x = a.a.astype(np.float32) @ b.a.astype(np.float32)
                self.made = Tensor(x + acc.a if use_acc else x)


def warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    assert is_async
    flying = Flying(a, b, acc, use_acc)
    queue = _here.__dict__.setdefault("products", [])
    queue.append(flying)
    if random.random() < 0.5:  # or as soon as this
        for one in queue:
            one.make()
    return flying


def warpgroup_mma_wait(n: int, deps: list[Any]) -> Any:
    queue = _here.__dict__.setdefault("products", [])
    while len(queue) > n:
        queue.pop(0).make()
    found = []
    for x in deps:
        if isinstance(x, Flying):
            assert x not in queue, "a product is used before it was waited for"
            x = x.made
        found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


# --- a block -----------------------------------------------------------------------------------


class Block:
    def __init__(self, pid: int, programs: int) -> None:
        self.pid, self.programs = pid, programs


def inline_asm(text: str, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    if text.startswith("griddepcontrol"):
        return None
    if text.startswith("cvt.rn"):
        return args[0].to(dtype)
    if text.startswith("tanh"):
        return Tensor(np.tanh(args[0].a))
    if text.startswith("cp.async.bulk.wait_group"):  # then says so to other blocks
        _land()
        place, value = args
        with _lock:
            place.memory[place.at] = raw(value)
        return None
    if text.startswith("ld.acquire"):
        time.sleep(random.random() * 2e-4)
        with _lock:
            if _failed:
                raise Stuck("another thread failed")
            return Tensor(args[0].memory[args[0].at].copy())
    if "nanosleep" in text:
        return args[0]
    if "vote.sync" in text:  # a quad's maximum, where it has passed the reference by as much
        peak, m = args[0].a, args[1].a
        (bits,) = set(re.findall(r"0f([0-9a-f]{8})", text))
        threshold = np.uint32(int(bits, 16)).view(np.float32)
        top = np.broadcast_to(peak.max(1, keepdims=True), m.shape)
        return Tensor(np.where(top > m + threshold, top, m))
    raise NotImplementedError(text)


def warp_specialize(partitions: list[Any], warps: Any, registers: Any) -> None:
    threads = []
    for f, args in partitions:
        threads.append(threading.Thread(target=_guarded, args=(f, args, _here.block), daemon=True))
        threads[-1].name = f"{f.__name__} of block {_here.block.pid}"
        threads[-1].start()
    for thread in threads:
        thread.join()


def _guarded(f: Any, args: tuple[Any, ...], block: Block) -> None:
    _here.block = block
    try:
        f(*args)
        assert not _here.__dict__.get("products"), "a product was never waited for"
        assert not _here.__dict__.get("adds"), "a copy was never waited for"
        assert not _here.__dict__.get("stores"), "a copy was never waited for"
        _land()
    except BaseException as error:
        with _lock:
            _failed.append(error)
            _lock.notify_all()


def run(kernel: Any, programs: int, *args: Any) -> None:
    """Run a kernel over a grid; all blocks at once."""
    _failed.clear()

    def one(pid: int) -> None:
        _guarded(lambda: kernel(*args), (), Block(pid, programs))

    threads = [threading.Thread(target=one, args=(pid,)) for pid in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in _failed if not isinstance(e, Stuck)]
    if real or _failed:
        raise (real or _failed)[0]


def scalar(x: Any) -> Tensor:
    return Tensor(np.asarray(x, np.int32 if isinstance(x, int) else np.float32))


# --- the host's side ---------------------------------------------------------------------------


class Told:
    """What the host tells the copy engine, of a torch tensor."""

    def __init__(self, base: Any, shape: Any, strides: Any, box: Any, layout: Any) -> None:
        self.base, self.shape, self.strides, self.box = base, shape, strides, box
        self.layout, self.padding = layout, "zero"

    def descriptor(self) -> Descriptor:
        return Descriptor(self.base.as_strided(self.shape, self.strides).numpy(), self.box)


def pointer(t: Any) -> Pointer:
    """To the first element of a torch tensor, and all that lies behind it."""
    rest = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return Pointer(t.detach().as_strided((rest,), (1,)).numpy())


def given(x: Any) -> Any:
    """An argument as a kernel gets it."""
    if isinstance(x, Told):
        return x.descriptor()
    if hasattr(x, "data_ptr"):
        return pointer(x)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return scalar(x)
    if isinstance(x, tuple):
        parts = [given(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


class Launch:
    """In the place of ``rowmax.gpu.compiled.Launch``."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], options: Any, last: Any, copies: Any = ()
    ) -> None:
        self.kernel, self.grid, self.last, self.copies = kernel, grid, last, copies

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        numbers, *constants = self.last
        placed = []
        for like, base in zip(self.copies, bases, strict=True):
            one = None if like is None else copy(like)
            if one is not None:
                one.base = base
            placed.append(one)
        run(self.kernel, self.grid[0], *(given(x) for x in (*placed, t, numbers)), *constants)


class Grid:
    """A kernel that is launched as ``kernel[grid](...)``, one program after another."""

    def __init__(self, f: Any) -> None:
        self.f = f

    def __call__(self, *args: Any) -> Any:
        return self.f(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any) -> None:
            for pid in range(grid[0]):
                _here.block = Block(pid, grid[0])
                self.f(*(x if isinstance(x, int) else given(x) for x in args))

        return launch
