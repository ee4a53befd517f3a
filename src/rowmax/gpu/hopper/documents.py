"""The documents of a mask: the key tiles that share one with a query tile, and their ids.

Any order of ids is valid; sorted ids are fast. A query tile skips the key tiles before the first
and after the last that share an id with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...call.problem import Problem, Tensors
from ...rules.mask import tile_range


class Spans(NamedTuple):
    """The documents of a call as the forward reads them."""

    spans: Tensor  # int32 [B, query tiles, 2], the columns that a query tile may see
    q_range: Tensor  # int32 [B|1, warpgroups' tiles, 2], the least and the greatest id
    k_range: Tensor  # int32 [B|1, key tiles, 2]


def _met(ids: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (begin, end) of the other tiles whose range of ids overlaps with that of each tile."""
    (low, high), (other_low, other_high) = ids, others
    meet = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    n = meet.shape[2]
    tile = torch.arange(n, device=meet.device)
    return torch.where(meet, tile, n).amin(2), torch.where(meet, tile + 1, 0).amax(2)


def tile_spans(
    resident: Tensor, streamed: Tensor, block: int, block_streamed: int, batch: int
) -> Tensor:
    """Return int32 ``[B, resident tiles, 2]``: the first and past the last streamed tile of each.

    The arguments are the ids of both sides, ``[B|1, N]``. Neither bound decreases from one tile to
    the next, so the resident tiles of a streamed one are an interval too.
    """
    begin, end = _met(tile_range(resident, block), tile_range(streamed, block_streamed))
    begin = begin.flip(1).cummin(1)[0].flip(1)
    end = end.cummax(1)[0]
    return torch.stack([begin, end], -1).int().expand(batch, -1, -1).contiguous()


def spans_of(p: Problem, t: Tensors, warpgroups: int, tokens: int, block_k: int) -> Spans:
    """Return what the forward reads of documents."""
    assert t.q_ids is not None
    assert t.k_ids is not None
    q_range, k_range = tile_range(t.q_ids, tokens), tile_range(t.k_ids, block_k)
    begin, end = _met(tile_range(t.q_ids, tokens * warpgroups), k_range)
    spans = (torch.stack([begin, end], -1) * block_k).expand(p.batch, -1, -1)
    q_range, k_range = (torch.stack(x, -1).contiguous() for x in (q_range, k_range))
    return Spans(spans.int().contiguous(), q_range, k_range)
