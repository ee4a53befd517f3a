"""Forwards that begin before their keys have arrived, and wait for them tile by tile.

Where a kernel takes a gap between queries, both chunks of a rank are one call (``joined_of``).

Copies of keys come in the order in which a kernel reads these, and are counted once they are done
(``rules/arrivals.py``): each of the first head, then those of a head together. So a call needs no
stages, and waits for almost nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.dispatch import takes_arrivals, takes_gap
from ..call.inputs import Arrivals
from ..call.problem import problem_of
from ..rules.arrivals import Landing, table
from ..torch_compat import moved, store_on_stream
from .calls import ShardedCall
from .layout import Layout
from .moves import Move, moves_of
from .offsets import captured
from .pieces import Packing, Sight
from .routes import Part, joined, route, sight_of
from .shared import shares_memory

#: bytes that one copy moves, at most: 48 us over NVLink
MOST_BYTES = 16 << 20
#: the bytes of a head in the mean copy from which on heads arrive one after the other. A kernel
#: reads them so, but more copies take longer: 2 us each
LEAST_BYTES = 1 << 20
#: Without a causal mask all ranks read the last keys first, and copies of one order have one
#: source. That is as fast as tiles need them if kv heads, times the ranks past two, are fewer:
#: 132 tiles of 128 queries compute while 340 GB/s arrive, at 1820 operations a byte
FEW_HEADS = 9


class Copy(NamedTuple):
    """Rows of one kv head, or of all heads (None)."""

    head: int | None
    move: Move


class Ordered:
    """The copies of a rank in the order in which they are done.

    Args:
        copies: those of first calls come first, then heads one after the other.
        steps: the numbers of copies after which they are counted.
        tables: by call, what its tiles wait for.
    """

    def __init__(
        self, copies: Sequence[Copy], steps: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> None:
        self.copies, self.steps, self.tables = tuple(copies), tuple(steps), tables
        self._on: dict[tuple[int, torch.device], Tensor] = {}

    def arrivals(self, part: int, count: Tensor) -> Arrivals | None:
        """Return what a call waits for, or None if nothing arrives for it."""
        key = part, count.device
        if key not in self._on:
            if not any(self.tables[part][1:]):
                return None
            with torch.inference_mode(False):
                numbers = torch.tensor(self.tables[part], dtype=torch.int32)
                self._on[key] = moved(numbers, count.device)
        return Arrivals(count, self._on[key])


_known: dict[Hashable, bool] = {}
_MOST = 1024


def arrives(call: ShardedCall) -> bool:
    """Return True if kernels of the forward can wait for keys; ranks of one kind of GPU agree."""
    q = call.tensors[0]
    # ``whole`` has no boolean mask
    if call.mask_rows != "none" or not (q.is_cuda and shares_memory(call.group, q.device)):
        return False

    def takes() -> bool:
        problem = problem_of(call.whole(), call.options)
        return store_on_stream() is not None and takes_arrivals(problem, call.options.backend)

    return _kept((), call, takes)


def joined_of(call: ShardedCall) -> Part | None:
    """Return the call of both chunks of this rank, or None: then each chunk is one.

    Its kernels can wait for keys (``arrives``). A call in a graph is the same one, whose tables the
    device then has.
    """
    q, rank = call.tensors.q, call.group.rank
    part = joined(call.queries, call.keys, sight_of(call), rank)
    if part is None or call.bias_rows != "none":
        return None

    def takes() -> bool:
        n, nk = q.shape[1], part.j.stop - part.j.start
        whole = problem_of(call.whole(), call.options)
        problem = whole._replace(nq=n, total_q=n, nk=nk, total_k=nk, gap=part.gap)
        return takes_gap(problem, call.options.backend)

    return part if _kept((call.queries, call.keys, rank), call, takes) else None


def _kept(more: Hashable, call: ShardedCall, find: Callable[[], bool]) -> bool:
    """Return what was found for a call like this one before."""
    q, k, v = call.tensors[:3]
    given = tuple(t is not None for t in call.tensors)
    key = (more, call.options, q.device, q.dtype, call.queries.n, call.keys.n, q.shape, given)
    key = (*key, k.shape[2:], v.shape[2:])
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[key] = find()
    return found


def may_count(device: torch.device) -> bool:
    """Return True if a stream can count copies now.

    A graph has no order between its branches: a kernel that waits might keep them from running.
    """
    return device.type == "cuda" and not captured()


@lru_cache(maxsize=256)
def come_by_heads(queries: Layout, keys: Layout, sight: Sight, heads: int, row: int) -> bool:
    """Return True if heads arrive one after the other: the same on every rank.

    Args:
        heads: the number of kv heads.
        row: bytes of a row of k and v of one head, of all sequences.
    """
    each = [moves_of(queries, keys, sight, rank) for rank in range(keys.ranks)]
    rows = [move.rows for moves in each for move in moves.first + moves.later]
    return not sight.documents and heads > 1 and row * sum(rows) >= LEAST_BYTES * max(1, len(rows))


@lru_cache(maxsize=256)
def ordered(
    queries: Layout,
    keys: Layout,
    sight: Sight,
    rank: int,
    heads: int,
    row: int,
    in_place: bool = False,
    one: bool = False,
) -> Ordered:
    """Return the copies of a rank (``come_by_heads``); ``one``: for the call of both chunks.

    A kernel reads the last keys of its queries first; of packed pieces, those of most pairs.
    """
    by_heads = come_by_heads(queries, keys, sight, heads, row)
    way, moves = route(queries, keys, sight, rank), moves_of(queries, keys, sight, rank, in_place)
    most = max(1, MOST_BYTES // (row if by_heads else row * heads))
    both = (moves.first + moves.later,) if one else (moves.first, moves.later)
    each = [[piece for move in some for piece in _cut(move, most)] for some in both]
    packing = way.parts[0].packing if way.parts else None
    for some in each:
        if packing is not None:
            some.sort(key=lambda move: (*_order(packing, move.to), -move.to))
        elif sight.right is not None or (not by_heads and heads * (keys.ranks - 2) < FEW_HEADS):
            some.sort(key=lambda move: -move.to)
    names = range(heads) if by_heads else (None,)
    copies = [Copy(head, move) for some in each for head in names for move in some]
    steps = _steps(copies)
    landings: list[list[Landing]] = [[] for _ in names]
    for count, (head, move) in enumerate(copies, 1):
        number = steps[bisect_left(steps, count)]
        landings[head or 0].append(Landing(number, move.to, move.to + move.rows))
    parts = way.parts[-1:] if one else way.parts
    tables = [table(landings, *_keys_of(part, moves.arriving)) for part in parts]
    return Ordered(copies, steps, tables)


def _steps(copies: Sequence[Copy]) -> list[int]:
    """Return after how many copies they are counted: each of the first head, then once a head.

    A count takes 5 us of the copies (two H200s).
    """
    heads = [head for head, _ in copies]
    last = [n for n, head in enumerate(heads, 1) if n == len(heads) or heads[n] != head]
    return [*range(1, last[0]), *last] if last else []


def _cut(move: Move, most: int) -> list[Move]:
    """Return the copies of a move, the last rows first."""
    starts = range(0, move.rows, most)
    return [
        move._replace(
            to=move.to + start, origin=move.origin + start, rows=min(most, move.rows - start)
        )
        for start in reversed(starts)
    ]


def _order(packing: Packing, row: int) -> tuple[int, int]:
    """Return what a kernel orders the piece of a packed key by (``gpu/hopper/packed.py``)."""
    for queries, length in zip(packing.lengths_q, packing.lengths, strict=True):
        if row < length:
            return -queries * length, -queries
        row -= length
    return 0, 0


def _keys_of(part: Part, arriving: int) -> tuple[int, int]:
    """Return the rows of memory from the first key of a call to after the last."""
    if part.own is not None:
        return 0, 0
    return (part.gathered.start, part.gathered.stop) if part.packing is None else (0, arriving)
