"""Exercises of chapter 6: masks, sinks and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    raise NotImplementedError


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows to which one score without a value is added.

    out is ``[N, D]``, lse ``[N]``, sink one number. A row without keys has lse -inf and out 0. The
    sink may be -inf, which changes nothing.
    """
    raise NotImplementedError


def kept(philox: Philox, key: tuple[int, int], tile: Tile, threshold: int) -> list[list[bool]]:
    """Return the decisions of dropout for a tile of head 0 of sequence 0, row by row.

    A pair is kept if its 16 bits are at least the threshold. ``philox(counter, key)`` is called
    once for each counter that the tile needs.
    """
    raise NotImplementedError
