"""The order of the tiles of packed sequences, made on the device: nothing is read back.

Sequence after sequence, the longest first, so that its keys and values stay in the L2 cache;
within one, sections of heads, and within a section the longest tile first. Blocks draw their
tiles from a counter, since only the device knows how long they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.compiled import Launch

#: the counter, the number of tiles of one head, and (from here) where each sequence's begin
HEADER = 2
_CHUNK = 128


class Pointers(NamedTuple):
    order: Any
    cu: Any


@triton.jit
def _place(t, batch, TOKENS: tl.constexpr, HEADER: tl.constexpr, CHUNK: tl.constexpr):
    """Program b writes the number b in the rows of its sequence."""
    order, cu_q = t.order, t.cu
    b = tl.program_id(0)
    length = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
    before = tl.zeros([CHUNK], tl.int32)
    every = tl.zeros([CHUNK], tl.int32)
    for first in range(0, batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < batch
        size = tl.load(cu_q + other + 1, there, 0) - tl.load(cu_q + other, there, 0)
        tiles = (size + TOKENS - 1) // TOKENS
        every += tiles
        before += tl.where((size > length) | ((size == length) & (other < b)), tiles, 0)
    begin = tl.sum(before, 0)
    tl.store(order + HEADER + b, begin)
    if b == 0:
        tl.store(order, 0)
        tl.store(order + 1, tl.sum(every, 0))
    rows = order + HEADER + batch + begin
    tiles = (length + TOKENS - 1) // TOKENS
    for first in range(0, tiles, CHUNK):
        m = first + tl.arange(0, CHUNK)
        tl.store(rows + m, b + 0 * m, m < tiles)


def most_tiles(total: int, longest: int, batch: int, tokens: int) -> int:
    """No fewer than there can be: every sequence ends in a tile that may be bare."""
    return min(total // tokens + batch, batch * -(-longest // tokens))


@lru_cache(maxsize=256)
def _placing(batch: int, tokens: int, device: torch.device) -> tuple[Launch, tuple[Any, ...]]:
    # of the device as well: a launch keeps what it has loaded
    launch = Launch(_place, (batch, 1, 1), {"num_warps": 4, "enable_fp_fusion": True})
    return launch, (batch, *map(tl.constexpr, (tokens, HEADER, _CHUNK)))


def order(cu: Tensor, batch: int, most: int, tokens: int) -> Tensor:
    """Sequences that begin at ``cu``, in ``most`` tiles at most of ``tokens`` positions."""
    made = torch.empty(HEADER + batch + most, dtype=torch.int32, device=cu.device)
    launch, numbers = _placing(batch, tokens, cu.device)
    launch((), Pointers(made, cu), numbers)
    return made
