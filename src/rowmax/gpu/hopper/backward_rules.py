"""The rules that the backward uses, compiled for Gluon and bound to tensors for the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...rules import band, bound, score, softmax
from .terms import tanh

_EXTREMES: dict[str, Any] = {"max": gl.maximum, "min": gl.minimum}
any_range = gluon.jit(bound(band.any_range, **_EXTREMES))
all_range = gluon.jit(bound(band.all_range, **_EXTREMES))
touched_tiles = gluon.jit(bound(band.touched_tiles, max=gl.maximum))


@gluon.jit
def _tanh_bfloat16(x):
    return tanh(x, gl.bfloat16)


@gluon.jit
def _tanh_float16(x):
    return tanh(x, gl.float16)


score_bfloat16 = gluon.jit(bound(score.score, tanh=_tanh_bfloat16))
score_float16 = gluon.jit(bound(score.score, tanh=_tanh_float16))
through_softcap = gluon.jit(score.through_softcap)
score_gradient = gluon.jit(softmax.score_gradient)


def _max(x: Any, y: Any) -> Tensor:
    return torch.as_tensor(x).clamp(min=y)


def _min(x: Any, y: Any) -> Tensor:
    return torch.as_tensor(x).clamp(max=y)


_any_range = bound(band.any_range, max=_max, min=_min)
_touched_tiles = bound(band.touched_tiles, max=_max)


def tile_count(
    blocks: tuple[int, int], resident: int, streamed: int, back: int | None, ahead: int | None
) -> Tensor:
    """Return the number of streamed tiles that each resident tile meets, int64.

    ``blocks`` are the rows of a resident and of a streamed tile; ``resident`` and ``streamed`` are
    the lengths of both sides, whose last positions are aligned.
    """
    first = torch.arange(0, resident, blocks[0])
    last = (first + blocks[0]).clamp(max=resident) - 1
    low, high = _any_range(first, last, streamed - resident, back, ahead, streamed)
    lo, hi = _touched_tiles(low, high, blocks[1])
    return (hi - lo).expand(first.shape)
