"""Exercises of chapter 3: blocks of a row, and their merge."""

from __future__ import annotations

from torch import Tensor

Pair = tuple[float, float]


def combine(a: Pair, b: Pair) -> Pair:
    """Return the merge of two pairs (m, z); an empty one is (-inf, 0)."""
    raise NotImplementedError


def block_softmax(x: Tensor, block: int) -> Tensor:
    """Return the row softmax of x ``[rows, N]``, by blocks of columns.

    Rescale the blocks before when a new one arrives. Rows may begin with blocks of -inf. A row of
    -inf alone has weights 0.
    """
    raise NotImplementedError


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) over both parts of the keys, of o ``[N, D]`` and lse ``[N]``.

    A part that is empty for a row has lse -inf there. If both are, o is 0 and lse is -inf.
    """
    raise NotImplementedError
