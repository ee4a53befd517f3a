"""The numbers of each row that a backward reads before its tiles.

``Delta_i = dO_i . out_i``; the gradient of lse is subtracted: ``dS = P (dP - (Delta - dLSE))``. The
second order has two of them, b and c of ``rules/tangent.py``.
First the rules of numbers, which kernels bind to their language, then the rules over tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.inputs import Cotangents, Results
from . import bound, tangent
from .softmax import LOG2E, exp2, inf, where


def without_weights(lse):
    """Return lse, but +inf for -inf, which makes weights 0.

    It is -inf for a row that sees nothing, and for a sink that is too low for base 2.
    """
    return where(lse == -inf, inf, lse)


def natural_weight(s, lse, rest):
    """Return ``exp(s - LSE)`` of a score or a sink; s and lse are natural, lse is not -inf.

    LSE is the sum of lse and ``rest``, in base 2: the part that rounding took from lse. A bias or a
    sink may be the largest number of its dtype, which fits only in natural units.
    """
    return exp2((s - lse) * LOG2E - rest)


_without_weights = bound(without_weights, where=lambda condition, x, y: y.masked_fill(condition, x))
_natural_weight = bound(natural_weight, exp2=torch.exp2)


def delta(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return ``Delta - dLSE`` like lse, ``[B, Hq, Nq]``; 0 for a row that sees nothing."""
    found = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        found = found - dlse.to(lse.dtype)
    return of_seen_rows(found, lse)


def of_seen_rows(delta: Tensor, lse: Tensor) -> Tensor:
    """Return Delta, but 0 for a row that sees nothing.

    Its gradients are 0, even where dout or dlse is NaN.
    """
    return delta.masked_fill(lse == -torch.inf, 0.0)


def score_lse(lse: Tensor, natural: bool) -> Tensor:
    """Return lse in the units of the scores, +inf for a row without weights."""
    return _without_weights(lse if natural else lse * LOG2E)


def _sink_weight(sink: Tensor, lse: Tensor, rest: Tensor | None) -> Tensor:
    """Return ``exp(sigma_h - LSE_i)``; LSE is lse, natural, and ``rest``, which rounding took."""
    rest2 = 0.0 if rest is None else rest * LOG2E
    return _natural_weight(sink.detach()[:, None].to(lse.dtype), _without_weights(lse), rest2)


def dsink(sink: Tensor, lse: Tensor, delta: Tensor, rest: Tensor | None) -> Tensor:
    """Return ``dsigma_h = -sum_i exp(sigma_h - LSE_i) (Delta_i - dLSE_i)``, ``[Hq]``."""
    return -(_sink_weight(sink, lse, rest) * delta).sum((0, 2))


def second_deltas(results: Results, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
    """Return (b, c) of ``rules/tangent.py`` like lse; 0 for a row that sees nothing.

    ``b = g.out - a'`` and ``c = g.out' + e.out - a``.
    """
    out, lse, tout, _ = results
    e, a, g, at = cotangents
    zero = torch.zeros_like(lse)
    b = zero if g is None else delta(out, g, lse, None)
    c = zero if g is None else delta(tout, g, lse, None)
    if e is not None:
        c = c + delta(out, e, lse, None)
    b, c = (x if t is None else x - t.to(lse.dtype) for x, t in ((b, at), (c, a)))
    empty = lse == -torch.inf
    return b.masked_fill(empty, 0.0), c.masked_fill(empty, 0.0)


def second_dsink(
    sink: Tensor,
    tsink: Tensor | None,
    rows: tuple[Tensor, Tensor],
    deltas: tuple[Tensor, Tensor],
    rest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sink and of its tangent, ``[Hq]`` each.

    ``rows`` is (lse, tlse), ``deltas`` is (b, c), and ``rest`` is as of ``dsink``.
    """
    lse, tlse = rows
    weight = _sink_weight(sink, lse, rest)
    d = -tlse if tsink is None else tsink.detach()[:, None].to(lse.dtype) - tlse
    ds, dts = tangent.score_gradients(weight, 0.0, 0.0, d, *deltas)
    return ds.sum((0, 2)), dts.sum((0, 2))
