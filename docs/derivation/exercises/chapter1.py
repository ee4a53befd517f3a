"""Exercises of chapter 1: why attention is bound by memory."""

from __future__ import annotations


def dense_bytes(n: int, d: int, unit: int) -> int:
    """Return the bytes that dense attention moves with a softmax of three programs.

    The first reads the scores and writes a maximum for each row. The second reads scores and
    maxima and writes a sum for each row. The third reads scores, maxima and sums and writes the
    weights. ``n`` positions, ``d`` numbers a row, ``unit`` bytes a number.
    """
    raise NotImplementedError


def tiled_bytes(n: int, d: int, rows: int, unit: int) -> int:
    """Return the bytes that tiled attention moves, where ``rows`` need not divide ``n``.

    The last tile of queries has the rest of the rows. It reads all keys and values too.
    """
    raise NotImplementedError


def least_rows(n: int, d: int, unit: int, ridge: float) -> int | None:
    """Return the least multiple of 16 rows at which tiled attention reaches the ridge.

    ``ridge`` is in operations a byte. The operations are ``4 n n d``. Return None if even one tile
    of all rows does not reach it.
    """
    raise NotImplementedError
