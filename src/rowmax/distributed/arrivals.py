"""Forwards that begin before their keys have arrived, and wait for them tile by tile.

Copies of keys come in the order in which a kernel reads these, and a count of those that are done
follows each (``rules/arrivals.py``). So a call needs no stages, and waits for almost nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..call.dispatch import takes_arrivals
from ..call.inputs import Arrivals
from ..call.problem import problem_of
from ..rules.arrivals import needed
from ..torch_compat import store_on_stream
from .calls import ShardedCall
from .layout import Layout
from .moves import Move, moves_of
from .offsets import captured, moved
from .pieces import Packing
from .routes import Part, Sight, route
from .shared import shares_memory

#: bytes of the rows of k that one copy moves, at most: 48 us over NVLink
MOST_BYTES = 16 << 20
#: Without a causal mask all ranks read the last keys first, and copies of one order have one
#: source. That is as fast as tiles need them if kv heads of a batch, times the ranks past two, are
#: fewer: 132 tiles of 128 queries compute while 340 GB/s arrive, at 1820 operations a byte
FEW_HEADS = 9


class Ordered:
    """The copies of a rank in the order in which they are done.

    Args:
        moves: the copies.
        tables: by call, what its tiles wait for.
    """

    def __init__(self, moves: Sequence[Move], tables: Sequence[Sequence[int]]) -> None:
        self.moves, self.tables = tuple(moves), tables
        self._on: dict[tuple[int, torch.device], Tensor] = {}

    def arrivals(self, part: int, count: Tensor) -> Arrivals | None:
        """Return what a call waits for, or None if nothing arrives for it."""
        key = part, count.device
        if key not in self._on:
            if not any(self.tables[part]):
                return None
            with torch.inference_mode(False):
                table = torch.tensor(self.tables[part], dtype=torch.int32)
                self._on[key] = moved(table, count.device)
        return Arrivals(count, self._on[key])


_known: dict[Hashable, bool] = {}
_MOST = 1024


def arrives(call: ShardedCall) -> bool:
    """Return True if kernels of the forward can wait for keys; ranks of one kind of GPU agree."""
    q, k, v = call.tensors[:3]
    if not (q.is_cuda and shares_memory(call.group, q.device)):
        return False
    given = tuple(t is not None for t in call.tensors)
    key = (call.options, q.device, q.dtype, call.queries.n, call.keys.n, q.shape, given)
    key = (*key, k.shape[2:], v.shape[2:])
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        problem = problem_of(call.whole(), call.options)
        found = store_on_stream() is not None and takes_arrivals(problem, call.options.backend)
        _known[key] = found
    return found


def may_count(device: torch.device) -> bool:
    """Return True if a stream can count copies now.

    A graph has no order between its branches: a kernel that waits might keep them from running.
    """
    return device.type == "cuda" and not captured()


@lru_cache(maxsize=256)
def ordered(
    queries: Layout, keys: Layout, sight: Sight, rank: int, heads: int, most: int
) -> Ordered:
    """Return the copies of a rank, of at most so many rows each.

    A kernel reads the last keys of its queries first; of packed pieces, those of most queries come
    first. ``heads`` are the kv heads of all sequences.
    """
    way, moves = route(queries, keys, sight, rank), moves_of(queries, keys, sight, rank)
    packing = way.parts[0].packing if way.parts else None
    found = [
        (late, piece)
        for late, each in enumerate((moves.first, moves.later))
        for move in each
        for piece in _cut(move, most)
    ]
    if packing is not None:
        found.sort(key=lambda one: (-_queries_at(packing, one[1].to), -one[1].to))
    elif sight.right is not None or heads * (keys.ranks - 2) < FEW_HEADS:
        found.sort(key=lambda one: (one[0], -one[1].to))
    found = [piece for _, piece in found]
    rows = [(move.to, move.to + move.rows) for move in found]
    tables = [needed(rows, *_keys_of(part, moves.arriving)) for part in way.parts]
    return Ordered(found, tables)


def _cut(move: Move, most: int) -> list[Move]:
    """Return the copies of a move, the last rows first."""
    starts = range(0, move.rows, most)
    return [
        move._replace(
            to=move.to + start, origin=move.origin + start, rows=min(most, move.rows - start)
        )
        for start in reversed(starts)
    ]


def _queries_at(packing: Packing, row: int) -> int:
    """Return the queries of the piece with a packed key."""
    for queries, length in zip(packing.lengths_q, packing.lengths, strict=True):
        if row < length:
            return queries
        row -= length
    return 0


def _keys_of(part: Part, arriving: int) -> tuple[int, int]:
    """Return the rows of memory from the first key of a call to after the last."""
    if part.own is not None:
        return 0, 0
    return (part.gathered.start, part.gathered.stop) if part.packing is None else (0, arriving)
