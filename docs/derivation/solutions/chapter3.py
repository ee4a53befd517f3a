"""Solutions of chapter 3: blocks of a row, and their merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Pair = tuple[float, float]


def combine(a: Pair, b: Pair) -> Pair:
    """Return the merge of two pairs (m, z); an empty one is (-inf, 0)."""
    m = max(a[0], b[0])
    base = 0.0 if m == -math.inf else m
    return m, math.exp(a[0] - base) * a[1] + math.exp(b[0] - base) * b[1]


def block_softmax(x: Tensor, block: int) -> Tensor:
    """Return the row softmax of x ``[rows, N]``, by blocks of columns.

    Rescale the blocks before when a new one arrives. Rows may begin with blocks of -inf. A row of
    -inf alone has weights 0.
    """
    y = torch.zeros_like(x)
    m = x.new_full((x.shape[0], 1), -math.inf)
    z = x.new_zeros(x.shape[0], 1)
    for j in range(0, x.shape[1], block):
        x_j = x[:, j : j + block]
        m_new = torch.maximum(m, x_j.amax(1, keepdim=True))
        base = m_new.masked_fill(m_new == -math.inf, 0.0)
        p, delta = torch.exp(x_j - base), torch.exp(m - base)
        z_new = delta * z + p.sum(1, keepdim=True)
        divisor = z_new.masked_fill(z_new == 0, 1.0)
        y[:, :j] *= delta * z / divisor
        y[:, j : j + block] = p / divisor
        m, z = m_new, z_new
    return y


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) over both parts of the keys, of o ``[N, D]`` and lse ``[N]``.

    A part that is empty for a row has lse -inf there. If both are, o is 0 and lse is -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    share_a, share_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    return share_a[:, None] * o_a + share_b[:, None] * o_b, lse
