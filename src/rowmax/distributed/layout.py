"""Layouts: the rows of a sequence that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import bad, check_integers, wrong_type
from ..masks import Mask, as_int
from .area import areas
from .balance import distributed

#: chunks start at multiples of it where the sequence is long enough: whole tiles of every kernel,
#: and whole blocks of keys of dropout's generator
ALIGNED = 64

Ranges = tuple[tuple[int, int], ...]
Masks = Mask | Tensor | None | Sequence[Mask | Tensor | None]


@dataclass(frozen=True)
class Layout:
    """The rows of a sequence of n positions that each rank holds, in ascending order.

    A value like a mask: made from host numbers, equal on all ranks, hashable. Lengths may differ
    between ranks, and a rank may hold no row.

    Args:
        owned: for each rank the ranges (start, stop) of its rows. Together they are 0 to n.

    Raises:
        TypeError, ValueError: ranges that overlap, or that leave out a position.

    >>> layout = Layout.zigzag(512, 2)
    >>> layout.chunks(0), layout.chunks(1)
    ((range(0, 128), range(384, 512)), (range(128, 384),))
    >>> layout.lengths
    (256, 256)
    """

    owned: tuple[Ranges, ...] = field(compare=False)
    n: int = field(init=False, compare=False, repr=False)
    ranks: int = field(init=False, compare=False, repr=False)
    #: the number of rows of each rank
    lengths: tuple[int, ...] = field(init=False, compare=False, repr=False)
    #: all of it, as ``parse`` reads it
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        owned = tuple(_joined(_pairs(one)) for one in self.owned)
        if not owned:
            raise bad("owned", "no ranks", "the ranges of at least one rank")
        n = 0
        for start, stop in sorted(pair for one in owned for pair in one):
            if start != n:
                raise bad("owned", f"{start} after {n}", "ranges that hold each position once")
            n = stop
        text = "/".join(",".join(f"{start}:{stop}" for start, stop in one) for one in owned)
        lengths = tuple(sum(stop - start for start, stop in one) for one in owned)
        for name, value in (
            *(("owned", owned), ("n", n), ("ranks", len(owned))),
            *(("lengths", lengths), ("text", text)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of a ``text``.

        >>> Layout.parse(Layout.zigzag(100, 3).text) == Layout.zigzag(100, 3)
        True
        """
        ranks = ([c.split(":") for c in rank.split(",") if c] for rank in text.split("/"))
        return cls(tuple(tuple((int(a), int(b)) for a, b in rank) for rank in ranks))

    @classmethod
    def contiguous(cls, n: int, ranks: int) -> Layout:
        """Return the layout with one range for each rank, as equal as they can be.

        >>> Layout.contiguous(1000, 2).lengths
        (512, 488)
        """
        starts = _starts(*_sizes(n, ranks))
        return cls(tuple((pair,) for pair in pairwise(starts)))

    @classmethod
    def zigzag(cls, n: int, ranks: int) -> Layout:
        """Return the layout with chunks r and ``2 ranks - 1 - r`` for rank r.

        It balances causal masks: an early chunk and a late one see as many keys as two of the
        middle.

        >>> Layout.zigzag(1024, 4).chunks(1)
        (range(128, 256), range(768, 896))
        """
        n, ranks = _sizes(n, ranks)
        each = list(pairwise(_starts(n, 2 * ranks)))
        return cls(tuple((each[r], each[-1 - r]) for r in range(ranks)))

    @classmethod
    def balanced(
        cls, mask: Masks, n: int, ranks: int, chunk: int = 1024, *, keys: int | None = None
    ) -> Layout:
        """Return the layout that gives ranks equal numbers of allowed pairs and of chunks.

        Chunks are assigned from the heaviest on, each to the least loaded rank. A chunk is shorter
        than ``chunk`` where the sequence is short.

        Args:
            mask: a mask or boolean tensor of the whole sequence on the CPU, None for all pairs, or
                a list: the masks of different layers, whose pairs add up.
            n: the number of queries.
            chunk: the most rows of a chunk.
            keys: the number of keys, n if None.

        Raises:
            TypeError, ValueError: naming the argument, what it got and what it accepts.

        >>> import torch, rowmax
        >>> documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 1536, 2048]))
        >>> mask = documents & rowmax.Causal()
        >>> layout = Layout.balanced(mask, 2048, 2, chunk=256)
        >>> layout.lengths, round(layout.imbalance(mask), 2)
        ((1024, 1024), 1.0)
        """
        n, ranks = _sizes(n, ranks)
        size = _chunk_size(n, ranks, _at_least("chunk", chunk, 1))
        starts = [*range(0, n, size), n]
        weights = _sums(_load(mask, n, keys), starts)
        mine: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        least, more = divmod(len(weights), ranks)
        loads = [0] * ranks
        for c in sorted(range(len(weights)), key=lambda c: -weights[c]):
            room = least + (more > 0)  # ``more`` ranks may still hold one chunk more than others
            rank = min((r for r in range(ranks) if len(mine[r]) < room), key=loads.__getitem__)
            mine[rank].append((starts[c], starts[c + 1]))
            loads[rank] += weights[c]
            more -= len(mine[rank]) > least
        return cls(tuple(map(tuple, mine)))

    @classmethod
    def documents(cls, cu_seqlens: Tensor | Sequence[int], ranks: int) -> Layout:
        """Return the layout of packed documents: short ones whole, the longest ones cut.

        It suits causal masks, with a window or without. As few documents are cut as balance needs,
        often one, so few rows move and a call of a rank has few sequences. Of a cut document each
        rank has an early range and a late one. Ranks have equal numbers of rows, to a few, and of
        pairs, to one in a hundred where that is possible.

        Args:
            cu_seqlens: the offsets of the documents, on the CPU.

        Raises:
            TypeError, ValueError: naming the argument, what it got and what it accepts.

        >>> layout = Layout.documents([0, 300, 1000, 1100, 1400], 2)
        >>> layout.lengths, layout.chunks(0)
        ((700, 700), (range(0, 412), range(812, 1100)))
        """
        cu = _offsets(cu_seqlens)
        n, ranks = _sizes(cu[-1], ranks)
        sizes = [(stop - start, start) for start, stop in pairwise(cu) if start < stop]
        return cls(tuple(map(tuple, distributed(sizes, n, ranks))))

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Return the ranges of positions of a rank, ascending; adjacent ones are joined."""
        return tuple(range(start, stop) for start, stop in self.owned[self._rank(rank)])

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each row of a rank, int64: what rotary embeddings read.

        >>> Layout.zigzag(8, 2).positions(0)
        tensor([0, 1, 6, 7])
        """
        parts = [torch.arange(c.start, c.stop, device=device) for c in self.chunks(rank)]
        return torch.cat(parts) if parts else torch.arange(0, device=device)

    def imbalance(self, mask: Masks = None, *, keys: int | None = None) -> float:
        """Return the allowed pairs of the most loaded rank over the mean of all ranks.

        Args are those of ``balanced``. A mask that allows nothing is balanced.

        >>> import rowmax
        >>> Layout.contiguous(1024, 2).imbalance(rowmax.Causal())
        1.4995121951219512
        """
        each = _load(mask, self.n, keys)
        loads = [
            sum(int(each[start:stop].sum()) for start, stop in self.owned[rank])
            for rank in range(self.ranks)
        ]
        return imbalance(loads)

    def _rank(self, rank: int) -> int:
        whole = as_int(rank)
        if whole is None or not 0 <= whole < self.ranks:
            raise bad("rank", repr(rank), f"0 to {self.ranks - 1}")
        return whole


def imbalance(loads: Sequence[int]) -> float:
    """Return the largest load over the mean; 1 if all are 0."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def _offsets(given: Any) -> list[int]:
    """Return offsets of documents as ints."""
    values = given
    if isinstance(given, Tensor):
        check_integers("cu_seqlens", given, (1,))
        if given.device.type != "cpu":
            raise bad("cu_seqlens", f"a tensor on {given.device}", "one on the CPU, or a list")
        values = given.tolist()
    found = [as_int(x) for x in values] if isinstance(values, (list, tuple)) else []
    if any(x is None for x in found) or not found:
        raise wrong_type("cu_seqlens", repr(given), "offsets: a tensor on the CPU, or ints")
    if found[0] != 0 or any(a > b for a, b in pairwise(found)):  # pyright: ignore
        raise bad("cu_seqlens", repr(given), "offsets that begin with 0 and never fall")
    return found  # pyright: ignore


def _load(mask: Masks, n: int, keys: int | None) -> Tensor:
    """Return the number of allowed pairs of each query, of all masks together, int64 ``[n]``."""
    several: list[Any] = list(mask) if isinstance(mask, (list, tuple)) else [mask]
    if not several:
        raise bad("mask", "no masks", "at least one, or None")
    nk = n if keys is None else _at_least("keys", keys, 0)
    return torch.stack([areas(one, n, nk) for one in several]).sum(0)


def _sums(each: Tensor, starts: Sequence[int]) -> list[int]:
    total = torch.cat((each.new_zeros(1), each.cumsum(0)))
    return total[list(starts)].diff().tolist()


def _chunk_size(n: int, ranks: int, most: int) -> int:
    """Return the size of chunks: at most ``most``, two for each rank, whole blocks if possible."""
    size = min(most, max(1, n // (2 * ranks)))
    return size if size < ALIGNED else size // ALIGNED * ALIGNED


def _starts(n: int, parts: int) -> list[int]:
    """Return where each part begins, and n."""
    if n < ALIGNED * parts:
        return [n * part // parts for part in range(parts + 1)]
    inner = (round(n * part / parts / ALIGNED) * ALIGNED for part in range(parts))
    return [*inner, n]


def _sizes(n: Any, ranks: Any) -> tuple[int, int]:
    return _at_least("n", n, 0), _at_least("ranks", ranks, 1)


def _at_least(name: str, given: Any, least: int) -> int:
    whole = as_int(given)
    if whole is None:
        raise wrong_type(name, repr(given), "an int")
    if whole < least:
        raise bad(name, whole, f"{least} or more")
    return whole


def _pairs(ranges: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the ranges of a rank that hold a position, ascending."""
    try:
        found = [(as_int(start), as_int(stop)) for start, stop in ranges]
    except (TypeError, ValueError):
        raise wrong_type("owned", repr(ranges), "pairs (start, stop) for each rank") from None
    for start, stop in found:
        if start is None or stop is None or not 0 <= start <= stop:
            raise bad("owned", f"({start}, {stop})", "ints with 0 <= start <= stop")
    return sorted(pair for pair in found if pair[0] < pair[1])  # pyright: ignore


def _joined(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return ascending ranges, with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for start, stop in pairs:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)
