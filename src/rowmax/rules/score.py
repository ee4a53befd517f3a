"""The score of a pair, its derivatives and its tangent.

``s = c tanh(scale x / c) + bias - slope |i + offset - j|`` of the product ``x = q.k``; without a
softcap ``s = scale x + ...``. Scores are in natural units or in base 2, ``log2(e)`` times as large:
the terms of a record carry that factor (``Problem.natural``).

Names: ``ds`` is a gradient, ``ts`` a tangent (s' in formulas), ``dts`` the gradient of a tangent.
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


def score_tangent(tx, y, p, tp):
    """Return s', the tangent of ``score``: ``scale x' (1 - y^2) + bias' - slope' distance``.

    ``tx`` is the tangent of x, ``tq.k + q.tk``, with the factor that x has. ``tp`` has the tangents
    of the bias and of head terms; None is 0, and other fields are not read. s' is in the units of
    the terms of p: kernels give natural ones, whatever the units of their scores.
    """
    ts = tx
    if p.inner is not None:
        ts = tx * (1.0 - y * y) * (p.cap * p.inner)
    elif p.scale is not None:
        ts = tx * p.scale
    if tp.bias is not None:
        ts = ts + tp.bias
    if tp.slope is not None:
        ts = ts - tp.slope * p.distance
    return ts


def product_curvature(ds, dts, tx, y, p):
    """Return the gradient of x, without scale, from those of s and s'.

    ``dX = dS (1 - y^2) - dS' x' (2 y / c) (1 - y^2)``. ``tx`` has the factor that x has; ds and dts
    are natural, whatever the units of p. The gradient of x' is ``product_gradient(dts, y, p)``.
    """
    if p.inner is not None:
        bend = dts * (tx * p.inner) * y
        ds = (ds - bend - bend) * (1.0 - y * y)
    return ds


def head_gradient(ds, x, y, p, name):
    """Return the gradient of the parameter ``name`` from each pair of a tile, natural.

    Of dts it is the gradient of the parameter's tangent: added terms are linear in parameters.
    """
    g = ds
    if name == "slope":
        g = 0.0 - ds * p.distance
    return g
