"""The order of the tiles of packed sequences, made on the device: nothing is read back.

Longest tile first. A tile's place is the number of tiles that come before it, which its own
program counts; a tile is as long as the keys that it may reach.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem import Problem

_TILES = 16  # a program's share of one sequence
_SEQUENCES = 64  # how many others it compares them with at a time


@triton.jit
def _place(
    table, total, cu_q, cu_k, batch, TOKENS: tl.constexpr, RIGHT: tl.constexpr,
    TILES: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    nq = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
    nk = tl.load(cu_k + b + 1) - tl.load(cu_k + b)
    m = tl.program_id(1) * TILES + tl.arange(0, TILES)
    reach = nk + 0 * m
    if RIGHT:  # the same for all up to the band's right limit
        reach = (m + 1) * TOKENS + nk - nq
    before = tl.zeros([TILES], tl.int32)
    tiles = tl.zeros([SEQUENCES], tl.int32)
    for first in range(0, batch, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        there = other < batch
        other_q = tl.load(cu_q + other + 1, there, 0) - tl.load(cu_q + other, there, 0)
        other_k = tl.load(cu_k + other + 1, there, 0) - tl.load(cu_k + other, there, 0)
        n = (other_q + TOKENS - 1) // TOKENS
        tiles += n
        earlier = other[None, :] < b
        if RIGHT:
            # its tile i reaches (i + 1) TOKENS + offset: count those beyond, and one as far
            room = reach[:, None] - (other_k - other_q)[None, :]
            short = tl.minimum(tl.maximum(room // TOKENS, 0), n[None, :])
            longer = n[None, :] - short
            as_far = (room > 0) & (room % TOKENS == 0) & (room // TOKENS <= n[None, :])
            longer += (as_far & earlier).to(tl.int32)
        else:
            far = other_k[None, :] + 0 * m[:, None]
            near = reach[:, None]
            longer = tl.where((far > near) | ((far == near) & earlier), n[None, :], 0)
        before += tl.sum(longer, 1)
    if not RIGHT:
        before += m
    tl.store(table + 2 * before, m * TOKENS, m * TOKENS < nq)
    tl.store(table + 2 * before + 1, b + 0 * m, m * TOKENS < nq)
    if (b == 0) & (tl.program_id(1) == 0):
        tl.store(total, tl.sum(tiles, 0))


def most_tiles(p: Problem, tokens: int) -> int:
    """No fewer than there can be: every sequence ends in a tile that may be bare."""
    return min(p.total_q // tokens + p.batch, p.batch * -(-p.nq // tokens))


def order(p: Problem, cu_q: Tensor, cu_k: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(rows: first token and sequence, how many)."""
    both = torch.empty(2 * most_tiles(p, tokens) + 1, dtype=torch.int32, device=cu_q.device)
    table, total = both[1:], both[:1]
    grid = (p.batch, -(-p.nq // (tokens * _TILES)))
    _place[grid](
        table, total, cu_q, cu_k, p.batch, tokens, p.right is not None, _TILES, _SEQUENCES
    )  # fmt: skip
    return table, total
