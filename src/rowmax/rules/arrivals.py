"""Keys that arrive while a kernel reads them: which copies a tile of keys waits for.

Copies are done one after the other. A count of them is in the memory of the kernel's device.
"""

from __future__ import annotations

from collections.abc import Sequence

#: keys that one number of ``needed`` is for
GRANULE = 64
#: the most keys of a tile
MOST_KEYS = 256
#: the count after the last copy: no table need be read any more
ALL = 1 << 30


def needed(copies: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Return how many copies must be done before a tile of keys is read.

    Number n is for a tile that begins at one of the ``GRANULE`` keys from ``GRANULE n`` on.

    Args:
        copies: the rows of memory that each copy writes, in the order in which they are done.
        start: the row of key 0.
        stop: the row after the last key.
    """
    last = (MOST_KEYS + GRANULE - 2) // GRANULE  # a tile may begin at the last of its keys
    numbers = [0] * max(1, -(-(stop - start) // GRANULE))
    for count, (low, high) in enumerate(copies, 1):
        first, end = max(low, start) - start, min(high, stop) - start
        if first < end:
            begin = max(0, first // GRANULE - last)
            until = (end - 1) // GRANULE + 1
            numbers[begin:until] = [count] * (until - begin)
    return numbers
