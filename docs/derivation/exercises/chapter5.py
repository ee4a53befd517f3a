"""Exercises of chapter 5: the backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """A call whose gradients are wanted."""

    q: Tensor  # [Nq, D]
    k: Tensor  # [Nk, D]
    v: Tensor  # [Nk, Dv]
    out: Tensor  # [Nq, Dv]
    lse: Tensor  # [Nq]
    dout: Tensor  # [Nq, Dv]
    dlse: Tensor  # [Nq]
    scale: float
    causal: bool


def softmax_backward(p: Tensor, dp: Tensor) -> Tensor:
    """Return the gradient of the scores, of p and dp ``[rows, N]``, without a matrix N by N."""
    raise NotImplementedError


def row_numbers(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (Delta - dLSE, lse), both ``[Nq]``, as the tiles read them.

    For a row without keys, whose lse is -inf, the first is 0 and the second makes every
    ``exp(s - lse)`` 0, even for a score of -inf.
    """
    raise NotImplementedError


def tiled_backward(call: Call, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in two passes: dk and dv with keys outside, dq with queries outside.

    A tile has at most ``rows`` queries and ``cols`` keys. Rows without keys have gradient 0. Each
    row of each gradient is written once.
    """
    raise NotImplementedError
