"""What the copy engine is told: of which tensor, cut into which blocks, laid out how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...call.problem import Problem
from .gluon_compat import TensorDescriptor
from .tiles import ROWS, Config

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
#: q0, q1, k0, k1, v0, v1, bias, out: a head size of 96 is copied as 64 + 32, another in one part
Copies = tuple[Any, ...]


def copies_of(
    problem: Problem, C: Config, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor
) -> Copies:
    """Descriptions that lack their tensors; None for a part that is not copied."""
    group = C.GROUP
    q_view = _grouped(q, group)
    q_box, k_box = [1, ROWS // group, 1, group], [1, C.BLOCK_K, 1]
    bias_copy = None
    if C.BIAS == "copied":
        view = (list(bias.shape), strides(bias))
        bias_copy = _copy(bias, view, [1, 1, ROWS, C.BLOCK_K], DTYPES[bias.dtype])
    dtype = DTYPES[problem.dtype]
    return (
        *_two(q, q_view, q_box, (C.D0, C.D1), dtype),
        *_two(k, (list(k.shape), strides(k)), k_box, (C.D0, C.D1), dtype),
        *_two(v, (list(v.shape), strides(v)), k_box, (C.DV0, C.DV1), dtype),
        bias_copy,
        _copy(out, _grouped(out, group), [*q_box, C.STAGED], dtype) if C.STAGED else None,
    )


def _grouped(t: Tensor, group: int) -> tuple[list[int], list[int]]:
    """t with the query heads of a kv head as a dimension of their own."""
    b, n, h, d = t.shape
    sb, sn, sh, _ = strides(t)
    return [b, n, h // group, group, d], [sb, sn, sh * group, sh, 1]


def over(
    copies: Copies, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor
) -> Copies:
    """The descriptions with the tensors of a call."""
    return placed(copies, (q, q, k, k, v, v, bias, out))


def placed(copies: Copies, tensors: tuple[Any, ...]) -> Copies:
    """Each description with its tensor."""
    return tuple([None if x is None else _with(x, t) for x, t in zip(copies, tensors, strict=True)])


def blocks(dtype: torch.dtype, shape: Any, strides: Any, box: list[int]) -> Any:
    """The description, without its tensor, of one that is copied in blocks of ``box``."""
    return _copy(_Like(dtype), (list(shape), list(strides)), box, DTYPES[dtype])


def _with(template: Any, t: Any) -> Any:
    # past the checks of the constructor, which its template has passed
    new = object.__new__(TensorDescriptor)
    new.__dict__ = template.__dict__ | {"base": t}
    return new


def _two(t: Tensor, view: Any, box: list[int], widths: tuple[int, int], dtype: Any) -> Copies:
    return tuple(_copy(t, view, [*box, w], dtype) if w else None for w in widths)


def _copy(t: Any, view: Any, box: list[int], dtype: Any) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return _with(TensorDescriptor(t, *view, box, layout), _Like(t.dtype))


class _Like:
    """In the place of a tensor, which a plan that is kept must not keep."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def strides(t: Tensor) -> list[int]:
    """The strides of t, with one that the engine takes where the size is one."""
    row = t.shape[-1] + -t.shape[-1] % 8
    return [s if n > 1 else row for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]


def takes(t: Tensor) -> bool:
    """Whether every row begins on 16 bytes."""
    if t.data_ptr() % 16 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return False
    each = 16 // t.element_size()
    return all(
        n == 1 or (s > 0 and s % each == 0)
        for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    )


def taken(t: Tensor) -> Tensor:
    """t, or a copy that the engine takes."""
    return t if takes(t) else t.clone(memory_format=torch.contiguous_format)
