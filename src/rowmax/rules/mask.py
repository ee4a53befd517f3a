"""Masks over torch tensors: the permission of each pair, the state of each tile, document ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors

# What a backend does with a tile of (queries, keys).
SKIP, PARTIAL, FULL = 0, 1, 2


def offset(problem: Problem, tensors: Tensors) -> int | Tensor:
    """Return the key position of query 0; query i stands i further on.

    An int, or ``[B, 1, 1, 1]`` where positions are aligned to the lengths. Not of packed calls,
    whose sequences have offsets of their own.
    """
    if problem.align == "keys":
        return problem.offset
    assert tensors.lengths is not None
    used = tensors.lengths.to(torch.int64).clamp(0, problem.nk)
    return used[:, None, None, None] - problem.nq


def dense(problem: Problem, tensors: Tensors, start: int | Tensor | None = None) -> Tensor:
    """Every pair's permission, bool ``[B|1, Hq|1, Nq, Nk]``: the definition of a mask.

    ``start`` is the key position of query 0; None: as ``offset`` says.
    """
    device = tensors.q.device
    start = offset(problem, tensors) if start is None else start
    i = torch.arange(problem.nq, device=device)[:, None] + start
    j = torch.arange(problem.nk, device=device)[None, :]
    seen = torch.ones(1, 1, problem.nq, problem.nk, dtype=torch.bool, device=device)
    if problem.left is not None:
        seen = seen & (j >= i - problem.left)
    if problem.right is not None:
        seen = seen & (j <= i + problem.right)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        seen = seen & (tensors.q_ids[:, None, :, None] == tensors.k_ids[:, None, None, :])
    if tensors.lengths is not None:
        seen = seen & (j < tensors.lengths[:, None, None, None])
    if tensors.allowed is not None:
        seen = seen & tensors.allowed
    return seen


def tile_states(problem: Problem, tensors: Tensors, block_q: int, block_k: int) -> Tensor:
    """Each tile's state, uint8 ``[B|1, Hq|1, tiles of queries, tiles of keys]``.

    ``SKIP`` holds no allowed pair, ``FULL`` nothing but allowed pairs, ``PARTIAL`` is anything
    else: a tile may be called partial without need, never skipped or full without right.
    The map costs one byte a tile; a boolean tensor is read once to make it.
    """
    nq, nk, device = problem.nq, problem.nk, tensors.q.device
    i0 = torch.arange(0, nq, block_q, device=device)[:, None]
    j0 = torch.arange(0, nk, block_k, device=device)[None, :]
    i1 = (i0 + block_q).clamp(max=nq) - 1  # the last row and column of the tile
    j1 = (j0 + block_k).clamp(max=nk) - 1
    start = offset(problem, tensors)
    low, high = i0 + start, i1 + start
    some = torch.ones(1, 1, i0.shape[0], j0.shape[1], dtype=torch.bool, device=device)
    every = some.clone()
    if problem.left is not None:
        some = some & (j1 >= low - problem.left)
        every = every & (j0 >= high - problem.left)
    if problem.right is not None:
        some = some & (j0 <= high + problem.right)
        every = every & (j1 <= low + problem.right)
    if tensors.lengths is not None:
        lengths = tensors.lengths[:, None, None, None]
        some = some & (j0 < lengths)
        every = every & (j1 < lengths)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        q_low, q_high = tile_range(tensors.q_ids, block_q)
        k_low, k_high = tile_range(tensors.k_ids, block_k)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    if tensors.allowed is not None:
        any_allowed, all_allowed = _tile_any_all(problem, tensors.allowed, block_q, block_k)
        some = some & any_allowed
        every = every & all_allowed
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def tile_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest id of each block, ``[B|1, blocks]``."""
    pad = -ids.shape[1] % block
    last = ids[:, -1:].expand(-1, pad)  # repeats an id that the block already has
    blocks = torch.cat([ids, last], 1).unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _tile_any_all(
    problem: Problem, allowed: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Whether any and whether all of a boolean tensor's pairs are allowed, tile by tile."""
    allowed = distinct(allowed)
    return (
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.any), 2, block_q, torch.any),
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.all), 2, block_q, torch.all),
    )


def distinct(t: Tensor) -> Tensor:
    """View of a tensor in which every dimension that was expanded has the size 1.

    Maps of tiles are made of this view, so their shapes, and steps into them, follow it.
    """
    return t[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())]


def _by_blocks(t: Tensor, dim: int, block: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Each block along a dimension reduced to one; a dimension of 1 broadcasts and stays."""
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
    """The document of each of n positions, ``[1, n]``: [0, 2, 5] -> [0, 0, 1, 1, 1]."""
    starts = cu_seqlens[1:].clamp(0, n).to(torch.int64)
    begun = torch.zeros(n + 1, dtype=torch.int32, device=cu_seqlens.device)
    begun = begun.scatter_add(0, starts, torch.ones_like(starts, dtype=torch.int32))
    return begun.cumsum(0, dtype=torch.int32)[None, :n]


def both_documents(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of two int32 (q_ids, k_ids): ids that are equal exactly where both are.

    A pair's new id is its rank among the pairs of its sequence. Shapes do not depend on values,
    so that it is traced like everything else and waits for no device.
    """
    q_pairs, k_pairs = ((x.to(torch.int64) << 32) + y for x, y in zip(a, b, strict=True))
    batch = max(q_pairs.shape[0], k_pairs.shape[0])
    pairs = torch.cat([t.expand(batch, -1) for t in (q_pairs, k_pairs)], 1)
    values, order = pairs.sort(1)
    rank = torch.nn.functional.pad((values.diff(dim=1) != 0).cumsum(1), (1, 0))
    ids = torch.zeros_like(pairs).scatter(1, order, rank).to(torch.int32)
    nq = q_pairs.shape[1]
    return ids[:, :nq], ids[:, nq:]
