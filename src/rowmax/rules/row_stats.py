"""The numbers of each row that a backward reads before its tiles, over torch tensors.

``Delta_i = dO_i . out_i``; the gradient of lse is subtracted: ``dS = P (dP - (Delta - dLSE))``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .softmax import LOG2E


def delta(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return ``Delta - dLSE`` like lse, ``[B, Hq, Nq]``; 0 for a row that sees nothing.

    Its gradients are 0, even where dout or dlse is NaN.
    """
    found = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        found = found - dlse.to(lse.dtype)
    return found.masked_fill(lse == -torch.inf, 0.0)


def score_lse(lse: Tensor, natural: bool) -> Tensor:
    """Return lse in the units of the scores, but +inf for -inf, which makes weights 0.

    It is -inf for a row that sees nothing, and for a sink that is too low for base 2.
    """
    lse = lse if natural else lse * LOG2E
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def dsink(sink: Tensor, lse: Tensor, delta: Tensor, rest: Tensor | None) -> Tensor:
    """Return ``dsigma_h = -sum_i exp(sigma_h - LSE_i) (Delta_i - dLSE_i)``, ``[Hq]``.

    lse is natural; LSE is its sum with ``rest``, the part that rounding took from lse.
    """
    x = sink.detach()[:, None].to(lse.dtype) - lse
    weight = torch.exp(x if rest is None else x - rest)
    return -(weight.masked_fill(lse == -torch.inf, 0.0) * delta).sum((0, 2))
