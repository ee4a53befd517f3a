"""Pieces: the rows of a rank within one document. All pieces of a rank are one packed call.

A piece sees keys of its document alone. Under a causal mask they end where the piece ends, so a
packed call aligns the piece as one device does. The keys of pieces overlap: the packed call reads a
copy of them, and their gradients are added in a fixed order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_compat import moved
from .layout import Layout
from .offsets import parsed

#: keys of a packed call for each key that a rank needs: past it, copies take too much memory
MOST = 4


class Sight(NamedTuple):
    """The limits of a mask that the host knows: those of ``rules.band.any_range``, and documents.

    With documents a rank has one call, whose sequences are its pieces.
    """

    left: int | None
    right: int | None
    documents: str = ""


class Piece(NamedTuple):
    """Queries of one document on one rank, and the keys that they may see, as positions."""

    queries: range
    keys: range


@lru_cache(maxsize=256)
def pieces_of(layout: Layout, sight: Sight, rank: int) -> tuple[Piece, ...]:
    """Return the pieces of a rank, in the order of its rows.

    The band is aligned to the ends of pieces: ``right`` is None, then without ``left``, or at most
    0.
    """
    left, right, documents = sight
    cu, found = parsed(documents), []
    for chunk in layout.chunks(rank):
        start, document = chunk.start, bisect_right(cu, chunk.start) - 1
        while start < chunk.stop:
            begin, end = cu[document], cu[document + 1]
            stop = min(chunk.stop, end)
            if right is not None:
                begin = begin if left is None else min(max(begin, start - left), stop)
                end = stop
            if start < stop:
                found.append(Piece(range(start, stop), range(begin, end)))
            start, document = max(start, stop), document + 1
    return tuple(found)


@lru_cache(maxsize=256)
def few_copies(layout: Layout, sight: Sight) -> bool:
    """Return True if the keys of all pieces are few enough to copy, on every rank.

    Chunks of 512 of a document of 128k tokens would be 128 copies of its first rows.
    """
    every = needed = 0
    for rank in range(layout.ranks):
        pieces = pieces_of(layout, sight, rank)
        rows = end = 0
        for _, keys in pieces:
            rows += max(0, keys.stop - max(end, keys.start))
            end = max(end, keys.stop)
        every, needed = max(every, sum(len(one.keys) for one in pieces)), max(needed, rows)
    return every <= MOST * needed


class Tables(NamedTuple):
    """A packing on a device."""

    cu_q: Tensor  # int32 [pieces + 1]
    cu_k: Tensor
    rows: Tensor  # int64 [T], the gathered row of each packed key
    #: for each level the packed rows, and the gathered ones that they are
    levels: tuple[tuple[Tensor, Tensor], ...]


class Packing:
    """The packed call of a rank's pieces.

    Args:
        pieces: in the order of own rows.
        starts: the first key of each, as a row of the gathered ones.
        length: the number of gathered rows.
    """

    def __init__(self, pieces: Sequence[Piece], starts: Sequence[int], length: int) -> None:
        self.starts, self.length = tuple(starts), length
        self.lengths_q = [len(one.queries) for one in pieces]
        self.lengths = [len(one.keys) for one in pieces]
        self.longest = max(self.lengths_q), max(self.lengths)
        self.rows = sum(self.lengths)
        self.levels = _levels(self.starts, self.lengths)
        #: the first level has each gathered row once
        self.complete = sum(self.lengths[n] for n in self.levels[0]) == length
        #: rows that are copied: none if the packed ones are the gathered ones
        self.copied = 0 if self.complete and len(self.levels) == 1 else self.rows
        self._tables: dict[torch.device, Tables] = {}

    def on(self, device: torch.device) -> Tables:
        """Return the tables on a device, made once."""
        found = self._tables.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = self._tables[device] = self._made(device)
        return found

    def _made(self, device: torch.device) -> Tables:
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32)
            for each in (self.lengths_q, self.lengths)
        )
        lengths = torch.tensor(self.lengths)
        begins = cu_k[:-1].long()
        shift = torch.tensor(self.starts) - begins
        rows = torch.arange(self.rows) + shift.repeat_interleave(lengths)
        levels = []
        for numbers in self.levels if self.copied else ():
            at = torch.tensor(numbers)
            sizes = lengths[at]
            ends = sizes.cumsum(0)
            packed = torch.arange(int(ends[-1])) + (begins[at] - ends + sizes).repeat_interleave(
                sizes
            )
            levels.append((moved(packed, device), moved(rows[packed], device)))
        cu_q, cu_k, rows = (moved(t, device) for t in (cu_q, cu_k, rows))
        return Tables(cu_q, cu_k, rows, tuple(levels))

    def packed(self, gathered: Tensor) -> Tensor:
        """Return the keys of all pieces, ``[1, T, H, D]``, of gathered rows."""
        if not self.copied:
            return gathered
        return gathered[0].index_select(0, self.on(gathered.device).rows)[None]

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (first packed row, start, stop) of each piece of a range of gathered rows."""
        found, begin = [], 0
        for first, length in zip(self.starts, self.lengths, strict=True):
            a, b = max(start, first), min(stop, first + length)
            if a < b:
                found.append((begin + a - first, a, b))
            begin += length
        return found

    def sums(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradients of gathered rows, of those of packed ones.

        Levels are added one after the other. No level has a row twice, so the order is fixed.
        """
        rows, levels = gradient[0], self.on(gradient.device).levels
        if not levels:
            return gradient.to(dtype)
        if self.complete:
            total, levels = rows.index_select(0, levels[0][0]).to(dtype), levels[1:]
        else:
            total = rows.new_zeros((self.length, *rows.shape[1:]), dtype=dtype)
        for packed, gathered in levels:
            total.index_add_(0, gathered, rows.index_select(0, packed).to(dtype))
        return total[None]


def _levels(starts: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of pieces in levels: the keys of one level do not overlap.

    The last piece of a document sees most keys, so it is of the first level.
    """
    begins: list[int] = []  # where the keys of each level begin, so far
    levels: list[list[int]] = []
    for n in range(len(starts) - 1, -1, -1):
        if not lengths[n]:
            continue
        end = starts[n] + lengths[n]
        level = next((x for x, begin in enumerate(begins) if end <= begin), len(levels))
        if level == len(levels):
            levels.append([])
            begins.append(0)
        levels[level].append(n)
        begins[level] = starts[n]
    return tuple(tuple(reversed(level)) for level in levels) or ((),)
