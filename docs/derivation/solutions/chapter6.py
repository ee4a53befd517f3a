"""Solutions of chapter 6: masks, sinks and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Words = tuple[int, int, int, int]
Philox = Callable[[Words, tuple[int, int]], Words]


class Tile(NamedTuple):
    """A tile of queries i0 to i1 and keys j0 to j1, all four included."""

    i0: int
    i1: int
    j0: int
    j1: int


def tile_kind(tile: Tile, offset: int, left: int, right: int, prefix: int) -> int:
    """Return 0 if no pair of the tile may attend, 2 if all may, else 1.

    A pair may attend if ``j >= i + offset - left``, and ``j <= i + offset + right`` or
    ``j < prefix``. The sum of left and right is not negative. No pair is visited.
    """
    i0, i1, j0, j1 = tile
    first, last = i0 + offset - left, max(i1 + offset + right, prefix - 1)
    if j1 < first or j0 > last:
        return 0
    first, last = i1 + offset - left, max(i0 + offset + right, prefix - 1)
    return 2 if first <= j0 and j1 <= last else 1


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows to which one score without a value is added.

    out is ``[N, D]``, lse ``[N]``, sink one number. A row without keys has lse -inf and out 0. The
    sink may be -inf, which changes nothing.
    """
    total = torch.logaddexp(lse, sink)
    base = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(lse - base)[:, None] * out, total


def kept(philox: Philox, key: tuple[int, int], tile: Tile, threshold: int) -> list[list[bool]]:
    """Return the decisions of dropout for a tile of head 0 of sequence 0, row by row.

    A pair is kept if its 16 bits are at least the threshold. ``philox(counter, key)`` is called
    once for each counter that the tile needs.
    """
    keys = range(tile.j0, tile.j1 + 1)
    columns = [8 * (j // 64) + j % 8 for j in keys]
    rows = []
    for i in range(tile.i0, tile.i1 + 1):
        words = {column: philox((column, i, 0, 0), key) for column in set(columns)}
        lanes = [j // 8 % 8 for j in keys]
        draws = [
            words[column][lane % 4] >> 16 * (lane // 4) & 0xFFFF
            for column, lane in zip(columns, lanes, strict=True)
        ]
        rows.append([draw >= threshold for draw in draws])
    return rows
