"""Slots: memory of a rank for the gradients of its keys, one slot for each call that sees some.

Calls of all ranks write their parts of the sums there, so nothing waits for a copy of them. The
rank adds its slots in a fixed order: that of a gather and a return of gradients (``exchange.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Places
from .exchange import others_of
from .layout import Layout, Ranges
from .offsets import moved
from .pieces import pieces_of
from .routes import Sight, common, route, rows_of

UNIT = 4  # numbers: places are multiples of so many


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


class Slots:
    """The slots of the ranks of a call.

    Args:
        groups: by rank that holds the keys, then by group. A rank adds the slots of a group, then
            the sums of groups.
        lengths: the number of keys of each rank.
        parts: the number of keys of each call of each rank.
    """

    def __init__(
        self,
        groups: tuple[tuple[tuple[Slot, ...], ...], ...],
        lengths: Sequence[int],
        parts: tuple[tuple[int, ...], ...],
    ) -> None:
        self.groups, self.lengths, self.parts = groups, lengths, parts
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
        return sum(_length(slot) for each in self.groups[rank] for slot in _of(each, source))

    def rows_of_others(self, rank: int) -> tuple[int, int]:
        """Return how many rows a rank writes to the memory of others, and they to its own."""
        sent, received = (
            sum(self.sent(*ends) for ends in each)
            for each in (
                [(rank, other) for other in self.ranks],
                [(other, rank) for other in self.ranks],
            )
        )
        return sent, received

    def of_call(self, source: int, part: int) -> list[tuple[int, Slot]]:
        """Return the slots of a call, each with the rank that holds its keys."""
        return self._of_call.get((source, part), [])

    def summands(self, rank: int, device: torch.device) -> Tensor:
        """Return the rows of memory that are added for each own row, int32 [groups, most, n].

        -1 is none.
        """
        key = rank, device
        if key not in self._summands:
            n = self.lengths[rank]
            each = [_levels(group, n) for group in self.groups[rank]]
            most = max(map(len, each), default=0)
            table = torch.full((len(each), most, n), -1, dtype=torch.int32)
            for to, levels in zip(table, each, strict=True):
                to[: len(levels)] = torch.stack(levels)
            self._summands[key] = _kept(table, device)
        return self._summands[key]

    def places(
        self, source: int, part: int, memory: Memory, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return where the rows of dk and dv of a call go (``Places``), from the own memory on."""
        key = source, part, memory, device
        if key not in self._places:
            size = memory.batch, self.parts[source][part]
            tables = [torch.zeros(size, dtype=torch.int64) for _ in "kv"]
            sequences = torch.arange(memory.batch)[:, None]
            for rank, slot in self.of_call(source, part):
                begin = (memory.addresses[rank] - memory.addresses[source]) // (4 * UNIT)
                rows = slot.first + torch.arange(_length(slot))
                for table, row in zip(tables, memory.rows, strict=True):
                    table[:, slice(*slot.keys)] = begin + (
                        (rows * memory.batch + sequences) * row // UNIT
                    )
                    begin += self.rows[rank] * memory.batch * row // UNIT
            k, v = (_kept(table.view(-1), device) for table in tables)
            self._places[key] = k, v
        return self._places[key]


def placed(memory: Tensor, tables: tuple[Tensor, Tensor], columns: tuple[int, int]) -> Places:
    """Return places in memory, from these columns of rows on."""
    k, v = (memory[column:] for column in columns)
    return Places(k, v, *tables)


@lru_cache(maxsize=256)
def slots_of(queries: Layout, keys: Layout, sight: Sight) -> Slots:
    """Return the slots of a call."""
    seen = [_seen(queries, keys, sight, rank) for rank in range(queries.ranks)]
    found = []
    for rank, owned in enumerate(keys.owned):
        order = [(source, False) for source in (rank, *others_of(rank, keys.ranks))]
        first, groups = 0, []
        for source, own in (*order, (rank, True)):
            group = []
            for one in seen[source]:
                if one.own != own:
                    continue
                ranges: Ranges = common((one.positions,), owned)
                for (start, stop), rows in zip(ranges, rows_of(ranges, owned), strict=True):
                    begin = one.first + start - one.positions[0]
                    slot = Slot(source, one.part, (begin, begin + stop - start), rows, first)
                    group.append(slot)
                    first += stop - start
            if group:
                groups.append(tuple(group))
        found.append(tuple(groups))
    parts = tuple(_parts(queries, keys, sight, rank) for rank in range(queries.ranks))
    return Slots(tuple(found), keys.lengths, parts)


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
        pieces, end = pieces_of(queries, sight.documents, sight.left, sight.right, rank), 0
        each = []
        for piece in pieces:
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


def _of(group: Sequence[Slot], source: int) -> Sequence[Slot]:
    """Return the slots of a source: a group has one."""
    return group if group[0].source == source else ()


def _length(slot: Slot) -> int:
    return slot.keys[1] - slot.keys[0]


def _kept(table: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return moved(table, device)
