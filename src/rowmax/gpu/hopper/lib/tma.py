"""Descriptors of TMA copies, made on the host: a tensor, the shape of tiles, their layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ..gluon_compat import TensorDescriptor

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
Descriptors = tuple[Any, ...]  # None for a tensor that is not copied


class _Like:
    """The properties of a tensor that a plan must not keep alive."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def descriptor(dtype: torch.dtype, shape: Any, strides: Any, tile: list[int]) -> Any:
    """Return the descriptor of copies of tiles of this shape, without its tensor."""
    return TensorDescriptor(
        _Like(dtype), list(shape), list(strides), tile, _layout(dtype, tuple(tile))
    )


@lru_cache(maxsize=256)
def _layout(dtype: torch.dtype, tile: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(tile), DTYPES[dtype])


def strides(t: Tensor) -> list[int]:
    """Return the strides of t, with an aligned number for a dimension of one."""
    row = t.shape[-1] + -t.shape[-1] % 8
    return [s if n > 1 else row for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]


def is_aligned(t: Tensor) -> bool:
    """Return True if every row begins on 16 bytes, as TMA requires."""
    if t.data_ptr() % 16 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return False
    each = 16 // t.element_size()
    return all(
        n == 1 or (s > 0 and s % each == 0)
        for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    )


def aligned(t: Tensor) -> Tensor:
    """Return t, or an aligned copy."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)
