"""Exercises of chapter 2: softmax in one pass."""

from __future__ import annotations

from torch import Tensor


def online_softmax(x: list[float]) -> list[float]:
    """Return the softmax of a list, which is read twice.

    The first pass keeps a maximum and a sum. A score may be minus infinity: its weight is 0. If all
    are, all weights are 0.
    """
    raise NotImplementedError


def online_average(x: list[float], v: Tensor) -> Tensor:
    """Return the average of the rows of v ``[N, D]`` with the softmax of x, in one pass.

    x may begin with minus infinity. If all scores are minus infinity, the average is 0.
    """
    raise NotImplementedError


def without_last(m: float, l: float, x_n: float, m_before: float) -> float:
    """Return l before the last score came, from m and l after it.

    ``m_before`` is the maximum before it. Raise ValueError if nothing of the old sum is left in l:
    the score may be so much larger that rounding lost the sum.
    """
    raise NotImplementedError
