"""Solutions of chapter 8: numerics."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax2(products: Tensor, scale: float) -> Tensor:
    """Return the softmax of the rows of ``scale * products``, in base 2.

    A score has one multiplication before ``exp2``. scale is positive. Finite products as large as
    the format allows give no infinity and no NaN.
    """
    factor = scale * math.log2(math.e)
    peak = products.amax(1, keepdim=True)
    weights = torch.exp2((products - peak) * factor)
    return weights / weights.sum(1, keepdim=True)


def weights_from(scores: Tensor, lse: Tensor) -> Tensor:
    """Return ``exp(scores - LSE)`` of rows, where lse ``[rows]`` is LSE, rounded to float32.

    The rows sum to 1 for scores of any finite size. A row without keys (lse -inf) has zeros.
    """
    near = scores - lse.masked_fill(lse == -math.inf, 0.0)[:, None]
    rest = near.logsumexp(1, keepdim=True)
    rest = rest.masked_fill(rest == -math.inf, 0.0)
    return torch.exp(near - rest)


def lagging(x: Tensor, v: Tensor, tile: int) -> tuple[Tensor, int]:
    """Return the average of v ``[N, D]`` with weights ``2^x``, and the number of moves.

    The reference of the row begins at minus infinity. It moves to the maximum of a tile that
    exceeds it by more than 8. All scores are finite.
    """
    m, l, total, moves = -math.inf, torch.zeros(()), torch.zeros(v.shape[1]), 0
    for scores, values in zip(x.split(tile), v.split(tile), strict=True):
        peak = scores.max().item()
        if peak > m + 8:
            delta, m, moves = 2.0 ** (m - peak), peak, moves + 1
            l, total = delta * l, delta * total
        weights = torch.exp2(scores - m)
        l, total = l + weights.sum(), total + weights @ values
    return total / l, moves
