"""The tangent of the softmax by rows, and the gradients through it: the second order.

Forward mode, with s' and v' the tangents of scores and values and R dropout's factor: two more
running sums, rescaled by ``alpha`` as ``l`` and ``O`` are,

    tl' = alpha tl + rowsum P s'        (P before dropout)
    tO' = alpha tO + (P R s') V + (P R) V'

and at the end ``LSE' = tl / l``, ``out' = tO / l - LSE' out``. s' is natural.

A part of s' that a row has in common (of slopes at distances of thousands, of a bias that moves as
a whole) cancels there after rounding. So a backend may subtract a number r of the row from every
s', best the mean of s' over the tiles so far, weighted by P: no other r makes the numbers that are
rounded smaller. One tile is not enough: under a small slope the mean distance falls from tile to
tile, and no tile outweighs all tiles before it. Then ``LSE' = r + tl /
l`` and ``out' = tO / l - (LSE' - r) out``. To move r to another number u, add ``(r - u) l`` to tl
and ``(r - u) O`` to tO.

Backward of both, for cotangents e of out, a of LSE, g of out' and a' of LSE', with P recomputed
from LSE and ``D = s' - LSE'``:

    b_i  = B - a' = g.out - a'                    beta  = R (g.v)
    c_i  = G - a  = g.out' + e.out - a            gamma = R (g.v' + e.v)
    dS'  = P (beta - b),   dS  = P (gamma - c) + D dS'
    dV'  = (P R)^T g,      dV  = (P R D)^T g + (P R)^T e

The row numbers b and c are 0 for a row without weights (``row_stats``). With ``g = dO``, ``a' =
dLSE`` and ``e = a = 0`` these are the second derivatives of a backward; dS' and dV' are then the
gradients of the backward itself.
"""

from __future__ import annotations

from .softmax import LOG2E, exp2, inf, where


def tangent_base(l, tl, tile_l, tile_tl, r):
    """Return r after a tile: the mean of s' over it and the tiles before.

    l and tl, the sums of P and ``P (s' - r)`` over the tiles before, are rescaled to the maximum of
    ``tile_l``, the weights of the tile, and ``tile_tl``, its sum of P s'. r stays where the mean is
    not finite.
    """
    total = l + tile_l
    mean = r + (tl + tile_tl - r * tile_l) / where(total == 0.0, 1.0, total)
    return where((mean < inf) & (mean > -inf), mean, r)


def sink_in_tangent(tl, l, m, sink, tsink, r):
    """Return (tl', LSE') with the sink as one more score, of tangent ``tsink``.

    Its weight is ``exp(sink - m)``; m includes the sink, and tl and l, of the keys alone, are
    relative to it. ``r + tl' / l'`` is LSE' too, but cancels where the sink outweighs all keys: r,
    their mean, may be large where LSE' is ``tsink``. A mean by shares does not cancel.
    """
    w = exp2((sink - where(m == -inf, 0.0, m)) * LOG2E)
    total = where(l + w == 0.0, 1.0, l + w)
    return tl + w * (tsink - r), l / total * r + (tl + w * tsink) / total


def out_tangent(t, tlse, out):
    """Return ``out'`` of a row from ``t = tO / l``; l is 1 for a row that sees nothing."""
    return t - tlse * out


def score_gradients(p, beta, gamma, d, b, c):
    """Return ``(dS, dS')``, natural.

    Of a sink P is its weight, ``D = sink' - LSE'``, and beta and gamma are 0.
    """
    dts = p * (beta - b)
    return p * (gamma - c) + d * dts, dts
