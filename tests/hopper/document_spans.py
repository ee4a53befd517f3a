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
    resident: Tensor, streamed: Tensor, group: int, rows: int, block_streamed: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Return ``documents.tile_spans`` of the same arguments."""
    others = tile_range(streamed, block_streamed)
    begin, end = met(tile_range(resident, group * rows), others)
    begin = begin.flip(1).cummin(1)[0].flip(1)
    spans = torch.stack([begin, end.cummax(1)[0]], -1).int().expand(batch, -1, -1)
    return spans, alike(tile_range(resident, rows), others).expand(batch, -1, -1)


def alike(ids: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> Tensor:
    """Return int32 ``[B|1, tiles, 2]``: the first other tiles with the one id of each tile."""
    (low, high), (other_low, other_high) = ids, others
    same = (low == high)[:, :, None] & (other_low == other_high)[:, None]
    same = same & (low[:, :, None] == other_low[:, None])
    n = same.shape[2]
    tile = torch.arange(n)
    begin = torch.where(same, tile, n).amin(2)
    end = torch.where(~same & (tile > begin[..., None]), tile, n).amin(2)
    return torch.stack([begin, end], -1).int()


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
