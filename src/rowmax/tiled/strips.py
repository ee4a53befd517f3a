"""The tiles of a call, in portions.

A strip is a block of query rows of some sequences and some kv heads, with the key tiles that
any of these rows sees. The query heads of a kv head are folded into the rows, so that k and v
are never repeated: a strip's scores are ``[heads, group * rows, cols]``, where ``heads`` counts
the kv heads of all its sequences.

Memory: for any problem the scores of a tile are at most ``Sizes.tile`` numbers of the accumulator.
Where the group of one kv head by ``Sizes.cols`` is more, that is the limit. A forward holds at most
four arrays of this size at a time, a backward six; drawing dropout's mask takes some ten more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, overload

from torch import Tensor

from ..call.inputs import Gradients, Tangents, part_of
from ..call.problem import Problem, Tensors, each_sequence
from ..rules import band, mask


class Sizes(NamedTuple):
    """Sizes of tiles."""

    rows: int  # rows of one kv head, with its whole group
    cols: int  # more where there are fewer rows
    tile: int  # numbers in a tile, all heads together


#: on a CPU a tile fits in the cache; elsewhere it is large enough to hide the launches of its
#: operations
SIZES = {"cpu": Sizes(128, 256, 1 << 18)}
OTHER_SIZES = Sizes(512, 1024, 1 << 22)


class Strip(NamedTuple):
    """Rows of some sequences and kv heads of a dense call, and their tiles of keys."""

    problem: Problem
    tensors: Tensors
    batch: slice
    heads: slice  # kv heads
    rows: slice
    offset: int | Tensor  # ``mask.offset`` of these sequences
    tiles: list[tuple[slice, bool]]  # (columns, True if every pair of the tile may attend)
    exact: bool  # hidden pairs must be excluded by index, not by arithmetic

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Return [sequences, kv heads, group, rows]."""
        return _length(self.batch), _length(self.heads), self.problem.group, _length(self.rows)

    @property
    def q_heads(self) -> slice:
        return slice(self.heads.start * self.problem.group, self.heads.stop * self.problem.group)

    @overload
    def keys(self, t: Tensor, cols: slice) -> Tensor: ...
    @overload
    def keys(self, t: Tensor | None, cols: slice) -> Tensor | None: ...
    def keys(self, t: Tensor | None, cols: slice) -> Tensor | None:
        """Return k or v of these columns, or a tangent of them, ``[heads, cols, D]``."""
        if t is None:
            return None
        tile = t[self.batch, cols, self.heads].transpose(1, 2).to(self.problem.accumulator)
        return tile.reshape(-1, *tile.shape[2:])

    @overload
    def queries(self, t: Tensor) -> Tensor: ...
    @overload
    def queries(self, t: Tensor | None) -> Tensor | None: ...
    def queries(self, t: Tensor | None) -> Tensor | None:
        """Return these rows of q, out or dout, ``[heads, group * rows, D]``."""
        if t is None:
            return None
        tile = self._rows_of(t.detach()).permute(0, 2, 3, 1, 4).to(self.problem.accumulator)
        return tile.reshape(tile.shape[0] * tile.shape[1], -1, tile.shape[4])

    def numbers(self, t: Tensor) -> Tensor:
        """Return these rows of a ``[B, Hq, Nq]``, ``[heads, group * rows, 1]``."""
        return self.folded(self._row_numbers(t).unsqueeze(-1))

    def store(self, to: Tensor, x: Tensor) -> None:
        """Write x, as of ``queries`` or of ``numbers``, to these rows."""
        if to.dim() == 4:
            self._rows_of(to).copy_(x.view(*self.size, -1).permute(0, 3, 1, 2, 4))
        else:
            self._row_numbers(to).copy_(x.view(self.size))

    def _rows_of(self, t: Tensor) -> Tensor:
        """Return the view ``[sequences, rows, kv heads, group, D]`` of a ``[B, Nq, Hq, D]``."""
        return t.unflatten(2, (-1, self.problem.group))[self.batch, self.rows, self.heads]

    def _row_numbers(self, t: Tensor) -> Tensor:
        """Return the view ``[sequences, kv heads, group, rows]`` of a ``[B, Hq, Nq]``."""
        return t.unflatten(1, (-1, self.problem.group))[self.batch, self.heads, :, self.rows]

    def unfolded(self, S: Tensor) -> Tensor:
        """Return the view ``[sequences, kv heads, group, rows, cols]`` of a tile."""
        return S.view(*self.size, S.shape[2])

    def folded(self, tile: Tensor) -> Tensor:
        """Return ``[heads, group * rows, cols]`` of a term that broadcasts against ``unfolded``."""
        b, h, g, rows = self.size
        return tile.expand(b, h, g, rows, -1).reshape(b * h, g * rows, -1)


#: the records of a tensor for each input that has a gradient
Each = TypeVar("Each", Gradients, Tangents)


class Part(NamedTuple):
    """A dense call: a whole one, or a sequence of a packed one."""

    problem: Problem
    tensors: Tensors
    sequence: tuple[int, slice, slice] | None  # (number, queries, keys) in a packed call

    def each(self, each: Each) -> Each:
        """Return the views of the gradients or tangents that are of this part."""
        if self.sequence is None:
            return each
        n, rows, cols = self.sequence
        packed = {"q": {"i": rows}, "k": {"j": cols}, "v": {"j": cols}}
        own = {"b": slice(n, n + 1), "i": slice(self.problem.nq), "j": slice(self.problem.nk)}
        ranges = {**packed, "bias": own}
        views = {name: part_of(name, getattr(each, name), **cut) for name, cut in ranges.items()}
        return each._replace(**views)

    def rows(self, *ts: Any) -> Iterator[Any]:
        """Yield the part's view of each ``[1, total_q, Hq, Dv]`` or ``[1, Hq, total_q]``."""
        for t in ts:
            if t is None or self.sequence is None:
                yield t
            else:
                yield t[:, self.sequence[1]] if t.dim() == 4 else t[:, :, self.sequence[1]]


def dense_parts(problem: Problem, tensors: Tensors) -> Iterator[Part]:
    """Yield the dense calls that a call consists of."""
    if not problem.varlen:
        yield Part(problem, tensors, None)
        return
    for n, (rows, cols, one, parts) in enumerate(each_sequence(problem, tensors)):
        yield Part(one, parts, (n, rows, cols))


def strips(problem: Problem, tensors: Tensors, exact: bool = False) -> Iterator[Strip]:
    """Yield the strips that have rows, without tiles that have no allowed pair."""
    if 0 in (problem.batch, problem.nq):
        return
    sizes = SIZES.get(problem.device, OTHER_SIZES)
    block_q = min(problem.nq, max(1, sizes.rows // problem.group))
    rows = problem.group * block_q
    block_k = max(1, min(problem.nk, max(sizes.cols, sizes.rows * sizes.cols // rows)))
    states = None
    offset = mask.offset(problem, tensors)
    starts = [] if isinstance(offset, int) else offset.flatten().tolist()
    prefix = mask.prefix_of(problem, tensors)
    prefixes = None if prefix is None else prefix.flatten().tolist()
    if problem.masked and problem.nk:
        states = mask.tile_states(problem, tensors, block_q, block_k).cpu()
    for batch, heads in _portions(problem, states, max(1, sizes.tile // (rows * block_k))):
        seen = None if states is None else _states_of(states, batch, heads, problem.group)
        if isinstance(offset, int):
            here, reach = offset, (offset, offset)
        else:
            here, reach = offset[batch], (min(starts[batch]), max(starts[batch]))
        longest = None if prefixes is None else max(prefixes[batch])
        for n, i in enumerate(range(0, problem.nq, block_q)):
            row = slice(i, min(i + block_q, problem.nq))
            cols = [slice(j, min(j + block_k, problem.nk)) for j in range(0, problem.nk, block_k)]
            found = [
                (cut if full else _narrowed(problem, row, cut, reach, longest), full)
                for cut, (some, full) in zip(
                    cols, seen[n] if seen else [(True, True)] * len(cols), strict=True
                )
                if some
            ]
            # a band that is empty (left + right < 0) may narrow a partial tile to nothing
            tiles = [(part, full) for part, full in found if _length(part) > 0]
            yield Strip(problem, tensors, batch, heads, row, here, tiles, exact)


def _portions(problem: Problem, states: Tensor | None, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield sequences and kv heads in portions of at most ``most`` heads.

    Sequences whose tiles differ go one by one, so that each skips its own.
    """
    heads = min(problem.hk, most)
    batch = max(1, most // problem.hk)
    if states is not None and states.shape[0] > 1 and states[0, 0].numel() > 1:
        batch = 1
    for b in range(0, problem.batch, batch):
        for h in range(0, problem.hk, heads):
            yield slice(b, min(b + batch, problem.batch)), slice(h, min(h + heads, problem.hk))


def _states_of(
    states: Tensor, batch: slice, heads: slice, group: int
) -> list[list[tuple[bool, bool]]]:
    """Return (some pair may attend, every pair may) for each tile of a portion."""
    if states.shape[0] > 1:
        states = states[batch]
    if states.shape[1] > 1:
        states = states[:, heads.start * group : heads.stop * group]
    some = (states.amax((0, 1)) != mask.SKIP).tolist()
    every = (states.amin((0, 1)) == mask.FULL).tolist()
    return [list(zip(a, b, strict=True)) for a, b in zip(some, every, strict=True)]


def _narrowed(
    problem: Problem, rows: slice, cols: slice, reach: tuple[int, int], prefix: int | None
) -> slice:
    """Return the columns of a tile that lie inside the band of its rows.

    ``reach``: the least and the greatest offset of its sequences; ``prefix``: their longest.
    """
    first, last = rows.start + reach[0], rows.stop - 1 + reach[1]
    limits = problem.left, problem.right
    low, high = band.any_range(first, last, 0, *limits, cols.stop, prefix)
    return slice(max(low, cols.start), high)


def _length(s: slice) -> int:
    return s.stop - s.start
