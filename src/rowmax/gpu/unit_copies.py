"""Copies of tensors whose rows do not begin at multiples of 16 bytes, in one launch.

Such a launch is recorded and repeated with those of its call (``replay.py``), which no operation of
torch is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .compiled import Launch

#: elements of a program, and the most columns of them
_BLOCK, _MOST_COLUMNS = 4096, 1024


class CopyPointers(NamedTuple):
    """``t`` of the kernel."""

    x: Any  # [B, M, N, width], any strides
    to: Any  # [B, M, N, room]


class CopyNumbers(NamedTuple):
    """``n`` of the kernel: sizes, and elements from index to index of ``x``."""

    rows: Any  # B M N
    second: Any
    third: Any
    width: Any
    room: Any
    by_first: Any
    by_second: Any
    by_third: Any
    by_column: Any


class CopyConstants(NamedTuple):
    """``c`` of the kernel."""

    ROWS: Any
    COLUMNS: Any


@triton.jit
def copy_in_units_kernel(t, n, c):
    """Copy some columns of some rows."""
    row = tl.program_id(0).to(tl.int64) * c.ROWS + tl.arange(0, c.ROWS)
    col = tl.program_id(1) * c.COLUMNS + tl.arange(0, c.COLUMNS)
    third = row % n.third
    second = (row // n.third) % n.second
    first = row // n.third // n.second
    origin = first * n.by_first + second * n.by_second + third * n.by_third
    inside = (row < n.rows)[:, None] & (col < n.width)[None, :]
    columns = col.to(tl.int64) * n.by_column
    found = tl.load(t.x + origin[:, None] + columns[None, :], mask=inside)
    tl.store(t.to + (row * n.room)[:, None] + col[None, :], found, mask=inside)


@lru_cache(maxsize=256)
def _launch(sizes: tuple[int, ...], strides: tuple[int, ...], room: int) -> Launch:
    b, m, n, width = sizes
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    constants = CopyConstants(*map(tl.constexpr, (_BLOCK // columns, columns)))
    numbers = CopyNumbers(b * m * n, m, n, width, room, *strides)
    grid = -(-b * m * n * columns // _BLOCK), -(-width // columns), 1
    return Launch(copy_in_units_kernel, grid, {"num_warps": 4}, (numbers, constants))


def copied_in_units(x: Tensor) -> Tensor:
    """Return a copy of ``x``, of four axes, of which every row begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    *sizes, width = x.shape
    room = -(-width // unit) * unit
    made = x.new_empty(*sizes, room)
    if x.numel():
        launch = _launch(tuple(x.shape), x.stride(), room)
        launch.on(x, CopyPointers(x, made))
    return made[..., :width] if room > width else made
