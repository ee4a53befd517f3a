"""Solutions of chapter 5: the backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
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
    return p * (dp - (p * dp).sum(1, keepdim=True))


def row_numbers(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (Delta - dLSE, lse), both ``[Nq]``, as the tiles read them.

    For a row without keys, whose lse is -inf, the first is 0 and the second makes every
    ``exp(s - lse)`` 0, even for a score of -inf.
    """
    empty = lse == -math.inf
    delta = (dout * out).sum(1) - dlse
    return delta.masked_fill(empty, 0.0), lse.masked_fill(empty, math.inf)


def tiled_backward(call: Call, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in two passes: dk and dv with keys outside, dq with queries outside.

    A tile has at most ``rows`` queries and ``cols`` keys. Rows without keys have gradient 0. Each
    row of each gradient is written once.
    """
    delta, lse = row_numbers(call.out, call.lse, call.dout, call.dlse)

    def tile(i: int, j: int) -> tuple[Tensor, Tensor]:
        """Return P and dS of the tile that begins at query i and key j."""
        q, k = call.q[i : i + rows], call.k[j : j + cols]
        S = call.scale * q @ k.T
        if call.causal:
            last = torch.arange(i, i + len(q))[:, None] + len(call.k) - len(call.q)
            S = S.masked_fill(torch.arange(j, j + len(k)) > last, -math.inf)
        P = torch.exp(S - lse[i : i + rows, None])
        dP = call.dout[i : i + rows] @ call.v[j : j + cols].T
        return P, P * (dP - delta[i : i + rows, None])

    dq, dk, dv = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    for j in range(0, len(dk), cols):
        for i in range(0, len(dq), rows):
            P, dS = tile(i, j)
            dk[j : j + cols] += call.scale * dS.T @ call.q[i : i + rows]
            dv[j : j + cols] += P.T @ call.dout[i : i + rows]
    for i in range(0, len(dq), rows):
        for j in range(0, len(dk), cols):
            _, dS = tile(i, j)
            dq[i : i + rows] += call.scale * dS @ call.k[j : j + cols]
    return dq, dk, dv
