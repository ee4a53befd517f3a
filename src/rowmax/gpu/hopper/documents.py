"""Where the documents of a mask lie: which key tiles a query tile may meet, and of what ids.

Any order of ids is right; sorted ones are fast, since what is skipped is what lies outside the
first and the last key tile that share an id with a query tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...call.problem import Problem, Tensors
from ...rules.mask import tile_range


class Spans(NamedTuple):
    spans: Tensor  # int32 [B, query tiles, 2], the columns that a query tile may meet
    q_range: Tensor  # int32 [B|1, warpgroups' tiles, 2], the least and the greatest id
    k_range: Tensor  # int32 [B|1, key tiles, 2]


def tile_spans(stays: Tensor, passes: Tensor, block: int, block_passing: int, batch: int) -> Tensor:
    """int32 ``[B, tiles of what stays, 2]``: from which to which tile of what passes by it meets.

    ``stays`` and ``passes`` are ids, ``[B|1, N]``. Neither bound ever falls from one tile to the
    next, so that what meets a tile of the other side is an interval too.
    """
    low, high = tile_range(stays, block)
    low_passing, high_passing = tile_range(passes, block_passing)
    meet = (low[:, :, None] <= high_passing[:, None]) & (low_passing[:, None] <= high[:, :, None])
    n = meet.shape[2]
    tile = torch.arange(n, device=meet.device)
    begin = torch.where(meet, tile, n).amin(2)
    end = torch.where(meet, tile + 1, 0).amax(2)
    begin = begin.flip(1).cummin(1)[0].flip(1)
    end = end.cummax(1)[0]
    return torch.stack([begin, end], -1).int().expand(batch, -1, -1).contiguous()


def spans_of(p: Problem, t: Tensors, warpgroups: int, tokens: int, block_k: int) -> Spans:
    assert t.q_ids is not None
    assert t.k_ids is not None
    q_range = torch.stack(tile_range(t.q_ids, tokens), -1)
    k_range = torch.stack(tile_range(t.k_ids, block_k), -1)
    low, high = tile_range(t.q_ids, tokens * warpgroups)
    meet = (low[:, :, None] <= k_range[:, None, :, 1]) & (
        k_range[:, None, :, 0] <= high[:, :, None]
    )
    n = meet.shape[2]
    column = torch.arange(n, device=meet.device)
    begin = torch.where(meet, column, n).amin(2) * block_k
    end = torch.where(meet, column + 1, 0).amax(2) * block_k
    spans = torch.stack([begin, end], -1).expand(p.batch, -1, -1)
    return Spans(spans.int().contiguous(), q_range.contiguous(), k_range.contiguous())
