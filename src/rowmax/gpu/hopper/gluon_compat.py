"""Single names for parts of Gluon that releases from triton 3.6 on name differently."""

from __future__ import annotations

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: 3.8 renamed the copies, 3.9 dropped the old names
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:  # 3.6 has the operation without a name

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic: Any = None):
        """Add a tile in shared memory to a tensor in global memory, by TMA."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


#: from 3.9 on, a product reads a left operand in registers from copies: operands that are used
#: again take their registers twice
COPIES_OPERANDS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

#: 3.9 made it public
reinterpret = (
    gl.shared_memory_descriptor.reinterpret
    if hasattr(gl.shared_memory_descriptor, "reinterpret")
    else gl.shared_memory_descriptor._reinterpret
)

__all__ = [
    "COPIES_OPERANDS",
    "GluonASTSource",
    "TensorDescriptor",
    "fence_async_shared",
    "mbarrier",
    "reinterpret",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
