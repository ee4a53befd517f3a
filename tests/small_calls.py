"""Small calls on the torch backend, for tests of the layers above the backends."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import rowmax

BACKEND = "torch"
attention = functools.partial(rowmax.attention, backend=BACKEND)


def inputs(*sizes: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random q, k and v ``[..., N, 2, 8]`` with any leading sizes."""
    return [torch.randn(*sizes, 2, 8, dtype=dtype, requires_grad=grad) for _ in range(3)]


def with_lse(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    return attention(q, k, v, return_lse=True, **keywords)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return attention(q, k, v, causal=True).flatten(2)
