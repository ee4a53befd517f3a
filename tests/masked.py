"""Return what a mask allows as a boolean tensor, and that tensor by tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmax.call.check import Arguments
from rowmax.call.inputs import Tensors
from rowmax.call.normalize import normalized
from rowmax.call.problem import Problem, problem_of
from rowmax.masks import Mask, as_mask
from rowmax.rules.mask import dense


def posed(mask: Mask | Tensor, b: int, h: int, nq: int, nk: int) -> tuple[Problem, Tensors]:
    q, k = torch.zeros(b, nq, h, 4), torch.zeros(b, nk, h, 4)
    tensors, options, _ = normalized(Arguments(q, k, k, mask=as_mask(mask)))
    return problem_of(tensors, options), tensors


def allowed(mask: Mask | Tensor, b: int, h: int, nq: int, nk: int) -> Tensor:
    return dense(*posed(mask, b, h, nq, nk)).expand(b, h, nq, nk)


def by_tile(seen: Tensor, block_q: int, block_k: int) -> list[tuple[int, int, Tensor]]:
    rows, cols = seen.split(block_q, 2), None
    tiles = []
    for i, strip in enumerate(rows):
        cols = strip.split(block_k, 3)
        tiles += [(i, j, tile) for j, tile in enumerate(cols)]
    return tiles
