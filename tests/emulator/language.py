"""The modules that take the place of Triton and Gluon, and of rowmax's modules that need them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import values
from .assembly import exp2, inline_asm
from .host import Grid, Launch, TensorDescriptor
from .memory import (
    allocate,
    mbarrier,
    reinterpret,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
)
from .products import warpgroup_mma, warpgroup_mma_wait
from .threads import here, warp_specialize
from .values import DType, Tensor, matched, raw, scalar

LAYOUTS = (
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "SwizzledSharedLayout",
    "BlockedLayout",
    "SliceLayout",
    "DotOperandLayout",
    "DistributedLinearLayout",
    "SharedLinearLayout",
)


class _Layout:
    """Any layout: the emulator ignores it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*_: Any, **__: Any) -> None:
        return None


def _elementwise(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        if len(args) == 1:
            return Tensor(f(args[0].a))
        first = next((a for a in args if isinstance(a, Tensor)), None)
        other = raw(first) if first is not None else 0
        return Tensor(f(*(matched(raw(a), other) for a in args)))

    return run


def _where(c: Any, x: Any, y: Any) -> Tensor:
    c, x, y = raw(c), raw(x), raw(y)
    kind = getattr(x, "dtype", None)
    if kind is None or kind is not getattr(y, "dtype", None):
        x, y = matched(x, y), matched(y, x)
        kind = np.result_type(x, y)
    found = np.where(c, x, y).astype(kind, copy=False)
    return Tensor(found if found.ndim else found[()])


def _full(shape: list[int], value: Any, dtype: DType, layout: Any = None) -> Tensor:
    return Tensor(np.full(shape, value, dtype.kind))


def _arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(np.arange(start, end, dtype=np.int32))


def _reduction(f: np.ufunc) -> Callable[..., Tensor]:
    """Return a reduction along an axis, by halves: numpy's takes 20 times as long on short ones."""

    def run(x: Tensor, axis: int) -> Tensor:
        a = x.a
        if a.ndim < 3:
            return Tensor(f.reduce(a, axis, dtype=a.dtype))
        before = (slice(None),) * axis
        while a.shape[axis] > 1:
            half, odd = divmod(a.shape[axis], 2)
            assert not odd, "only axes of a power of two are modelled"
            a = f(a[(*before, slice(half))], a[(*before, slice(half, None))])
        return Tensor(a[(*before, 0)])

    return run


def language() -> types.ModuleType:
    """Return the module in place of ``triton.experimental.gluon.language``."""
    gl: Any = types.ModuleType("triton.experimental.gluon.language")
    gl.constexpr = lambda x: x
    for name in LAYOUTS:
        setattr(gl, name, _Layout)
    for name in ("float32", "float16", "bfloat16", "int32", "int64"):
        setattr(gl, name, getattr(values, name))
    gl.shared_memory_descriptor = types.SimpleNamespace(reinterpret=reinterpret)
    gl.allocate_shared_memory = allocate
    gl.full, gl.arange, gl.where = _full, _arange, _where
    gl.sum, gl.max = _reduction(np.add), _reduction(np.maximum)
    gl.zeros = lambda shape, dtype, layout=None: _full(shape, 0, dtype)
    gl.maximum, gl.minimum = _elementwise(np.maximum), _elementwise(np.minimum)
    gl.exp2, gl.abs, gl.log2 = _elementwise(exp2), _elementwise(np.abs), _elementwise(np.log2)
    gl.load, gl.store = values.load, values.store
    gl.atomic_add = values.atomic(lambda before, x: before + x)
    gl.atomic_xchg = values.atomic(lambda before, x: x)
    gl.convert_layout = lambda x, layout: x
    gl.static_range = range
    gl.inline_asm_elementwise = inline_asm
    gl.program_id = lambda axis: scalar(here.thread.block.pid)
    gl.num_programs = lambda axis: scalar(here.thread.block.programs)
    gl.num_warps = lambda: 4
    gl.warp_specialize = warp_specialize
    return gl


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []
    sys.modules[name] = module


def _same(f: Any = None, **_: Any) -> Any:
    """Return a function as it is, as a decorator with or without arguments."""
    return f if f is not None else _same


def _jit(f: Any = None, **_: Any) -> Any:
    return Grid(f) if f is not None else _jit


def install() -> None:
    """Make ``import triton`` find the emulator, in a process that has not imported triton."""
    gl: Any = language()
    gl.__path__ = []
    _module("triton", jit=_jit, __version__="3.6.0", language=gl)
    _module("triton._C")
    _module("triton._C.libtriton", ir=None)
    sys.modules["triton.language"] = gl
    _module("triton.language.extra")
    _module("triton.language.extra.cuda", gdc_wait=None)
    _module("triton.experimental")
    _module("triton.experimental.gluon", jit=_same, constexpr_function=_same, language=gl)
    _module("triton.experimental.gluon._runtime", GluonASTSource=None)
    sys.modules["triton.experimental.gluon.language"] = gl
    _module("triton.experimental.gluon.language._core", builtin=_same)
    _module("triton.experimental.gluon.language.nvidia")
    _module(
        "triton.experimental.gluon.language.nvidia.hopper",
        fence_async_shared=lambda: None,
        mbarrier=mbarrier,
        tma=types.SimpleNamespace(
            async_load=tma_load,
            async_store=tma_store,
            async_atomic_add=tma_add,
            store_wait=tma_store_wait,
        ),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
    _module("triton.experimental.gluon.nvidia")
    _module("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=TensorDescriptor)
    # rowmax's modules that compile and launch kernels
    _module("rowmax.gpu.triton")
    _module("rowmax.gpu.rules", any_range=None)
    _module("rowmax.gpu.compiled", Launch=Launch, runs=lambda: False)
    _module("rowmax.gpu.compat", graphs_exist=lambda: False, spills=lambda kernel: 0)
