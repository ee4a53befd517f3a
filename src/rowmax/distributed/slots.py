"""Slots: memory of a rank for the gradients of its keys, one slot for each call that sees some.

Calls of all ranks write their parts of the sums there, so nothing waits for a copy of them. The
rank adds its slots in a fixed order: that of a gather and a return of gradients (``exchange.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Places
from ..torch_compat import moved
from .exchange import others_of
from .layout import Layout, Ranges
from .pieces import Sight, pieces_of
from .routes import common, gaps, route, rows_of, union

UNIT = 4  # numbers: places are multiples of so many
ALONE = -2  # marks rows that no sum is for


class Slot(NamedTuple):
    """Keys of one call that one rank holds."""

    source: int  # the rank of the call
    part: int  # the call, of those of its rank
    keys: tuple[int, int]  # as keys of the call
    rows: tuple[int, int]  # as rows of the rank that holds them
    first: int  # the first row in the memory of that rank


class Seen(NamedTuple):
    """Keys of one call, one after the other: positions of the whole."""

    part: int
    first: int  # the first one, as a key of the call
    positions: tuple[int, int]
    own: bool  # the call reads rows of its rank alone, where they are


class Memory(NamedTuple):
    """The memory of all ranks, as addresses, for the gradients of k and v of these sizes."""

    addresses: tuple[int, ...]
    batch: int
    rows: tuple[int, int]  # numbers of a row of k, and of v

    @property
    def lowest(self) -> int:
        """The rank whose memory comes first in the addresses of this one."""
        return self.addresses.index(min(self.addresses))


class Slots:
    """The slots of the ranks of a call.

    Args:
        groups: by rank that holds the keys, then by group, of one source. A rank adds the slots of
            a group, then the sums of groups.
        alone: by rank, keys that only one call sees, and that of their own rank. They are no parts
            of sums, and have no memory: their ``first`` is a row of the rank.
        lengths: the number of keys of each rank.
        parts: the number of keys of each call of each rank.
    """

    def __init__(
        self,
        groups: tuple[tuple[tuple[Slot, ...], ...], ...],
        alone: tuple[tuple[Slot, ...], ...],
        lengths: Sequence[int],
        parts: tuple[tuple[int, ...], ...],
    ) -> None:
        self.groups, self.alone, self.lengths, self.parts = groups, alone, lengths, parts
        self.rows = [sum(_length(slot) for each in one for slot in each) for one in groups]
        #: a rank writes to the memory of another
        self.moves = any(self.sent(source, rank) for source in self.ranks for rank in self.ranks)
        self._of_call: dict[tuple[int, int], list[tuple[int, Slot]]] = {}
        for rank, one in enumerate(groups):
            for slot in (slot for each in one for slot in each):
                self._of_call.setdefault((slot.source, slot.part), []).append((rank, slot))
        self._summands: dict[tuple[int, torch.device], Tensor] = {}
        self._places: dict[tuple[int, int, Memory, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(len(self.groups))

    def sent(self, source: int, rank: int) -> int:
        """Return how many rows one rank writes to the memory of another."""
        if source == rank:
            return 0
        groups = (each for each in self.groups[rank] if each[0].source == source)
        return sum(_length(slot) for each in groups for slot in each)

    def rows_of_others(self, rank: int) -> tuple[int, int]:
        """Return how many rows a rank writes to the memory of others, and they to its own."""
        sent = sum(self.sent(rank, other) for other in self.ranks)
        return sent, sum(self.sent(other, rank) for other in self.ranks)

    def of_call(self, source: int, part: int) -> list[tuple[int, Slot]]:
        """Return the slots of a call, each with the rank that holds its keys."""
        return self._of_call.get((source, part), [])

    def alone_of_call(self, source: int, part: int) -> list[Slot]:
        """Return the keys of a call that no other sees, of its own rank."""
        return [slot for slot in self.alone[source] if slot.part == part]

    def summands(self, rank: int, device: torch.device) -> Tensor:
        """Return the rows of memory that are added for each own row, int32 [groups, most, n].

        -1 is none, and -2 in the first one a row that stays as it is.
        """
        key = rank, device
        if key not in self._summands:
            n = self.lengths[rank]
            each = [_levels(group, n) for group in self.groups[rank]]
            most = max(map(len, each), default=0)
            size = (max(1, len(each)), max(1, most)) if self.alone[rank] else (len(each), most)
            table = torch.full((*size, n), -1, dtype=torch.int32)
            for to, levels in zip(table, each, strict=False):
                to[: len(levels)] = torch.stack(levels)
            for slot in self.alone[rank]:
                table[0, 0, slice(*slot.rows)] = ALONE
            self._summands[key] = _kept(table, device)
        return self._summands[key]

    def places(
        self, source: int, part: int, memory: Memory, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return where the rows of dk and dv of a call go (``Places``), from the lowest memory on.

        So no place is below 0, but those of rows that are alone, in tensors ``[B, n, H, D]``.
        """
        key = source, part, memory, device
        if key not in self._places:
            size = memory.batch, self.parts[source][part]
            tables = [torch.zeros(size, dtype=torch.int64) for _ in "kv"]
            sequences = torch.arange(memory.batch)[:, None]
            for rank, slot in self.of_call(source, part):
                begin = (memory.addresses[rank] - min(memory.addresses)) // (4 * UNIT)
                rows = slot.first + torch.arange(_length(slot))
                for table, row in zip(tables, memory.rows, strict=True):
                    table[:, slice(*slot.keys)] = begin + (
                        (rows * memory.batch + sequences) * row // UNIT
                    )
                    begin += self.rows[rank] * memory.batch * row // UNIT
            for slot in self.alone_of_call(source, part):
                rows = slot.first + torch.arange(_length(slot))
                for table, row in zip(tables, memory.rows, strict=True):
                    at = (sequences * self.lengths[source] + rows) * row // UNIT
                    table[:, slice(*slot.keys)] = -1 - at
            k, v = (_kept(table.view(-1), device) for table in tables)
            self._places[key] = k, v
        return self._places[key]


def placed(
    memory: Tensor,
    tables: tuple[Tensor, Tensor],
    columns: Sequence[int],
    alone: Sequence[Tensor],
) -> Places:
    """Return places in memory, and in flat memory for rows that are alone; both from these columns.

    ``alone`` is empty, or of dk and of dv.
    """
    k, v = (memory[column:] for column in columns)
    return Places(k, v, *tables, *(t[n:] for t, n in zip(alone, columns, strict=bool(alone))))


@lru_cache(maxsize=256)
def slots_of(queries: Layout, keys: Layout, sight: Sight) -> Slots:
    """Return the slots of a call."""
    seen = [_seen(queries, keys, sight, rank) for rank in range(queries.ranks)]
    found, alone = [], []
    for rank, owned in enumerate(keys.owned):
        order = [(source, False) for source in (rank, *others_of(rank, keys.ranks))]
        groups = []
        for source, own in (*order, (rank, True)):
            group = []
            for one in seen[source]:
                if one.own != own:
                    continue
                ranges: Ranges = common((one.positions,), owned)
                for (start, stop), rows in zip(ranges, rows_of(ranges, owned), strict=True):
                    begin = one.first + start - one.positions[0]
                    group.append(Slot(source, one.part, (begin, begin + stop - start), rows, 0))
            groups.append(group)
        single = _single([slot for group in groups for slot in group], keys.lengths[rank])
        summed, mine = _without(groups, rank, single)
        found.append(summed)
        alone.append(mine)
    parts = tuple(_parts(queries, keys, sight, rank) for rank in range(queries.ranks))
    return Slots(tuple(found), tuple(alone), keys.lengths, parts)


def _single(slots: Sequence[Slot], n: int) -> Ranges:
    """Return the rows, of n, that one slot alone has."""
    steps = Counter(slot.rows[0] for slot in slots)
    steps.subtract(slot.rows[1] for slot in slots)
    found, count = [], 0
    for start, stop in pairwise(sorted({0, n, *steps})):
        count += steps[start]
        if count == 1:
            found.append((start, stop))
    return union(found)


def _without(
    groups: Sequence[Sequence[Slot]], rank: int, single: Ranges
) -> tuple[tuple[tuple[Slot, ...], ...], tuple[Slot, ...]]:
    """Return the groups without single rows of calls of their own rank, and these."""
    found, alone, first = [], [], 0
    for group in groups:
        kept = []
        for slot in group:
            mine = common((slot.rows,), single) if slot.source == rank else ()
            alone += [_some(slot, rows, rows[0]) for rows in mine]
            for rows in gaps(slot.rows, mine):
                kept.append(_some(slot, rows, first))
                first += rows[1] - rows[0]
        if kept:
            found.append(tuple(kept))
    return tuple(found), tuple(alone)


def _some(slot: Slot, rows: tuple[int, int], first: int) -> Slot:
    """Return some rows of a slot, at a place of their own."""
    begin = slot.keys[0] + rows[0] - slot.rows[0]
    return slot._replace(keys=(begin, begin + rows[1] - rows[0]), rows=rows, first=first)


def _parts(queries: Layout, keys: Layout, sight: Sight, rank: int) -> tuple[int, ...]:
    """Return the number of keys of each call of a rank."""
    return tuple(
        part.packing.rows if part.packing is not None else part.j.stop - part.j.start
        for part in route(queries, keys, sight, rank).parts
    )


def _seen(queries: Layout, keys: Layout, sight: Sight, rank: int) -> list[Seen]:
    """Return the keys of the calls of a rank. Pieces come in the order of their sums."""
    found = []
    for n, part in enumerate(route(queries, keys, sight, rank).parts):
        if part.packing is None:
            found.append(Seen(n, 0, (part.j.start, part.j.stop), part.own is not None))
            continue
        each, end = [], 0
        for piece in pieces_of(queries, sight, rank):
            each.append(Seen(n, end, (piece.keys.start, piece.keys.stop), False))
            end += len(piece.keys)
        found += reversed(each)
    return found


def _levels(group: Sequence[Slot], n: int) -> list[Tensor]:
    """Return the rows of memory of a group that belong to each of n rows: the first, the second."""
    levels: list[Tensor] = []
    counts = torch.zeros(n, dtype=torch.int32)
    for slot in group:
        here = slice(*slot.rows)
        held, memory = counts[here].clone(), slot.first + torch.arange(_length(slot))
        for level in range(int(held.max()) + 1):
            if level == len(levels):
                levels.append(torch.full((n,), -1, dtype=torch.int32))
            at = held == level
            levels[level][here][at] = memory[at].int()
        counts[here] += 1
    return levels


def _length(slot: Slot) -> int:
    return slot.keys[1] - slot.keys[0]


def _kept(table: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return moved(table, device)
