"""Exercises of chapter 4: the tiled forward."""

from __future__ import annotations

from torch import Tensor


def blocked_product(x: Tensor, w: Tensor, block: int) -> Tensor:
    """Return x @ w by tiles of at most ``block`` rows, columns and inner numbers."""
    raise NotImplementedError


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rows: int, cols: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return (out ``[Nq, Dv]``, lse ``[Nq]``) by tiles of ``rows`` queries and ``cols`` keys.

    Causal: query i sees the keys ``j <= i + Nk - Nq``. A row without keys has out 0 and lse -inf.
    No score outside one tile may exist: multiply no more than rows by cols at a time.
    """
    raise NotImplementedError


def forward_numbers(n: int, d: int, rows: int, cols: int, outside: str) -> int:
    """Return the numbers that cross between the memories, for ``outside`` "queries" or "keys".

    Chapter 4.3 says what each order reads and writes. ``rows`` and ``cols`` need not divide ``n``.
    """
    raise NotImplementedError
