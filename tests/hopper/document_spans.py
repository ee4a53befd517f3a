"""The tables of documents in torch: the definition of ``gpu/hopper/documents.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmax.call.problem import Problem, Tensors
from rowmax.rules.mask import tile_range


def met(ids: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (begin, end) of the other tiles whose range of ids overlaps with that of each tile."""
    (low, high), (other_low, other_high) = ids, others
    meet = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    n = meet.shape[2]
    tile = torch.arange(n)
    return torch.where(meet, tile, n).amin(2), torch.where(meet, tile + 1, 0).amax(2)


def sorted_spans(
    resident: Tensor, streamed: Tensor, block: int, block_streamed: int, batch: int
) -> Tensor:
    """Return ``documents.tile_spans`` of the same arguments."""
    begin, end = met(tile_range(resident, block), tile_range(streamed, block_streamed))
    begin = begin.flip(1).cummin(1)[0].flip(1)
    return torch.stack([begin, end.cummax(1)[0]], -1).int().expand(batch, -1, -1)


def tables(
    p: Problem, t: Tensors, warpgroups: int, tokens: int, block_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``documents.spans_of`` of the same arguments."""
    assert t.q_ids is not None
    assert t.k_ids is not None
    q_range, k_range = tile_range(t.q_ids, tokens), tile_range(t.k_ids, block_k)
    spans = torch.stack(met(tile_range(t.q_ids, tokens * warpgroups), k_range), -1) * block_k
    spans = spans.int().expand(p.batch, -1, -1).contiguous()
    pairs = (torch.stack(x, -1).contiguous() for x in (q_range, k_range))
    return spans, *pairs, torch.zeros(1, dtype=torch.int32)
