"""Places of rows of k and v in flat memory, and the copies of own rows to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from torch import Tensor

from ..torch_compat import copy_each
from .exchange import words

Moved = tuple[tuple[int, int, int], ...]  # to, from, rows
Sizes = tuple[int, int, int]  # B, H, D


@dataclass(frozen=True)
class RowPlaces:
    """Place rows of k and v in flat memory.

    Those of one tensor, then of the next: ``[rows, B, H, D]``. Or by kv heads, each row of k next
    to that of v: ``[H, rows, B, D + Dv]``.
    """

    sizes: tuple[Sizes, Sizes]
    rows: int
    by_heads: bool

    @cached_property
    def width(self) -> int:
        """Elements of a row of k and v."""
        return sum(map(prod, self.sizes))

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """Memory in which a range of rows is one copy: its first element, the elements of a row."""
        sizes = [prod(each) for each in self.sizes]
        if self.by_heads:
            heads = self.sizes[0][1]
            sizes = [self.width // heads] * heads
        starts = accumulate((self.rows * size for size in sizes), initial=0)
        return list(zip(starts, sizes, strict=False))

    def of(self, head: int | None, first: int, count: int) -> list[tuple[int, int]]:
        """Return (first element, elements) of rows of the unit of a head, or of all units."""
        units = self.units if head is None else self.units[head : head + 1]
        return [(start + first * size, count * size) for start, size in units]

    @cached_property
    def distances(self) -> tuple[tuple[int, int], ...]:
        """The elements from row to row of k and of v, from batch to batch, and head to head.

        Then come those before the first row.
        """
        (b, heads, d), (_, _, dv) = self.sizes
        if self.by_heads:
            both = d + dv
            row, head = b * both, self.rows * b * both
            return (row, row), (both, both), (head, head), (0, d)
        row = b * heads
        return (row * d, row * dv), (heads * d, heads * dv), (d, dv), (0, self.rows * row * d)

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """Return k and v, ``[B, rows, H, D]``."""
        begin, found = flat.storage_offset(), []
        for (b, h, d), row, batch, head, first in zip(self.sizes, *self.distances, strict=True):
            strides = batch, row, head, 1
            found.append(flat.as_strided((b, self.rows, h, d), strides, begin + first))
        return found


def put(flat: Tensor, places: RowPlaces, tensors: Sequence[Tensor], moves: Moved) -> None:
    """Copy rows of k and v to their places, in one launch or by words where it can be."""
    if flat.is_cuda and _by_kernel(flat, places, tensors, moves):
        return
    to: list[Tensor] = []
    origins: list[Tensor] = []
    for place, t in zip(places.tensors(flat), tensors, strict=True):
        here, own = words(place.transpose(0, 1), t.transpose(0, 1))
        to += [here[a : a + n] for a, _, n in moves]
        origins += [own[b : b + n] for _, b, n in moves]
    copy_each(to, origins)


def _by_kernel(flat: Tensor, places: RowPlaces, tensors: Sequence[Tensor], moves: Moved) -> bool:
    """Copy rows of k and v in one launch; return False without Triton."""
    try:
        from ..gpu.row_copies import copy_rows
    except ImportError:
        return False
    k, v = tensors
    if k.stride(3) != 1 or v.stride(3) != 1:
        return False
    copy_rows(k, v, flat, places.distances, moves)
    return True
