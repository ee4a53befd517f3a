"""Keys that arrive while a kernel reads them: which copies a tile of keys waits for.

Copies are done one after the other. A count of them is in the memory of the kernel's device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

#: keys that one number of a table is for
GRANULE = 64
#: the most keys of a tile
MOST_KEYS = 256
#: the count after the last copy: no table need be read any more
ALL = 1 << 30


class Landing(NamedTuple):
    """One copy of rows of keys."""

    number: int  # copies that are done, with this one
    start: int  # rows of memory
    stop: int


def table(heads: Sequence[Iterable[Landing]], start: int, stop: int) -> list[int]:
    """Return what kernels read: the numbers of a head, 0 if heads share them, then those of heads.

    ``heads`` are the copies of each kv head, or one sequence of copies of all heads. ``start`` is
    the row of key 0, and ``stop`` that after the last key.
    """
    each = [needed(copies, start, stop) for copies in heads]
    return [len(each[0]) if len(each) > 1 else 0, *chain(*each)]


def needed(copies: Iterable[Landing], start: int, stop: int) -> list[int]:
    """Return how many copies must be done before a tile of keys is read.

    Number n is for a tile that begins at one of the ``GRANULE`` keys from ``GRANULE n`` on.
    """
    last = (MOST_KEYS + GRANULE - 2) // GRANULE  # a tile may begin at the last of its keys
    numbers = [0] * max(1, -(-(stop - start) // GRANULE))
    for number, low, high in copies:
        first, end = max(low, start) - start, min(high, stop) - start
        if first < end:
            begin = max(0, first // GRANULE - last)
            until = (end - 1) // GRANULE + 1
            numbers[begin:until] = [max(number, x) for x in numbers[begin:until]]
    return numbers
