"""Exercises of chapter 8: numerics."""

from __future__ import annotations

from torch import Tensor


def softmax2(products: Tensor, scale: float) -> Tensor:
    """Return the softmax of the rows of ``scale * products``, in base 2.

    A score has one multiplication before ``exp2``. scale is positive. Finite products as large as
    the format allows give no infinity and no NaN.
    """
    raise NotImplementedError


def weights_from(scores: Tensor, lse: Tensor) -> Tensor:
    """Return ``exp(scores - LSE)`` of rows, where lse ``[rows]`` is LSE, rounded to float32.

    The rows sum to 1 for scores of any finite size. A row without keys (lse -inf) has zeros.
    """
    raise NotImplementedError


def lagging(x: Tensor, v: Tensor, tile: int) -> tuple[Tensor, int]:
    """Return the average of v ``[N, D]`` with weights ``2^x``, and the number of moves.

    The reference of the row begins at minus infinity. It moves to the maximum of a tile that
    exceeds it by more than 8. All scores are finite.
    """
    raise NotImplementedError
