"""The machine of ``machine.py`` in the place of Triton's Gluon."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

from .machine import (
    Bars,
    DType,
    Grid,
    Launch,
    Shared,
    Tensor,
    Told,
    _here,
    _same,
    atomic,
    bfloat16,
    float16,
    float32,
    inline_asm,
    int32,
    int64,
    load,
    mbarrier,
    raw,
    reinterpret,
    scalar,
    store,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)


class _Layout:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*_: Any, **__: Any) -> None:
        return None


def _allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Bars(shape[0])
    empty = np.nan if dtype.kind.kind == "f" else -1
    return Shared(np.full(shape, empty, dtype.kind), dtype)


def _elementwise(f: Any) -> Any:
    def run(*args: Any) -> Tensor:
        with np.errstate(all="ignore"):
            first = next((a for a in args if isinstance(a, Tensor)), None)
            other = raw(first) if first is not None else 0
            return Tensor(f(*(_same(raw(a), other) for a in args)))

    return run


def _where(c: Any, x: Any, y: Any) -> Tensor:
    x, y = _same(raw(x), raw(y)), _same(raw(y), raw(x))
    return Tensor(np.where(raw(c), x, y).astype(np.result_type(x, y)))


def _full(shape: list[int], value: Any, dtype: DType, layout: Any = None) -> Tensor:
    return Tensor(np.full(shape, value, dtype.kind))


def _arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(np.arange(start, end, dtype=np.int32))


def _max(x: Tensor, axis: int) -> Tensor:
    return Tensor(x.a.max(axis))


def _sum(x: Tensor, axis: int) -> Tensor:
    return Tensor(x.a.sum(axis, dtype=x.a.dtype))


def language() -> types.ModuleType:
    gl: Any = types.ModuleType("triton.experimental.gluon.language")
    gl.constexpr = lambda x: x
    for name in (
        "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "BlockedLayout",
        "SliceLayout", "DotOperandLayout", "DistributedLinearLayout", "SharedLinearLayout",
    ):  # fmt: skip
        setattr(gl, name, _Layout)
    for d in (float32, float16, bfloat16, int32, int64):
        setattr(gl, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(
            d.name, d.name.replace("i", "int")), d)  # fmt: skip
    gl.shared_memory_descriptor = types.SimpleNamespace(reinterpret=reinterpret)
    gl.allocate_shared_memory = _allocate
    gl.full, gl.arange, gl.where, gl.sum, gl.max = _full, _arange, _where, _sum, _max
    gl.zeros = lambda shape, dtype, layout=None: _full(shape, 0, dtype)
    gl.maximum, gl.minimum = _elementwise(np.maximum), _elementwise(np.minimum)
    gl.exp2, gl.abs, gl.log2 = _elementwise(np.exp2), _elementwise(np.abs), _elementwise(np.log2)
    gl.load, gl.store = load, store
    gl.atomic_add, gl.atomic_xchg = atomic(lambda a, b: a + b), atomic(lambda a, b: b)
    gl.convert_layout = lambda x, layout: x
    gl.static_range = range
    gl.inline_asm_elementwise = inline_asm
    gl.program_id = lambda axis: scalar(_here.block.pid)
    gl.num_programs = lambda axis: scalar(_here.block.programs)
    gl.num_warps = lambda: 4
    gl.warp_specialize = warp_specialize
    return gl


def install() -> None:
    """Make ``import triton`` find this machine."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        made.__path__ = []
        sys.modules[name] = made
        return made

    def same(f: Any = None, **_: Any) -> Any:
        return f if f is not None else same

    def jit(f: Any = None, **_: Any) -> Any:
        return Grid(f) if f is not None else jit

    gl = language()
    hopper = {
        "fence_async_shared": lambda: None,
        "mbarrier": mbarrier,
        "tma": types.SimpleNamespace(
            async_load=tma_load, async_store=tma_store, async_atomic_add=tma_add,
            store_wait=tma_store_wait,
        ),
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    }  # fmt: skip
    module("triton", jit=jit, __version__="3.6.0")
    module("rowmax.gpu.triton")
    module("rowmax.gpu.triton.rules", any_range=None)
    module("rowmax.gpu.compiled", Launch=Launch)
    module("rowmax.gpu.compat", graphs_exist=lambda: False, spills=lambda kernel: 0)
    module("triton._C")
    module("triton._C.libtriton", ir=None)
    sys.modules["triton.language"] = sys.modules["triton"].language = gl  # pyright: ignore
    module("triton.language.extra")
    module("triton.language.extra.cuda", gdc_wait=None)
    module("triton.experimental")
    module("triton.experimental.gluon._runtime", GluonASTSource=None)
    module("triton.experimental.gluon", jit=same, constexpr_function=same, language=gl)
    sys.modules["triton.experimental.gluon.language"] = gl
    gl.__path__ = []  # pyright: ignore
    module("triton.experimental.gluon.language._core", builtin=same)
    module("triton.experimental.gluon.language.nvidia")
    module("triton.experimental.gluon.language.nvidia.hopper", **hopper)
    module("triton.experimental.gluon.nvidia")
    module("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=Told)
