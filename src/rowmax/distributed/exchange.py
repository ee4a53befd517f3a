"""Copies of rows between ranks: keys and values come, and their gradients return.

A copy begins when its record is made. ``wait`` returns the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_compat import add_each, copy_each
from .collectives import begin_all_gather, begin_all_to_all
from .groups import Group
from .layout import Layout, Ranges
from .routes import Route, length_of, rows_of, union

Shapes = Sequence[torch.Size]


class Gather:
    """The rows that a rank needs of each ``[B, n, H, D]``, on their way to it."""

    def __init__(self, tensors: Sequence[Tensor], route: Route, keys: Layout, group: Group) -> None:
        self.route = route
        self.shapes = [t.shape for t in tensors]
        self.received = [elements(self.shapes, ranges) for ranges in route.received]
        if route.whole:
            own = packed(tensors, [((0, keys.lengths[group.rank]),)])
            wide = elements(self.shapes, ((0, 1),))
            self.copy = begin_all_gather(own, [n * wide for n in keys.lengths], group)
        else:
            sent = [elements(self.shapes, ranges) for ranges in route.sent]
            flat = packed(tensors, route.sent)
            self.copy = begin_all_to_all(flat, sent, self.received, group)

    def wait(self) -> list[Tensor]:
        """Return the rows, in the order of positions."""
        found = self.copy.wait()
        if not self.route.whole:
            found = found[0].split(self.received)
        received = self.route.received
        each = (unpacked(*one, self.shapes) for one in zip(found, received, strict=True))
        return [in_order(parts, received).transpose(0, 1) for parts in zip(*each, strict=True)]


class Return:
    """Gradients of gathered rows ``[B, length, H, D]``, on their way to the ranks of the rows."""

    def __init__(self, tensors: Sequence[Tensor], route: Route, group: Group) -> None:
        self.route, self.rank = route, group.rank
        self.shapes = [t.shape for t in tensors]
        sent, self.received = (
            [elements(self.shapes, ranges) for ranges in each]
            for each in (route.received, route.sent)
        )
        self.copy = begin_all_to_all(packed(tensors, route.received), sent, self.received, group)

    def wait(self) -> Sums:
        """Return the sums over all ranks, in the dtype of the tensors."""
        parts = self.copy.wait()[0].split(self.received)
        return summed(parts, self.route.sent, self.shapes, self.rank)


class Sums(NamedTuple):
    """The sums over ranks of the rows of some ranges: of each tensor ``[B, length, H, D]``."""

    ranges: Ranges
    each: list[Tensor]


def summed(parts: Sequence[Tensor], sent: Sequence[Ranges], shapes: Shapes, rank: int) -> Sums:
    """Return the sums over all ranks of own rows, of flat parts that hold these ranges.

    A rank adds its own part first, then that of the next rank, and so on, as it adds slots.
    """
    every = union(pair for ranges in sent for pair in ranges)
    length = length_of(every)
    sums = [parts[rank].new_zeros((length, b, *rest)) for b, _, *rest in shapes]
    for other in (rank, *others_of(rank, len(parts))):
        at = rows_of(sent[other], every)
        to = [total[start:stop] for total in sums for start, stop in at]
        found = unpacked(parts[other], at, shapes)
        add_each(to, [rows for each in found for rows in each.split(_lengths(at))])
    return Sums(every, [total.transpose(0, 1) for total in sums])


def others_of(rank: int, size: int) -> list[int]:
    """Return the other ranks, from the next one on: each has one reader at a time."""
    return [(rank + step) % size for step in range(1, size)]


def elements(shapes: Shapes, ranges: Ranges) -> int:
    """Return the number of elements of some rows of all tensors."""
    rows = length_of(ranges)
    return sum(rows * b * h * d for b, _, h, d in shapes)


def packed(tensors: Sequence[Tensor], each: Sequence[Ranges], flat: Tensor | None = None) -> Tensor:
    """Return for each rank the rows of its ranges: those of one tensor, then of the next.

    A row is copied once, from any strides. ``flat`` is memory for them, or for more.
    """
    shapes = [t.shape for t in tensors]
    if flat is None:
        flat = tensors[0].new_empty(sum(elements(shapes, ranges) for ranges in each))
    begin, to, found = 0, [], []
    for ranges in each:
        for t in tensors:
            for start, stop in ranges:
                rows = t.transpose(0, 1)[start:stop]
                end = begin + rows.numel()
                here, there = words(flat[begin:end].view(rows.shape), rows)
                to.append(here)
                found.append(there)
                begin = end
    copy_each(to, found)
    return flat


def words(*tensors: Tensor) -> list[Tensor]:
    """Return the same memory as words of 8 bytes, if all rows consist of such; for copies alone.

    torch copies strided rows, such as those of some heads, with one element a thread.
    """
    return [t.view(torch.int64) for t in tensors] if all(map(_in_words, tensors)) else [*tensors]


def _in_words(t: Tensor) -> bool:
    size = t.element_size()
    places = (t.shape[-1], t.storage_offset(), *t.stride()[:-1])
    return size < 8 and t.stride(-1) == 1 and all(x * size % 8 == 0 for x in places)


def unpacked(flat: Tensor, ranges: Ranges, shapes: Shapes) -> list[Tensor]:
    """Return the rows ``[n, B, H, D]`` of some ranges of each tensor of one rank."""
    each = flat.split([elements([shape], ranges) for shape in shapes])
    sizes = [(length_of(ranges), b, h, d) for b, _, h, d in shapes]
    return [rows.view(size) for rows, size in zip(each, sizes, strict=True)]


def in_order(parts: Sequence[Tensor], each: Sequence[Ranges]) -> Tensor:
    """Return the rows of all parts ``[n, ...]`` in the order of the ranges that they hold."""
    pieces: list[tuple[int, Tensor]] = []
    for rows, ranges in zip(parts, each, strict=True):
        starts = [start for start, _ in ranges]
        pieces += zip(starts, rows.split(_lengths(ranges)), strict=True)
    ordered = [rows for _, rows in sorted(pieces, key=lambda one: one[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered or [parts[0]])


def _lengths(ranges: Ranges) -> list[int]:
    return [stop - start for start, stop in ranges]
