"""Copies of rows between ranks: keys and values come, and their gradients return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .collectives import all_gather, all_to_all
from .groups import Group
from .layout import Layout, Ranges
from .routes import Route


def gathered(tensors: Sequence[Tensor], route: Route, keys: Layout, group: Group) -> list[Tensor]:
    """Return the rows that a rank needs of each ``[B, n, H, D]``, in the order of positions."""
    if route.whole:
        own = torch.cat([_rows_first(t).flatten() for t in tensors])
        wide = sum(t.shape[0] * t.shape[2] * t.shape[3] for t in tensors)
        found = all_gather(own, [n * wide for n in keys.lengths], group)
    else:
        flat = _packed(tensors, route.sent)
        sent, received = (
            [_elements(tensors, ranges) for ranges in each] for each in (route.sent, route.received)
        )
        found = all_to_all(flat, sent, received, group).split(received)
    pieces: list[list[tuple[int, Tensor]]] = [[] for _ in tensors]
    for flat, ranges in zip(found, route.received, strict=True):
        for place, each in zip(pieces, _unpacked(flat, tensors, ranges), strict=True):
            place += each
    return [_joined(t, place) for t, place in zip(tensors, pieces, strict=True)]


def returned(tensors: Sequence[Tensor], route: Route, rows: int, group: Group) -> list[Tensor]:
    """Return the sums, for each own row, of the gathered rows ``[B, length, H, D]`` of all ranks.

    Summands are added in the order of ranks, in the dtype of the tensors.
    """
    sent, received = (
        [_elements(tensors, ranges) for ranges in each] for each in (route.received, route.sent)
    )
    flat = _packed(tensors, route.received)
    found = all_to_all(flat, sent, received, group).split(received)
    sums = [t.new_zeros((rows, t.shape[0], *t.shape[2:])) for t in tensors]
    for flat, ranges in zip(found, route.sent, strict=True):
        for total, each in zip(sums, _unpacked(flat, tensors, ranges), strict=True):
            for (start, stop), (_, piece) in zip(ranges, each, strict=True):
                total[start:stop] += piece
    return [total.transpose(0, 1) for total in sums]


def _rows_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


def _elements(tensors: Sequence[Tensor], ranges: Ranges) -> int:
    rows = sum(stop - start for start, stop in ranges)
    return sum(rows * t.shape[0] * t.shape[2] * t.shape[3] for t in tensors)


def _packed(tensors: Sequence[Tensor], each: Sequence[Ranges]) -> Tensor:
    """Return for each rank the rows of its ranges: those of one tensor, then of the next."""
    pieces = [
        _rows_first(t)[start:stop].flatten()
        for ranges in each
        for t in tensors
        for start, stop in ranges
    ]
    return torch.cat(pieces) if pieces else tensors[0].new_empty(0)


def _unpacked(
    flat: Tensor, tensors: Sequence[Tensor], ranges: Ranges
) -> list[list[tuple[int, Tensor]]]:
    """Return (first row, rows ``[n, B, H, D]``) of each range of each tensor of one rank."""
    found, begin = [], 0
    for t in tensors:
        shape = (t.shape[0], *t.shape[2:])
        wide = shape[0] * shape[1] * shape[2]
        each = []
        for start, stop in ranges:
            end = begin + (stop - start) * wide
            each.append((start, flat[begin:end].view(stop - start, *shape)))
            begin = end
        found.append(each)
    return found


def _joined(t: Tensor, pieces: list[tuple[int, Tensor]]) -> Tensor:
    """Return ``[B, length, H, D]`` of pieces that together are all rows."""
    if not pieces:
        return t[:, :0]
    rows = [piece for _, piece in sorted(pieces, key=lambda one: one[0])]
    return (torch.cat(rows) if len(rows) > 1 else rows[0]).transpose(0, 1)
