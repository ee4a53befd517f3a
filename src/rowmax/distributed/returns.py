"""Gradients of keys that collectives return to the ranks of the keys, one stage after the other.

While a stage computes, the gradients of the one before are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Wanted
from .calls import ShardedCall
from .collectives import UnderWay
from .exchange import Return
from .layout import Ranges
from .routes import Route


class Returned:
    """The gradients of the keys of a rank: of a stage, sums over calls, then over ranks."""

    def __init__(self, call: ShardedCall, wanted: Wanted, way: Route) -> None:
        self.call, self.way, self.wide = call, way, call.accumulator
        own = call.tensors
        #: the gradients of own rows; a stage writes its heads
        self.found = [
            t.new_empty(t.shape, dtype=self.wide if call.wide else t.dtype)
            for t, want in ((own.k, wanted.k), (own.v, wanted.v))
            if want
        ]
        #: gradients of a stage: of gathered rows, and of own ones that are not gathered
        self.gathered, self.own = self._rows(way.length), self._rows(own.k.shape[1])
        self.returning: _Returning | None = None

    def _rows(self, length: int) -> _RowSums:
        return _RowSums(length, self.wide)

    def places(self, kv: slice, part: int) -> None:
        """Return None: calls return their gradients."""

    def add(self, kv: slice, part: int, found: Sequence[Tensor], under_way: UnderWay) -> None:
        """Add the gradients of a call."""
        one = self.way.parts[part]
        if one.packing is not None:
            wide = [torch.promote_types(t.dtype, torch.float32) for t in found]
            found = [one.packing.sums(t, dtype) for t, dtype in zip(found, wide, strict=True)]
        if one.own is None:
            self.gathered.add(one.gathered, list(found))
        else:
            self.own.add(one.own, list(found))

    def send(self, kv: slice, under_way: UnderWay) -> None:
        """Send the gradients of a stage. Write those of the stage before, which have arrived."""
        if not self.found:
            return
        of_keys = [t[:, :, kv] for t in self.found]
        back = Return(self.gathered.total(of_keys), self.way, self.call.group)
        under_way.append(back.copy)
        own = self.own.held()
        self.gathered, self.own = self._rows(self.gathered.length), self._rows(self.own.length)
        self._receive()
        self.returning = _Returning(of_keys, back, own)

    def _receive(self) -> None:
        """Write the gradients of own rows that a stage returns."""
        if self.returning is None:
            return
        to, back, (rows, found) = self.returning
        ranges, sums = back.wait()
        for n, (total, returned) in enumerate(zip(to, sums, strict=True)):
            _settle(total, ranges, returned, rows, found[n] if found else total[:, :0])
        self.returning = None

    def total(self) -> list[Tensor]:
        """Return the sums of own rows ``[B, n, H, D]``."""
        self._receive()
        return self.found


class _Returning(NamedTuple):
    """The gradients of a stage's keys, on their way."""

    to: list[Tensor]  # the memory for those of own rows
    back: Return
    own: tuple[slice, list[Tensor]]  # gradients of own rows that were not gathered


class _RowSums:
    """The gradients of some rows of keys, and of values, added up over calls."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self.length, self.dtype = length, dtype
        self.sums: list[Tensor] = []
        #: the first call's, until one of all rows comes: sums begin with it, and not with zeros
        self.first: tuple[slice, list[Tensor]] | None = None

    def add(self, rows: slice, found: list[Tensor]) -> None:
        """Add the gradients of a call."""
        if not self.sums and rows == slice(0, self.length):
            self.sums = [t.to(self.dtype) for t in found]
            self._add_first()
        elif self.sums or self.first is not None:
            self.total(found)
            self._add(rows, found)
        else:
            self.first = rows, found

    def total(self, like: list[Tensor]) -> list[Tensor]:
        """Return the sums ``[B, length, H, D]``, of as many tensors as ``like``."""
        if not self.sums:
            sizes = [(t.shape[0], self.length, *t.shape[2:]) for t in like]
            self.sums = [
                t.new_zeros(size, dtype=self.dtype) for t, size in zip(like, sizes, strict=True)
            ]
        self._add_first()
        return self.sums

    def held(self) -> tuple[slice, list[Tensor]]:
        """Return some rows and their sums: no other row has any."""
        if self.sums:
            return slice(0, self.length), self.sums
        return self.first or (slice(0, 0), [])

    def _add_first(self) -> None:
        if self.first is not None:
            self._add(*self.first)
            self.first = None

    def _add(self, rows: slice, found: list[Tensor]) -> None:
        for total, t in zip(self.sums, found, strict=True):
            total[:, rows] += t


def _settle(total: Tensor, ranges: Ranges, returned: Tensor, rows: slice, own: Tensor) -> None:
    """Write the sum of what returned for some ranges of own rows and of ``own`` for ``rows``."""
    if ranges != ((0, total.shape[1]),):
        total[:, : rows.start].zero_()
        total[:, rows].copy_(own)
        total[:, rows.stop :].zero_()
    begin = 0
    for start, stop in ranges:
        t = returned[:, begin : begin + stop - start]
        begin += stop - start
        a, b = max(start, rows.start), min(stop, rows.stop)
        if a < b:
            t[:, a - start : b - start] += own[:, a - rows.start : b - rows.start]
        total[:, start:stop] = t
