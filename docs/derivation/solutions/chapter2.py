"""Solutions of chapter 2: softmax in one pass."""

from __future__ import annotations

import math

from torch import Tensor


def online_softmax(x: list[float]) -> list[float]:
    """Return the softmax of a list, which is read twice.

    The first pass keeps a maximum and a sum. A score may be minus infinity: its weight is 0. If all
    are, all weights are 0.
    """
    m, l = -math.inf, 0.0
    for score in x:
        m_new = max(m, score)
        base = 0.0 if m_new == -math.inf else m_new
        l = math.exp(m - base) * l + math.exp(score - base)
        m = m_new
    return [math.exp(score - m) / l if l else 0.0 for score in x]


def online_average(x: list[float], v: Tensor) -> Tensor:
    """Return the average of the rows of v ``[N, D]`` with the softmax of x, in one pass.

    x may begin with minus infinity. If all scores are minus infinity, the average is 0.
    """
    m, l, total = -math.inf, 0.0, v.new_zeros(v.shape[1])
    for score, row in zip(x, v, strict=True):
        m_new = max(m, score)
        base = 0.0 if m_new == -math.inf else m_new
        delta, weight = math.exp(m - base), math.exp(score - base)
        l, total, m = delta * l + weight, delta * total + weight * row, m_new
    return total / l if l else total


def without_last(m: float, l: float, x_n: float, m_before: float) -> float:
    """Return l before the last score came, from m and l after it.

    ``m_before`` is the maximum before it. Raise ValueError if nothing of the old sum is left in l:
    the score may be so much larger that rounding lost the sum.
    """
    rest = l - math.exp(x_n - m)
    if rest <= 0.0:
        raise ValueError(f"m_before: got {m_before}, too far below {m}; its sum is not in l")
    return rest * math.exp(m - m_before)
