"""The score of a pair, and its derivative.

``s = c tanh(scale x / c) + bias - slope |i + offset - j|`` of the product ``x = q.k``; without a
softcap ``s = scale x + ...``. Scores are in natural units or in base 2, ``log2(e)`` times as large:
the terms of a record carry that factor (``Problem.natural``).
"""

from __future__ import annotations

from math import tanh
from typing import Any, NamedTuple


class ScoreTerms(NamedTuple):
    """The terms of a tile of scores, in its units. A term that is None is absent."""

    scale: Any = None  # factor of x; None: 1. Not used under a softcap
    inner: Any = None  # scale / c, or 1 where x has that factor; None: no softcap
    cap: Any = None  # c
    bias: Any = None  # a tile, or a row or column of it
    distance: Any = None  # |i + offset - j| of the tile's pairs
    # from here on the parameters of head terms, in the order of ``inputs.HEAD_TERMS``
    slope: Any = None  # ALiBi's


def score(x, p):
    """Return (s, y): the scores of the products x before the mask, and ``y = tanh(scale x / c)``.

    Without a softcap y is x. The derivatives need y.
    """
    y = x
    s = x
    if p.inner is not None:
        y = tanh(x * p.inner)
        s = y * p.cap
    elif p.scale is not None:
        s = x * p.scale
    if p.bias is not None:
        s = s + p.bias
    if p.slope is not None:
        s = s - p.slope * p.distance
    return s, y


def product_gradient(ds, y, p):
    """Return the gradient of x, without scale, from that of s: ``dX = dS (1 - y^2)``."""
    if p.inner is not None:
        ds = ds * (1.0 - y * y)
    return ds


def head_gradient(ds, x, y, p, name):
    """Return the gradient of the parameter ``name`` from each pair of a tile, natural."""
    g = ds
    if name == "slope":
        g = 0.0 - ds * p.distance
    return g
