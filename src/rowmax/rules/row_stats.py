"""The numbers of each row that a backward reads before its tiles.

``Delta_i = dO_i . out_i``; the gradient of lse is subtracted: ``dS = P (dP - (Delta - dLSE))``.
First the rules of numbers, which kernels bind to their language, then the rules over tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import bound
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
    """Return ``Delta - dLSE`` like lse, ``[B, Hq, Nq]``; 0 for a row that sees nothing.

    Its gradients are 0, even where dout or dlse is NaN.
    """
    found = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        found = found - dlse.to(lse.dtype)
    return found.masked_fill(lse == -torch.inf, 0.0)


def score_lse(lse: Tensor, natural: bool) -> Tensor:
    """Return lse in the units of the scores, +inf for a row without weights."""
    return _without_weights(lse if natural else lse * LOG2E)


def dsink(sink: Tensor, lse: Tensor, delta: Tensor, rest: Tensor | None) -> Tensor:
    """Return ``dsigma_h = -sum_i exp(sigma_h - LSE_i) (Delta_i - dLSE_i)``, ``[Hq]``.

    lse is natural; LSE is its sum with ``rest``, the part that rounding took from lse.
    """
    rest2 = 0.0 if rest is None else rest * LOG2E
    weight = _natural_weight(sink.detach()[:, None].to(lse.dtype), _without_weights(lse), rest2)
    return -(weight * delta).sum((0, 2))
