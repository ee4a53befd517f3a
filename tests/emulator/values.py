"""Numbers of the emulator: tensors and scalars in registers, and pointers to global memory.

float64 becomes float32: no kernel computes in it. numpy has no bfloat16, so float32 stands for it.
Operators follow Triton: Python numbers take the dtype of the other operand, and integer division
rounds toward zero.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import threads


class DType:
    """A dtype of Triton and the numpy dtype that stands for it."""

    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, np.dtype(kind)

    primitive_bitwidth = property(lambda self: 8 * self.kind.itemsize)

    def __repr__(self) -> str:
        return self.name


float32, float16 = DType("fp32", np.float32), DType("fp16", np.float16)
bfloat16 = DType("bf16", np.float32)
int32, int64, int1 = DType("i32", np.int32), DType("i64", np.int64), DType("i1", np.bool_)
_FLOAT64 = np.dtype(np.float64)
#: numpy's scalars compute four times as fast as arrays without axes
_KEPT = frozenset((np.ndarray, np.float16, np.float32, np.int32, np.int64, np.bool_))
DTYPES = {d.kind: d for d in (float16, int32, int64, int1, float32)}
_TORCH = {float16.kind: torch.float16, float32.kind: torch.float32}


def raw(x: Any) -> Any:
    """Return the numpy array of a Tensor; anything else as it is."""
    return x.a if type(x) is Tensor else x


def cast(a: Any, kind: np.dtype) -> Any:
    """Return a in another dtype. Torch converts float16 up to 30 times as fast as numpy."""
    if a.ndim > 1 and a.dtype.kind == kind.kind == "f" and a.dtype is not kind:
        a = a if a.flags.writeable else a.copy()  # torch warns of memory that is only read
        return torch.from_numpy(a).to(_TORCH[kind]).numpy()
    return a.astype(kind)


class Tensor:
    """A tensor or a scalar in registers. Layouts are ignored."""

    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        a = a if type(a) in _KEPT else np.asarray(a)
        self.a: Any = a.astype(np.float32) if a.dtype is _FLOAT64 else a

    dtype = property(lambda self: DTYPES[self.a.dtype])
    shape = property(lambda self: list(self.a.shape))
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype: DType) -> Tensor:
        return Tensor(cast(self.a, dtype.kind))

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.a.reshape(*shape))

    def expand_dims(self, axis: int) -> Tensor:
        at: list[Any] = [slice(None)] * self.a.ndim
        at.insert(axis if axis >= 0 else axis + len(at) + 1, None)
        return Tensor(self.a[tuple(at)])

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
        if type(a) is Tensor and type(b) is Tensor:  # two arrays need no conversion
            return Tensor(f(a.a, b.a))
        kind = type(b)
        if kind is int or kind is float:
            x = a.a
            if x.dtype.kind == "f" or (kind is int and x.dtype.kind == "i"):
                return Tensor(f(x, x.dtype.type(b)))
        elif kind is Pointer:
            return NotImplemented
        a, b = raw(a), raw(b)
        return Tensor(f(matched(a, b), matched(b, a)))

    return run


def matched(a: Any, b: Any) -> Any:
    """Return a; if it is a Python number and b an array, in the dtype that Triton gives it."""
    if (
        type(a) is not np.ndarray
        and isinstance(a, (bool, int, float))
        and (isinstance(b, (np.ndarray, np.generic)) and b.dtype.kind != "b")
    ):
        kind = b.dtype if isinstance(a, int) or b.dtype.kind == "f" else np.dtype(np.float32)
        return kind.type(a)
    return a


def _quotient(a: Any, b: Any) -> Any:
    """Return a / b, rounded toward zero."""
    if isinstance(a, np.generic) and isinstance(b, np.generic) and b != 0:
        quotient = abs(int(a)) // abs(int(b))
        return np.result_type(a, b).type(quotient if (a < 0) == (b < 0) else -quotient)
    return np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b)).astype(
        np.result_type(a, b)
    )


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": _quotient, "mod": lambda a, b: a - b * _quotient(a, b), "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "rshift": operator.rshift, "lshift": operator.lshift,
}  # fmt: skip
for _name, _f in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operator(_f))
    setattr(Tensor, f"__r{_name}__", (lambda g: lambda b, a: g(a, b))(_operator(_f)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _operator(getattr(operator, _name)))
Tensor.__hash__ = None  # pyright: ignore


class Pointer:
    """Addresses in one allocation of global memory, in elements from its start."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        assert memory.ndim == 1
        self.memory, self.at = memory, np.asarray(at, np.int64)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + np.asarray(raw(other), np.int64))

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=DTYPES[self.memory.dtype])


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Tensor:
    """Return the values at the addresses. An address outside the allocation raises."""
    threads.pause_sometimes()
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
    """Store the values at the addresses. An address outside the allocation raises."""
    threads.pause_sometimes()
    at, ok, x = np.broadcast_arrays(pointer.at, raw(mask), raw(value))
    assert (at[ok] >= 0).all(), "a store before its tensor"
    pointer.memory[at[ok]] = x[ok]


def atomic(change: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    """Return an atomic operation that stores ``change(before, value)`` and returns ``before``."""

    def run(pointer: Pointer, value: Any, **_: Any) -> Tensor:
        threads.pause(2e-4)
        threads.check()
        before = pointer.memory[pointer.at].copy()
        pointer.memory[pointer.at] = change(before, raw(value))
        threads.progress()
        return Tensor(before)

    return run


def scalar(x: Any) -> Tensor:
    """Return a number as kernels get it: int32 or float32."""
    return Tensor(np.int32(x) if isinstance(x, int) else np.float32(x))
