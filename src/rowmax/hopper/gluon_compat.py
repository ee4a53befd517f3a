"""The differences between the releases of Gluon, triton 3.6 to the newest, in one place."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
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

#: 3.9 made it public
reinterpret = (
    gl.shared_memory_descriptor.reinterpret
    if hasattr(gl.shared_memory_descriptor, "reinterpret")
    else gl.shared_memory_descriptor._reinterpret
)

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "mbarrier",
    "reinterpret",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
