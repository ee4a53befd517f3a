"""Packed documents for ranks: equal rows and equal causal pairs, with few documents cut.

A document of n rows has ``n (n + 1) / 2`` pairs. Short documents are whole. The longest one makes
rows and pairs equal: each rank has an early range of it and a late one. Each early row in place of
a late one saves the same number of pairs, so a quotient is the length of the early range.
"""

from __future__ import annotations

from collections.abc import Sequence

#: the load of the most loaded rank over the mean, from which on no further documents are cut
EVEN = 1.01

Owned = list[list[tuple[int, int]]]
#: (length, start)
Document = tuple[int, int]


def distributed(documents: Sequence[Document], n: int, ranks: int) -> Owned:
    """Return the ranges of each rank, of documents that together are n rows.

    No further document is cut once the most loaded rank has at most EVEN of the mean.
    """
    longest = sorted(documents, key=lambda one: (-one[0], one[1]))
    tried = (_Shares(longest, cut, n, ranks) for cut in _trials(len(longest)))
    best = next(tried)
    for shares in tried:
        if best.worst <= EVEN:
            break
        best = min(best, shares, key=lambda one: one.worst)
    return best.owned


class _Shares:
    """The ranges, rows and pairs of each rank, with the first ``cut`` documents cut."""

    def __init__(self, longest: Sequence[Document], cut: int, n: int, ranks: int) -> None:
        self.ranks = range(ranks)
        self.owned: Owned = [[] for _ in self.ranks]
        self.pairs = [0] * ranks
        self.rows = [0] * ranks
        self.room = [n * (r + 1) // ranks - n * r // ranks for r in self.ranks]
        self.mean = sum(_pairs(0, length) for length, _ in longest) / ranks
        for length, first in longest[1:cut]:
            self._zigzag(length, first)
        self._whole(longest[cut:], longest[0][0] if cut else 0)
        if cut:
            self._evened(*longest[0])
        self.worst = max(self.pairs) / max(1.0, self.mean)

    def _give(self, rank: int, start: int, stop: int, first: int) -> None:
        """Give a rank a range of the document that begins at ``first``."""
        self.owned[rank].append((start, stop))
        self.rows[rank] += stop - start
        self.room[rank] -= stop - start
        self.pairs[rank] += _pairs(start - first, stop - first)

    def _zigzag(self, length: int, first: int) -> None:
        """Cut a document into an early range and a late one for each rank."""
        parts = 2 * len(self.ranks)
        ends = [first + length * part // parts for part in range(parts + 1)]
        for rank in self.ranks:
            for part in (rank, parts - 1 - rank):
                self._give(rank, ends[part], ends[part + 1], first)

    def _whole(self, documents: Sequence[Document], longest: int) -> None:
        """Give each document to a rank with room for it, or begin it where most room is.

        With each row of a cut document of ``longest`` rows come ``longest / 2`` pairs, in the mean.
        Whole documents have fewer: all ranks should lack the same number of pairs. If none is cut,
        ``longest`` is 0, and ranks should have the same number of pairs.
        """

        def lacking(rank: int) -> float:
            return abs(self.rows[rank] * longest / 2 - self.pairs[rank])

        for length, first in sorted(documents, key=lambda one: -one[0] * abs(longest - one[0])):
            start, end = first, first + length
            while start < end:
                able = [rank for rank in self.ranks if self.room[rank] >= end - start]
                if able:
                    rank, stop = min(able, key=lacking), end
                else:
                    rank = max(self.ranks, key=self.room.__getitem__)
                    stop = min(end, start + max(1, self.room[rank]))
                self._give(rank, start, stop, first)
                start = stop

    def _evened(self, length: int, first: int) -> None:
        """Cut a document so that ranks have equal rows and, where that is possible, equal pairs."""
        wanted = [max(0.0, self.mean - pairs) for pairs in self.pairs]
        # the first ranks have most choice: those that want most or fewest pairs with each row
        odd = [abs(p / max(1, n) - length / 2) for p, n in zip(wanted, self.room, strict=True)]
        begin, end = first, first + length
        for rank in sorted(self.ranks, key=lambda r: -odd[r]):
            rows = min(max(0, self.room[rank]), end - begin)
            late = end - rows
            least = late - begin  # the pairs that an early row saves in place of a late one
            excess = _pairs(late - first, end - first) - wanted[rank]
            early = min(rows, max(0, round(excess / least))) if least else rows
            self._give(rank, begin, begin + early, first)
            self._give(rank, late + early, end, first)
            begin, end = begin + early, late + early


def _pairs(start: int, stop: int) -> int:
    """Return the causal pairs of rows of a document."""
    return (stop - start) * (start + stop + 1) // 2


def _trials(documents: int) -> list[int]:
    """Return numbers of documents to cut: each of the first, then half as many more at a time."""
    found = [0]
    while found[-1] < documents:
        found.append(min(documents, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found
