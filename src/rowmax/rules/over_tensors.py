"""The rules bound to torch's functions, for tensors that broadcast and for numbers.

Allocating a tile costs up to a fifth of a call on a CPU. The operators of a rule overwrite an
``Overwritten`` tile instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import band, bound, softmax
from . import score as _score
from . import tangent as _tangent


class Overwritten:
    """A tile that the operators of a rule overwrite."""

    def __init__(self, tile: Tensor) -> None:
        self.tile = tile

    def __add__(self, other: Any) -> Overwritten:
        self.tile.add_(other)
        return self

    def __sub__(self, other: Any) -> Overwritten:
        if isinstance(other, Factors):
            self.tile.addcmul_(*other.factors, value=-1)
        else:
            self.tile.sub_(other)
        return self

    def __rsub__(self, other: Any) -> Overwritten:
        self.tile.neg_().add_(other)
        return self

    def __mul__(self, other: Any) -> Overwritten:
        if other is self:
            self.tile.square_()
        elif isinstance(other, Tensor) or other != 1:
            self.tile.mul_(other)
        return self

    __rmul__ = __mul__


class Kept(Overwritten):
    """A tile whose product is a new tile."""

    def __mul__(self, other: Any) -> Overwritten:
        return Overwritten(self.tile * other)


class Factors:
    """The factors of a product that is computed where it is subtracted."""

    def __init__(self, x: Tensor, *y: Tensor) -> None:
        self.factors = x, *y

    def __mul__(self, y: Tensor) -> Factors:
        return Factors(*self.factors, y)

    __rmul__ = __mul__


def _max(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp(min=y)


def _min(x: Tensor, y: Tensor | float) -> Tensor:
    return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp(max=y)


def _where(condition: Tensor, x: float, y: Tensor) -> Tensor:
    return y.masked_fill(condition, x)


any_range = bound(band.any_range, max=_max, min=_min)
all_range = bound(band.all_range, max=_max, min=_min)
moved = bound(softmax.moved, max=_max, where=_where)
with_sink = bound(softmax.with_sink, max=_max, where=_where, exp2=torch.exp2)

_tile_score = bound(_score.score, tanh=lambda x: Kept(x.tile.tanh_()))


def score(x: Tensor, terms: _score.ScoreTerms) -> tuple[Tensor, Tensor]:
    """Return (s, y) of the products x, which are overwritten; y is a tile only under a softcap."""
    if terms.distance is not None:
        terms = terms._replace(distance=Factors(terms.distance))
    s, y = _tile_score(Overwritten(x), terms)
    return s.tile, y.tile


def product_gradient(ds: Tensor, y: Tensor, terms: _score.ScoreTerms) -> Tensor:
    """Return dX, which overwrites y where it is not dS."""
    found = _score.product_gradient(ds, Overwritten(y), terms)
    return found.tile if isinstance(found, Overwritten) else found


head_gradient = _score.head_gradient
score_tangent = _score.score_tangent
product_curvature = _score.product_curvature
sink_in_tangent = bound(_tangent.sink_in_tangent, where=_where, exp2=torch.exp2)
out_tangent = _tangent.out_tangent
tangent_base = bound(_tangent.tangent_base, where=torch.where)


def score_gradient(p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    """Return dS, which overwrites dP."""
    return softmax.score_gradient(p, Overwritten(dp), delta).tile


def score_gradients(
    p: Tensor, beta: Tensor, gamma: Tensor, d: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (dS, dS'), which overwrite gamma and beta."""
    dts = score_gradient(p, beta, b)
    return score_gradient(p, gamma, c).addcmul_(d, dts), dts
