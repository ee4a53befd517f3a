"""The sums of slots: gradients that several calls have written (``distributed/slots.py``)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiled import Launch

#: numbers of a row that a program adds, at most
_MOST = 2048


class SumPointers(NamedTuple):
    """``t`` of the kernel."""

    memory: Any  # float32 or float64 [rows, B, width]
    rows: Any  # int32 [groups, most, n]: rows of memory, -1 for none; first -2: not written
    total: Any  # [B, n, width]


class SumNumbers(NamedTuple):
    """``n`` of the kernel."""

    n: Any
    batch: Any


class SumConstants(NamedTuple):
    """``c`` of the kernel."""

    GROUPS: Any
    MOST: Any  # rows of a group that are added, at most
    WIDTH: Any
    BLOCK: Any


@triton.jit
def sum_slots_kernel(t, n, c):
    """Store the sum of a row: of the sums of groups, each in the order of its table."""
    row = tl.program_id(0)
    b = tl.program_id(1)
    i = tl.program_id(2) * c.BLOCK + tl.arange(0, c.BLOCK)
    dtype: tl.constexpr = t.memory.dtype.element_ty
    total = tl.zeros([c.BLOCK], dtype)
    for group in tl.static_range(c.GROUPS):
        part = tl.zeros([c.BLOCK], dtype)
        for m in tl.static_range(c.MOST):
            slot = tl.load(t.rows + (group * c.MOST + m) * n.n + row)
            place = (slot.to(tl.int64) * n.batch + b) * c.WIDTH
            part += tl.load(t.memory + place + i, mask=(slot >= 0) & (i < c.WIDTH), other=0.0)
        total += part
    there = i < c.WIDTH
    if c.GROUPS * c.MOST > 0:
        there = there & (tl.load(t.rows + row) != -2)
    place = (b.to(tl.int64) * n.n + row) * c.WIDTH
    tl.store(t.total + place + i, total.to(t.total.dtype.element_ty), mask=there)


@lru_cache(maxsize=64)
def _launch(device: torch.device, batch: int, n: int, width: int, groups: int, most: int) -> Launch:
    block = min(triton.next_power_of_2(width), _MOST)
    constants = SumConstants(*map(tl.constexpr, (groups, most, width, block)))
    grid = n, batch, -(-width // block)
    return Launch(sum_slots_kernel, grid, {"num_warps": 4}, (SumNumbers(n, batch), constants))


def sum_slots(memory: Tensor, rows: Tensor, total: Tensor) -> None:
    """Write the sums of slots to ``total`` ``[B, n, H, D]``, contiguous.

    ``memory`` is ``[rows, B, H, D]``; ``rows`` has the rows to add, int32 ``[groups, most, n]``:
    ``Slots.summands``.
    """
    b, n, *rest = total.shape
    width = rest[0] * rest[1]
    if not total.numel():
        return
    launch = _launch(total.device, b, n, width, *rows.shape[:2])
    launch.on(total, SumPointers(memory, rows, total))
