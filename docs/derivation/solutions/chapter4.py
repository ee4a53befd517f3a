"""Solutions of chapter 4: the tiled forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def blocked_product(x: Tensor, w: Tensor, block: int) -> Tensor:
    """Return x @ w by tiles of at most ``block`` rows, columns and inner numbers."""
    y = x.new_zeros(x.shape[0], w.shape[1])
    for i in range(0, x.shape[0], block):
        for j in range(0, w.shape[1], block):
            for n in range(0, x.shape[1], block):
                left, right = x[i : i + block, n : n + block], w[n : n + block, j : j + block]
                y[i : i + block, j : j + block] += left @ right
    return y


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rows: int, cols: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return (out ``[Nq, Dv]``, lse ``[Nq]``) by tiles of ``rows`` queries and ``cols`` keys.

    Causal: query i sees the keys ``j <= i + Nk - Nq``. A row without keys has out 0 and lse -inf.
    No score outside one tile may exist: multiply no more than rows by cols at a time.
    """
    nq, nk = len(q), len(k)
    out, lse = q.new_zeros(nq, v.shape[1]), q.new_zeros(nq)
    for i in range(0, nq, rows):
        q_i = q[i : i + rows]
        m = q.new_full((len(q_i), 1), -math.inf)
        l, total = q.new_zeros(len(q_i), 1), q.new_zeros(len(q_i), v.shape[1])
        last = torch.arange(i, i + len(q_i))[:, None] + nk - nq
        for j in range(0, nk, cols):
            S = scale * q_i @ k[j : j + cols].T
            if causal:
                S = S.masked_fill(torch.arange(j, j + S.shape[1]) > last, -math.inf)
            m_new = torch.maximum(m, S.amax(1, keepdim=True))
            base = m_new.masked_fill(m_new == -math.inf, 0.0)
            P, delta = torch.exp(S - base), torch.exp(m - base)
            l = delta * l + P.sum(1, keepdim=True)
            total = delta * total + P @ v[j : j + cols]
            m = m_new
        out[i : i + rows] = total / l.masked_fill(l == 0, 1.0)
        lse[i : i + rows] = (m + l.log()).squeeze(1)
    return out, lse


def forward_numbers(n: int, d: int, rows: int, cols: int, outside: str) -> int:
    """Return the numbers that cross between the memories, for ``outside`` "queries" or "keys".

    Chapter 4.3 says what each order reads and writes. ``rows`` and ``cols`` need not divide ``n``.
    """
    if outside == "queries":
        return 2 * n * d + n + math.ceil(n / rows) * 2 * n * d
    return 2 * n * d + math.ceil(n / cols) * (3 * n * d + 4 * n)
