"""Packed calls with offsets out of range, and with rows past the last sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmax.call.problem import Problem, Tensors


def in_range(cu: Tensor, totals: tuple[int, int]) -> Tensor:
    """Return the offsets ``[2, B + 1]`` that act as ``cu``: from 0, at most the total, rising."""
    found = torch.minimum(cu.clamp(min=0), torch.tensor(totals)[:, None])
    found[:, 0] = 0
    return found.cummax(1).values.int()


def longer(x: Tensor, n: int) -> Tensor:
    """Return x ``[1, total, H, D]`` with n rows of NaN after the last."""
    return torch.cat([x, torch.full_like(x[:, :1], torch.nan).expand(-1, n, -1, -1)], 1)


def with_rows_past_the_last(problem: Problem, tensors: Tensors, n: int) -> tuple[Problem, Tensors]:
    """Return the call with n queries and keys of NaN that no sequence holds."""
    more = {name: longer(getattr(tensors, name), n) for name in "qkv"}
    bigger = problem._replace(total_q=problem.total_q + n, total_k=problem.total_k + n)
    return bigger, tensors._replace(**more)
