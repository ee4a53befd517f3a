"""The band of causal masks and windows: the positions on one side that a range of the other sees.

A band is ``-back <= y - (x + shift) <= ahead``; None is no limit. The rule holds from both sides.
Keys that queries see: x is a query, y a key, ``shift = offset``, ``back = left``, ``ahead =
right``. Queries that see keys: x is a key, y a query, ``shift = -offset``, ``back = right``,
``ahead = left``. Here ``offset`` is the key position of query 0 (``mask.offset``).

A prefix of the keys is seen whatever ``right`` is: key j if ``j < prefix`` or within ``right``. The
keys of a query are still one range, up to the later of the two ends. A key of the prefix has no
first query (``back_of_key``).

Positions are integers, or tensors of integers. With tensors ``x0 = x1`` both ranges are per row.
"""

from __future__ import annotations

from .softmax import where


def any_range(x0, x1, shift, back, ahead, end, prefix=None):
    """Return (low, high): every y in [0, end) that some x in [x0, x1] sees is in [low, high).

    ``high`` may be less than ``low``, or negative; then there is none.
    """
    low = 0
    high = end
    if back is not None:
        low = max(x0 + shift - back, 0)
    if ahead is not None:
        high = x1 + shift + ahead + 1
        if prefix is not None:
            high = max(high, prefix)
        high = min(high, end)
    return low, high


def all_range(x0, x1, shift, back, ahead, end, prefix=None):
    """Return (low, high): the y in [0, end) that every x in [x0, x1] sees.

    ``high`` may be less than ``low``, or negative; then there is none.
    """
    low = 0
    high = end
    if back is not None:
        low = max(x1 + shift - back, 0)
    if ahead is not None:
        high = x0 + shift + ahead + 1
        if prefix is not None:
            high = max(high, prefix)
        high = min(high, end)
    return low, high


def touches(also, low, high, y0, y1):
    """Return True where some of the positions y0 to y1 is in [low, high), and ``also``."""
    return also & (low <= y1) & (y0 < high)


def fills(also, low, high, y0, y1):
    """Return True where all of the positions y0 to y1 are in [low, high), and ``also``."""
    return also & (low <= y0) & (y1 < high)


def back_of_key(key, prefix, right, most):
    """Return the limit ``back`` of the queries that see a key.

    It is ``right``, or for a key of the prefix ``most``, which is past every query.
    """
    return where(key < prefix, most, right)


def touched_tiles(low, high, block):
    """Return (first, last): the tiles first to last - 1 hold a position in [low, high).

    ``last`` is at least ``first``, whatever the range.
    """
    first = low // block
    return first, max((max(high, 0) + block - 1) // block, first)


def filled_tiles(low, high, block, first, last):
    """Return (full, full_end): the tiles full to full_end - 1 lie within [low, high).

    ``first <= full <= full_end <= last``.
    """
    full = min(max((low + block - 1) // block, first), last)
    return full, min(max(max(high, 0) // block, full), last)
