"""The tiles that a mask of documents or booleans leaves: a list for each resident tile, or a map.

Bands and prefixes are intervals and need no list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors
from ..rules import mask
from .kernel_args import Lists, Pairs
from .tiles import Tiles


def listed(problem: Problem) -> bool:
    """Return True if the tiles of a job come from a list or a map."""
    some = problem.nq > 0 and problem.nk > 0
    return some and (problem.documents or problem.allowed is not None)


def tile_pointers(
    problem: Problem, tensors: Tensors, tiles: Tiles, resident: str
) -> dict[str, Tensor]:
    """Return the pointers of a job: the map for a resident "bias", else memory for int32 lists.

    ``order [lists, 2 streamed]`` has room for the full tiles of a resident one and, from the second
    half on, for the partial ones. ``counts [lists, 2]`` is for their numbers (``tile_lists.py``).
    """
    if resident == "bias":
        return {"states": tile_states(problem, tensors, tiles).contiguous()}
    batch, heads, count, streamed = list_sizes(problem, tensors, tiles, resident)
    n, empty = batch * heads * count, tensors.q.new_empty
    order, counts = (empty((n, width), dtype=torch.int32) for width in (2 * streamed, 2))
    return {"order": order, "counts": counts}


def tile_states(problem: Problem, tensors: Tensors, tiles: Tiles) -> Tensor:
    """Return ``mask.tile_states``, with no full tile at a ragged edge.

    In a packed call bands and lengths differ between sequences. There only the boolean tensor
    decides, and no tile is full.
    """
    bq, bk = tiles.block_q, tiles.block_k
    if problem.varlen:
        problem = problem._replace(left=None, right=None, align="keys")
        tensors = tensors._replace(lengths=None)
    states = mask.tile_states(problem, tensors, bq, bk)
    if problem.varlen:
        return states.clamp(max=mask.PARTIAL)
    if problem.nk % bk:
        states[..., -1].clamp_(max=mask.PARTIAL)
    if problem.nq % bq:
        states[..., -1, :].clamp_(max=mask.PARTIAL)
    return states


def list_sizes(
    problem: Problem, tensors: Tensors, tiles: Tiles, resident: str
) -> tuple[int, int, int, int]:
    """Return (sequences, heads, resident tiles, streamed tiles) of the lists of a job."""
    batch, heads = 1, 1
    if tensors.allowed is not None:
        batch, heads = mask.distinct(tensors.allowed).shape[:2]
    if not problem.varlen:
        prefix = mask.prefix_of(problem, tensors)
        for x in (tensors.lengths, tensors.q_ids, tensors.k_ids, prefix):
            batch = max(batch, 1 if x is None else x.shape[0])
    n_q, n_k = -(-problem.nq // tiles.block_q), -(-problem.nk // tiles.block_k)
    return batch, heads, *((n_k, n_q) if resident == "keys" else (n_q, n_k))


def tile_strides(problem: Problem, tensors: Tensors, tiles: Tiles, resident: str) -> dict[str, Any]:
    """Return the strides of the pointers of ``tile_pointers``."""
    batch, heads, count, streamed = list_sizes(problem, tensors, tiles, resident)
    if resident == "bias":
        count *= streamed
    b, head = count * heads if batch > 1 else 0, count if heads > 1 else 0
    if resident == "bias":
        return {"states": Pairs(b, head, streamed)}
    return {"order": Lists(b, head, streamed)}
