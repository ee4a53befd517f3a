"""Masks over torch tensors: the permission of each pair, the state of each tile, document ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors
from .band import fills, touches
from .over_tensors import all_range, any_range

#: the states of a tile of (queries, keys): no pair, some pairs or all pairs may attend
SKIP, PARTIAL, FULL = 0, 1, 2


def offset(problem: Problem, tensors: Tensors) -> int | Tensor:
    """Return the key position of query 0; query i is at this position plus i.

    An int, or ``[B, 1, 1, 1]`` where positions are aligned to the lengths. Packed calls have one
    offset a sequence and do not use this.
    """
    if problem.align == "keys":
        return problem.offset
    assert tensors.lengths is not None
    used = tensors.lengths.to(torch.int64).clamp(0, problem.nk)
    return used[:, None, None, None] - problem.nq


def dense(problem: Problem, tensors: Tensors, start: int | Tensor | None = None) -> Tensor:
    """Return True where a pair may attend, bool ``[B|1, Hq|1, Nq, Nk]``.

    ``start`` is the key position of query 0, by default ``offset``.
    """
    device = tensors.q.device
    i = torch.arange(problem.nq, device=device).view(1, 1, -1, 1)
    j = torch.arange(problem.nk, device=device).view(1, 1, 1, -1)
    low, high = any_range(i, i, *band_of(problem, tensors, start))
    seen = ((low <= j) & (j < high)).expand(-1, -1, problem.nq, -1)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        seen = seen & (tensors.q_ids[:, None, :, None] == tensors.k_ids[:, None, None, :])
    if tensors.allowed is not None:
        seen = seen & tensors.allowed
    return seen


def tile_states(problem: Problem, tensors: Tensors, block_q: int, block_k: int) -> Tensor:
    """Return each tile's state, uint8 ``[B|1, Hq|1, tiles of queries, tiles of keys]``.

    ``SKIP``: no pair may attend; ``FULL``: all may. ``PARTIAL`` is conservative: it may be returned
    for any tile, while SKIP and FULL are exact. The map has one byte a tile and reads a boolean
    tensor once.
    """
    nq, nk, device = problem.nq, problem.nk, tensors.q.device
    i0 = torch.arange(0, nq, block_q, device=device).view(1, 1, -1, 1)
    j0 = torch.arange(0, nk, block_k, device=device).view(1, 1, 1, -1)
    i1 = (i0 + block_q).clamp(max=nq) - 1  # the last row and column of the tile
    j1 = (j0 + block_k).clamp(max=nk) - 1
    band = band_of(problem, tensors)
    low, high = any_range(i0, i1, *band)
    some = touches(True, low, high, j0, j1).expand(-1, -1, i0.shape[2], -1)
    low, high = all_range(i0, i1, *band)
    every = fills(True, low, high, j0, j1).expand(-1, -1, i0.shape[2], -1)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        q_low, q_high = tile_range(tensors.q_ids, block_q)
        k_low, k_high = tile_range(tensors.k_ids, block_k)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = may_be_equal(some, q_low, q_high, k_low, k_high)
        every = are_equal(every, q_low, q_high, k_low, k_high)
    if tensors.allowed is not None:
        any_allowed, all_allowed = _tile_any_all(problem, tensors.allowed, block_q, block_k)
        some = some & any_allowed
        every = every & all_allowed
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def may_be_equal(also, q_low, q_high, k_low, k_high):
    """Return True where ids of queries and of keys may be equal, by their ranges, and ``also``."""
    return also & (q_low <= k_high) & (k_low <= q_high)


def are_equal(also, q_low, q_high, k_low, k_high):
    """Return True where the ids of queries and of keys are all one, and ``also``."""
    return also & (q_low == k_high) & (k_low == q_high)


def band_of(problem: Problem, tensors: Tensors, start: int | Tensor | None = None) -> tuple:
    """Return (shift, back, ahead, end, prefix) of the band of keys that queries see."""
    end = problem.nk if tensors.lengths is None else tensors.lengths[:, None, None, None]
    shift = offset(problem, tensors) if start is None else start
    return shift, *problem.limits, end, prefix_of(problem, tensors)


def prefix_of(problem: Problem, tensors: Tensors) -> Tensor | None:
    """Return the prefix ``[B, 1, 1, 1]`` that ``right`` does not limit, or None."""
    if tensors.prefix is None or problem.right is None:
        return None
    return tensors.prefix[:, None, None, None]


def tile_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest id of each block, ``[B|1, blocks]``."""
    pad = -ids.shape[1] % block
    last = ids[:, -1:].expand(-1, pad)  # repeats an id that the block already has
    blocks = torch.cat([ids, last], 1).unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _tile_any_all(
    problem: Problem, allowed: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Return (any, all): the tiles with an allowed pair, and the tiles without a masked one."""
    allowed = distinct(allowed)
    return (
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.any), 2, block_q, torch.any),
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.all), 2, block_q, torch.all),
    )


def distinct(t: Tensor) -> Tensor:
    """Return the view of a tensor in which every expanded dimension has the size 1.

    Maps of tiles are made from this view, so that shared slices are stored once.
    """
    return t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def _by_blocks(t: Tensor, dim: int, block: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce each block along a dimension to one element; a dimension of 1 broadcasts and stays."""
    n = t.shape[dim]
    if n == 1:
        return t
    whole = n - n % block
    parts = reduce(t.narrow(dim, 0, whole).unflatten(dim, (-1, block)), dim + 1)
    if whole == n:
        return parts
    return torch.cat([parts, reduce(t.narrow(dim, whole, n - whole), dim, keepdim=True)], dim)


# --- documents ---------------------------------------------------------------------------------


def ids_of_offsets(cu_seqlens: Tensor, n: int) -> Tensor:
    """Return the document of each of n positions, ``[1, n]``: [0, 2, 5] -> [0, 0, 1, 1, 1]."""
    starts = cu_seqlens[1:].clamp(0, n).to(torch.int64)
    begun = torch.zeros(n + 1, dtype=torch.int32, device=cu_seqlens.device)
    begun = begun.scatter_add(0, starts, torch.ones_like(starts, dtype=torch.int32))
    return begun.cumsum(0, dtype=torch.int32)[None, :n]


def offsets_of_ids(ids: Tensor) -> Tensor | None:
    """Return the offsets of documents of ids ``[n]``: [5, 5, 1, 1, 1] -> [0, 2, 5].

    None if positions of a document do not follow one another, or there are none. Reads the ids.
    """
    if not ids.numel():
        return None
    inner = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    offsets = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), ids.numel())))
    found = ids[offsets[:-1]]
    return offsets if found.unique().numel() == found.numel() else None


def both_documents(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids that are equal exactly where both of two int32 pairs (q_ids, k_ids) are.

    A pair's new id is its rank among the pairs of its sequence. Shapes do not depend on values: a
    compiler can trace it, and it never waits for a device.
    """
    q_pairs, k_pairs = ((x.to(torch.int64) << 32) + y for x, y in zip(a, b, strict=True))
    batch = max(q_pairs.shape[0], k_pairs.shape[0])
    pairs = torch.cat([t.expand(batch, -1) for t in (q_pairs, k_pairs)], 1)
    values, order = pairs.sort(1)
    rank = torch.nn.functional.pad((values.diff(dim=1) != 0).cumsum(1), (1, 0))
    ids = torch.zeros_like(pairs).scatter(1, order, rank).to(torch.int32)
    nq = q_pairs.shape[1]
    return ids[:, :nq], ids[:, nq:]
