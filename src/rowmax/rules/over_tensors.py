"""The rules bound to torch's functions: of tensors, which broadcast, and numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from . import band, bound, score, softmax


def _max(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp(min=y)


def _min(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp(max=y)


any_range = bound(band.any_range, max=_max, min=_min)
all_range = bound(band.all_range, max=_max, min=_min)
capped_score = bound(score.score, tanh=torch.tanh)
through_softcap = score.through_softcap
moved = bound(softmax.moved, max=_max, where=torch.where)
with_sink = bound(softmax.with_sink, max=_max, where=torch.where, exp2=torch.exp2)
score_gradient = softmax.score_gradient
