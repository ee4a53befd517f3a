"""Exercises of chapter 7: forward mode and second order."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class State(NamedTuple):
    """The running sums of a tile of queries and their tangents, after some tiles of keys.

    With weights ``w = exp(x - m)``, ``tl`` is the sum of ``w (tx - mu)`` and ``ttotal`` that of
    ``w ((tx - mu) v + tv)``.
    """

    l: Tensor  # [rows, 1]
    total: Tensor  # [rows, Dv]
    tl: Tensor  # [rows, 1]
    ttotal: Tensor  # [rows, Dv]
    mu: Tensor  # [rows, 1]


def softmax_tangent(p: Tensor, tx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tangents of p ``[rows, N]`` and of lse ``[rows, 1]``.

    p is the softmax of rows whose tangent is tx.
    """
    raise NotImplementedError


def move_base(state: State, mu: Tensor) -> State:
    """Return the state with another base of each row, ``[rows, 1]``, without a key or a value."""
    raise NotImplementedError


def hessian_product(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, direction: Tensor, scale: float
) -> Tensor:
    """Return the Hessian of ``(dout * out).sum()`` by q, times a direction like q.

    out is ``softmax(scale q k^T) v``. The cost is that of a few products of matrices, without
    autograd.
    """
    raise NotImplementedError
