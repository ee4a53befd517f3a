"""Gradients of keys, written by each call to the memory of the ranks that hold the keys.

A kernel that takes places (``call.inputs.Places``) writes there itself: over NVLink, while it
computes. Results of other kernels are copied. The sums are those of ``exchange.py``, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.inputs import Places, Wanted
from ..torch_compat import copy_each
from .calls import ShardedCall
from .collectives import UnderWay
from .exchange import words
from .routes import gaps, sight_of, union
from .shared import Region
from .slots import Memory, placed, slots_of


class Pushed:
    """The gradients of the keys of a rank, in its memory: of all calls that see some of them."""

    def __init__(self, call: ShardedCall, wanted: Wanted, region: Region) -> None:
        own, self.rank, self.region = call.tensors, call.group.rank, region
        self.like = [t for t, want in ((own.k, wanted.k), (own.v, wanted.v)) if want]
        self.slots = slots_of(call.queries, call.keys, sight_of(call))
        self.dtype, self.device, self.wide = call.accumulator, own.q.device, call.wide
        self.batch = own.k.shape[0]
        self.widths = [t.shape[2] * t.shape[3] for t in self.like]
        #: the sums of own rows, from before calls if these write some of them
        self.sums = self._new_sums() if self.slots.alone[self.rank] else []
        row = self.batch * sum(self.widths)
        size = max(self.slots.rows) * row * self.dtype.itemsize
        self.shared = size > 0 and self.slots.moves  # else no rank waits for another
        if self.shared:
            region.open(size, meets=False)  # keys are pulled next: ``slots.moves``
            self.memory = region.of(self.rank, self.dtype)
        else:
            self.memory = own.k.new_empty(self.slots.rows[self.rank] * row, dtype=self.dtype)

    def places(self, kv: slice, part: int) -> Places | None:
        """Return the places of dk and dv of a call, of some heads; None if it is to return them."""
        if self.device.type != "cuda" or len(self.like) < 2 or self.dtype != torch.float32:
            return None
        k, v = self.widths
        addresses = self.region.addresses if self.shared else (0,) * len(self.slots.ranks)
        memory = Memory(addresses, self.batch, (k, v))
        tables = self.slots.places(self.rank, part, memory, self.device)
        columns = [kv.start * t.shape[3] for t in self.like]
        lowest = self.memory
        if self.shared:
            lowest = self.region.of(memory.lowest, self.dtype)
        return placed(lowest, tables, columns, [t.view(-1) for t in self.sums])

    def add(self, kv: slice, part: int, found: Sequence[Tensor], under_way: UnderWay) -> None:
        """Copy the gradients of a call, ``[B, keys, h, D]``, to the slots of some heads."""
        if not found:
            return  # the kernel has written them
        for slot in self.slots.alone_of_call(self.rank, part):
            for to, t in zip(self.sums, found, strict=True):
                to[:, slice(*slot.rows), kv] = t[:, slice(*slot.keys)]
        copies: list[tuple[Tensor, Tensor]] = []
        for rank, slot in self.slots.of_call(self.rank, part):
            for to, t in zip(self._of(rank), found, strict=True):
                start, stop = slot.keys
                into = to[slot.first : slot.first + stop - start, :, kv]
                into, given = words(into, t.transpose(0, 1)[start:stop])
                copies.append((into, given))
        if self.shared:
            under_way.append(self.region.push(copies))
        else:
            copy_each([to for to, _ in copies], [t for _, t in copies])

    def send(self, kv: slice, under_way: UnderWay) -> None:
        """Do nothing: each call has written its gradients."""

    def total(self) -> list[Tensor]:
        """Return the sums of own rows ``[B, n, H, D]``."""
        if self.shared:
            self.region.show()
        table = self.slots.summands(self.rank, self.device)
        found = self.sums or self._new_sums()
        for memory, total in zip(self._of(self.rank), found, strict=True):
            if not (self.device.type == "cuda" and _by_kernel(memory, table, total)):
                self._add(memory, total)
        return found

    def _new_sums(self) -> list[Tensor]:
        each = [self.dtype if self.wide else t.dtype for t in self.like]
        return [t.new_empty(t.shape, dtype=dtype) for t, dtype in zip(self.like, each, strict=True)]

    def _of(self, rank: int) -> list[Tensor]:
        """Return the memory of a rank for dk, and for dv, ``[rows, B, H, D]``."""
        flat = self.region.of(rank, self.dtype) if self.shared else self.memory
        found, begin = [], 0
        for t, width in zip(self.like, self.widths, strict=True):
            end = begin + self.slots.rows[rank] * self.batch * width
            found.append(flat[begin:end].view(-1, self.batch, *t.shape[2:]))
            begin = end
        return found

    def _add(self, memory: Tensor, total: Tensor) -> None:
        """Write the sums, as a kernel does."""
        rows = memory.new_zeros((total.shape[1], *memory.shape[1:]))
        for group in self.slots.groups[self.rank]:
            part = torch.zeros_like(rows)
            for slot in group:
                (start, stop), first = slot.rows, slot.first
                part[start:stop] += memory[first : first + stop - start]
            rows += part
            del part  # before the next one
        alone = [slot.rows for slot in self.slots.alone[self.rank]]
        for start, stop in gaps((0, total.shape[1]), union(alone)):
            total[:, start:stop] = rows[start:stop].transpose(0, 1)


def _by_kernel(memory: Tensor, table: Tensor, total: Tensor) -> bool:
    """Write the sums in one launch; return False without Triton."""
    try:
        from ..gpu.slot_sums import sum_slots
    except ImportError:
        return False
    sum_slots(memory, table, total)
    return True
