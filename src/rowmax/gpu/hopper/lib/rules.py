"""The rules of ``rowmax.rules``, compiled for the kernels or bound to tensors for the host."""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....rules import band, bound, score, softmax
from .scores import tanh_from_exponential, tanh_of_hardware


def met_tiles(low, high, block):
    """Return (lo, hi): tiles lo to hi - 1 hold the positions in [low, high).

    There is always at least one. It is fully masked where the range is empty, so that every tile of
    the kernel passes the same barriers.
    """
    hi = max((high + block - 1) // block, 1)
    return min(low // block, hi - 1), hi


_IN_KERNELS = {"max": gl.maximum, "min": gl.minimum}
_OF_TENSORS = {"max": torch.clamp_min, "min": torch.clamp_max}

any_range = gluon.jit(bound(band.any_range, **_IN_KERNELS))
all_range = gluon.jit(bound(band.all_range, **_IN_KERNELS))
key_tiles = gluon.jit(bound(met_tiles, **_IN_KERNELS))
touched_tiles = gluon.jit(bound(band.touched_tiles, max=gl.maximum))
score_bfloat16 = gluon.jit(bound(score.score, tanh=tanh_of_hardware))
score_float16 = gluon.jit(bound(score.score, tanh=tanh_from_exponential))
product_gradient = gluon.jit(score.product_gradient)
score_gradient = gluon.jit(softmax.score_gradient)
with_sink = gluon.jit(
    bound(
        softmax.with_sink,
        max=gl.maximum,
        where=gl.where,
        exp2=gl.exp2,
        inf=gl.constexpr(math.inf),
        LOG2E=gl.constexpr(softmax.LOG2E),
    )
)

#: for tensors of positions on the host
any_range_of_tensors = bound(band.any_range, **_OF_TENSORS)
key_tiles_of_tensors = bound(met_tiles, **_OF_TENSORS)
touched_tiles_of_tensors = bound(band.touched_tiles, max=torch.clamp_min)
