"""Which tiles a mask of documents or booleans leaves: a list for each fixed tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.problem import Problem, Tensors
from ...rules import mask
from .bundles import Pointers
from .tiles import Tiles


def listed(problem: Problem) -> bool:
    """Whether tiles come from a list; bands and prefixes need none, they are intervals."""
    some = problem.nq > 0 and problem.nk > 0
    return some and (problem.documents or problem.allowed is not None)


def tile_order(problem: Problem, tensors: Tensors, tiles: Tiles, over: str) -> tuple[Tensor, ...]:
    """(order, counts), int32: the tiles ``over`` "keys" of each query tile, or the reverse.

    ``order [B|1, Hq|1, fixed, moving]`` has the full tiles, then the partial ones, then those to
    skip; ``counts [B|1, Hq|1, fixed, 2]`` says how many are full and how many partial.
    """
    states = tile_states(problem, tensors, tiles)
    if over == "queries":
        states = states.transpose(2, 3).contiguous()
    order = states.argsort(dim=-1, descending=True, stable=True)
    full, partial = (states == kind for kind in (mask.FULL, mask.PARTIAL))
    counts = torch.stack([full.sum(-1), partial.sum(-1)], -1)
    return order.to(torch.int32), counts.to(torch.int32)


def with_order(
    t: Pointers, problem: Problem, tensors: Tensors, tiles: Tiles, over: str
) -> Pointers:
    """The pointers, with those of the list if the problem has one."""
    if not listed(problem):
        return t
    order, counts = tile_order(problem, tensors, tiles, over)
    return t._replace(order=order, counts=counts)


def tile_states(problem: Problem, tensors: Tensors, tiles: Tiles) -> Tensor:
    """As ``mask.tile_states``, but no tile that runs over an edge is full.

    In a packed call the bands and lengths differ from sequence to sequence, so that only what
    the boolean tensor says of a tile is known, and no tile is known to be full.
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


def order_steps(problem: Problem, tensors: Tensors, tiles: Tiles, over: str) -> tuple[int, ...]:
    """(b, h) steps of the list in fixed tiles, and how long the list of one is."""
    batch, heads, n_q, n_k = _map_shape(problem, tensors, tiles)
    fixed, moving = (n_q, n_k) if over == "keys" else (n_k, n_q)
    return fixed * heads if batch > 1 else 0, fixed if heads > 1 else 0, moving


def state_steps(problem: Problem, tensors: Tensors, tiles: Tiles) -> tuple[int, ...]:
    """(b, h, tile of queries) steps of the map itself."""
    batch, heads, n_q, n_k = _map_shape(problem, tensors, tiles)
    tile = n_q * n_k
    return tile * heads if batch > 1 else 0, tile if heads > 1 else 0, n_k


def _map_shape(problem: Problem, tensors: Tensors, tiles: Tiles) -> tuple[int, int, int, int]:
    batch, heads = (1, 1)
    if tensors.allowed is not None:
        batch, heads = mask.distinct(tensors.allowed).shape[:2]
    if not problem.varlen:
        for x in (tensors.lengths, tensors.q_ids, tensors.k_ids):
            batch = max(batch, 1 if x is None else x.shape[0])
    return batch, heads, -(-problem.nq // tiles.block_q), -(-problem.nk // tiles.block_k)
