"""Copies of rows of k and v to memory of another order, in one launch (``row_places.py``).

torch would need a launch for each range of rows of each tensor, and 15 us of the host for each.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..torch_compat import moved
from .compiled import Launch
from .kept import Plans

#: elements of k that a program copies, about, and those of one step
_MOST, _BLOCK = 16384, 4096
_MOST_UNIT = 16

#: by moves, rows of a program and device
_KNOWN = Plans(256)

#: (first row there, first row of k and v, number of rows)
RowMove = tuple[int, int, int]
#: elements from row to row of k and of v, from batch to batch, from head to head, before the first
Distances = tuple[tuple[int, int], ...]


class RowPointers(NamedTuple):
    """``t`` of the kernel."""

    k: Any  # [B, n, H, D]
    v: Any  # [B, n, H, Dv]
    to: Any
    blocks: Any  # int32 [programs, 3]: a move of few rows


class RowNumbers(NamedTuple):
    """``n`` of the kernel: distances in units."""

    k_batch: Any
    k_row: Any
    k_head: Any
    v_batch: Any
    v_row: Any
    v_head: Any
    to_k: Any  # records of ``row, batch, head, first``
    to_v: Any


class RowDistances(NamedTuple):
    """Distances in the memory of copies, in units."""

    row: Any
    batch: Any
    head: Any
    first: Any


class RowConstants(NamedTuple):
    """``c`` of the kernel."""

    H: Any
    D: Any
    DV: Any
    UNIT: Any  # elements; a power of two, so that the compiler finds wide accesses
    BLOCK: Any


@triton.jit
def copy_rows_kernel(t, n, c):
    """Copy some rows of k and of v, of one sequence."""
    move = t.blocks + 3 * tl.program_id(0)
    to, origin, rows = tl.load(move), tl.load(move + 1), tl.load(move + 2)
    b = tl.program_id(1)
    _copy(t.k, t.to, n.k_batch, n.k_row, n.k_head, n.to_k, to, origin, rows, b, c.D, c)
    _copy(t.v, t.to, n.v_batch, n.v_row, n.v_head, n.to_v, to, origin, rows, b, c.DV, c)


@triton.jit
def _copy(x, memory, x_batch, x_row, x_head, there, to, origin, rows, b, D: tl.constexpr, c):
    """Copy rows of one tensor, all heads of each."""
    WIDTH: tl.constexpr = c.H * D
    x += (b.to(tl.int64) * x_batch + origin.to(tl.int64) * x_row) * c.UNIT
    first = there.first + b.to(tl.int64) * there.batch + to.to(tl.int64) * there.row
    memory += first * c.UNIT
    for begin in tl.range(0, rows * WIDTH, c.BLOCK):
        i = begin + tl.arange(0, c.BLOCK)
        row, h, d = (i // WIDTH).to(tl.int64), ((i // D) % c.H).to(tl.int64), i % D
        inside = i < rows * WIDTH
        found = tl.load(x + (row * x_row + h * x_head) * c.UNIT + d, mask=inside)
        tl.store(memory + (row * there.row + h * there.head) * c.UNIT + d, found, mask=inside)


def _blocks(moves: tuple[RowMove, ...], rows: int, device: torch.device) -> Tensor:
    """Return the moves in parts of at most so many rows, int32 ``[parts, 3]``, made once."""
    key = moves, rows, device
    found = _KNOWN.get(key)
    if found is not None:
        return found
    parts = [
        (to + start, origin + start, min(rows, count - start))
        for to, origin, count in moves
        for start in range(0, count, rows)
    ]
    with torch.inference_mode(False):
        table = moved(torch.tensor(parts, dtype=torch.int32), device)
    _KNOWN.keep(key, table)
    return table


@lru_cache(maxsize=256)
def _launch(
    programs: int, sizes: tuple[int, ...], strides: tuple[int, ...], place: Distances
) -> Launch:
    b, h, d, dv = sizes
    unit = gcd(_MOST_UNIT, d, dv, *strides, *chain(*place))
    there = [RowDistances(*(x // unit for x in each)) for each in zip(*place, strict=True)]
    constants = RowConstants(*map(tl.constexpr, (h, d, dv, unit, _BLOCK)))
    numbers = RowNumbers(*(x // unit for x in strides), *there)
    options = {"num_warps": 8}
    return Launch(copy_rows_kernel, (programs, b, 1), options, (numbers, constants))


def copy_rows(
    k: Tensor, v: Tensor, to: Tensor, place: Distances, moves: tuple[RowMove, ...]
) -> None:
    """Copy rows of k and v, ``[B, n, H, D]``, to flat memory.

    The last dimension has stride 1, in the tensors and there.
    """
    b, _, h, d = k.shape
    if not moves or not k.numel():
        return
    rows = max(1, _MOST // (h * d))
    blocks = _blocks(moves, rows, k.device)
    strides = tuple(t.stride(axis) for t in (k, v) for axis in (0, 1, 2))
    launch = _launch(blocks.shape[0], (b, h, d, v.shape[3]), strides, place)
    launch.on(k, RowPointers(k, v, to, blocks))
