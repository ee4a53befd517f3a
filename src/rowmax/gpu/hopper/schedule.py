"""Which tile is computed where and when, and which key tiles it needs.

The order is data, made once for a shape and kept on the device: one row a tile, (first token,
head, sequence, 0). Block n takes rows n, n + blocks, n + 2 blocks, ... up to its own end.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_place(C: gl.constexpr, order):
    """(this block's first place in the order, its end)."""
    table, ends, counter, heads, kv_heads, keys = order
    n = gl.program_id(0)
    if C.VARLEN:
        end = gl.load(ends) * heads
    elif C.DRAWN:
        end = gl.load(ends)
    else:
        end = gl.load(ends + n)
    return n, end


@gluon.jit
def next_place(C: gl.constexpr, n, order):
    """The place after n: one drawn from the counter, or what the host has set down."""
    table, ends, counter, heads, kv_heads, keys = order
    if C.DRAWN:
        n = gl.num_programs(0) + gl.atomic_add(counter, 1)
    else:
        n = n + gl.num_programs(0)
    return n


@gluon.jit
def row_at(C: gl.constexpr, n, order, sizes, seqs):
    """The tile at place n: first token, head, sequence."""
    table, ends, counter, heads, kv_heads, keys = order
    if C.VARLEN:
        # packed.py: where sequences begin, then the sequence of each tile of one head
        cu_q, cu_k, batch, spans = seqs
        b = gl.load(table + batch + n // heads)
        begin = gl.load(table + b)
        block: gl.constexpr = C.TILE
        tiles = (gl.load(cu_q + b + 1) - gl.load(cu_q + b) + block - 1) // block
        nk = gl.load(cu_k + b + 1) - gl.load(cu_k + b)
        # as many heads side by side as have their keys and values in the cache
        many = gl.minimum(gl.maximum(keys // gl.maximum(nk, 1), 1), kv_heads) * (heads // kv_heads)
        place = n - begin * heads
        section = place // (many * tiles)
        place = place - section * many * tiles
        head = section * many
        wide = gl.minimum(many, heads - head)
        m = place // wide
        head = head + place - m * wide
        if C.LAST_FIRST:
            m = tiles - 1 - m
        token = m * block
    else:
        token = gl.load(table + 4 * n)
        head = gl.load(table + 4 * n + 1)
        b = gl.load(table + 4 * n + 2)
    return token, head, b


@gluon.jit
def tile_of(C: gl.constexpr, row, sizes, seqs, lengths):
    """The tile of a row: (token, head, sequence, query row, key row, nq, nk, offset, lo, hi).

    ``query row`` and ``key row`` are where a packed sequence begins; ``lo`` and ``hi`` bound the
    key tiles. There is always one, wholly masked where nothing is to be seen, so that every
    tile takes the same path through the barriers.
    """
    token, head, b = row
    nq, nk, left, right = sizes
    cu_q, cu_k, batch, spans = seqs
    q_row, k_row = 0, 0
    if C.VARLEN:
        q_row = gl.load(cu_q + b)
        k_row = gl.load(cu_k + b)
        nq = gl.load(cu_q + b + 1) - q_row
        nk = gl.load(cu_k + b + 1) - k_row
    offset = nk - nq
    if C.PREFIX:
        nk = gl.minimum(nk, gl.load(lengths + b))
    last = gl.minimum(token + C.WARPGROUPS * C.TOKENS, nq) - 1
    hi_col = nk
    lo_col = 0
    if C.RIGHT:
        hi_col = gl.minimum(nk, last + offset + right + 1)
    if C.LEFT:
        lo_col = gl.maximum(token + offset - left, 0)
    if C.DOCUMENTS:
        tiles = (sizes[0] + C.WARPGROUPS * C.TOKENS - 1) // (C.WARPGROUPS * C.TOKENS)
        at = spans + 2 * (b * tiles + token // (C.WARPGROUPS * C.TOKENS))
        lo_col = gl.maximum(lo_col, gl.load(at))
        hi_col = gl.minimum(hi_col, gl.load(at + 1))
    hi = gl.maximum((hi_col + C.BLOCK_K - 1) // C.BLOCK_K, 1)
    lo = 0
    if C.LEFT or C.DOCUMENTS:
        lo = gl.minimum(lo_col // C.BLOCK_K, hi - 1)
    return token, head, b, q_row, k_row, nq, nk, offset, lo, hi


@gluon.jit
def full_tiles(C: gl.constexpr, first, last, tile, sizes):
    """Where the key tiles ``lo <= j < hi - 1`` change: partial from a up, full from z to a.

    ``first`` and ``last`` are a warpgroup's own query tokens. Below z they are partial again.
    """
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    nq_, nk_, left, right = sizes
    a = hi - 1
    z = lo
    if C.DOCUMENTS:  # any tile may be partial: each is looked at
        a = lo
    elif C.RIGHT:
        a = gl.minimum(gl.maximum((first + offset + right + 1) // C.BLOCK_K, lo), hi - 1)
    if C.LEFT and not C.DOCUMENTS:
        z = (gl.maximum(last + offset - left, 0) + C.BLOCK_K - 1) // C.BLOCK_K
        z = gl.minimum(gl.maximum(z, lo), a)
    return z, a


# --- the table ---------------------------------------------------------------------------------

#: what a tile costs beside its key tiles, in key tiles
OVERHEAD = 1.0
#: keys and values of the heads in flight should stay in the L2 cache; half of it is for them
SECTION_BYTES = 32 << 20


def steps_of(tokens: int, block_k: int, nq: int, nk: int, left: int | None, right: int | None):
    """The number of key tiles of each query tile of ``tokens`` positions, top to bottom."""
    first = torch.arange(0, nq, tokens)
    last = (first + tokens).clamp(max=nq) - 1
    offset = nk - nq
    hi = torch.full_like(first, nk) if right is None else (last + offset + right + 1).clamp(max=nk)
    hi = ((hi + block_k - 1) // block_k).clamp(min=1)
    if left is None:
        return hi
    lo = (first + offset - left).clamp(min=0) // block_k
    return hi - torch.minimum(lo, hi - 1)


def dense_table(
    steps: Tensor, tokens: int, batch: int, heads: int, section: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """(rows, each block's end) for ``batch x heads`` heads with the same query tiles.

    Where tiles differ, each section of heads goes longest tile first, every tile to the block
    that is free first: what a counter would do, known ahead. Where they do not, the tiles of a
    head go side by side, for the cache.
    """
    n = steps.shape[0]
    head = torch.arange(batch * heads)
    if bool((steps == steps[0]).all()):
        m, h = torch.arange(n).repeat(batch * heads), head.repeat_interleave(n)
        order = torch.arange(n * batch * heads)
        ends = order.new_tensor([len(order[i::blocks]) for i in range(blocks)])
        ends = torch.arange(blocks) + ends * blocks
        return table_rows(m[order] * tokens, h[order], heads), ends.int()
    longest = steps.argsort(descending=True, stable=True)
    parts = head.split(section)
    m = torch.cat([longest.repeat_interleave(part.shape[0]) for part in parts])
    h = torch.cat([part.repeat(n) for part in parts])
    place, ends = _first_free((steps[m] + OVERHEAD).tolist(), blocks)
    rows = torch.zeros(int(max(ends)), 4, dtype=torch.int32)
    rows[place] = table_rows(m * tokens, h, heads)
    return rows, torch.tensor(ends, dtype=torch.int32)


def table_rows(token: Tensor, head: Tensor, heads: int) -> Tensor:
    return torch.stack([token, head % heads, head // heads, torch.zeros_like(head)], 1).int()


def _first_free(costs: list[float], blocks: int) -> tuple[list[int], list[int]]:
    """The row of each tile, and where each block ends."""
    free = [(0.0, block, block) for block in range(blocks)]  # (time, block, next row)
    heapify(free)
    place = []
    for cost in costs:
        time, block, row = free[0]
        place.append(row)
        heapreplace(free, (time + cost, block, row + blocks))
    ends = {block: row for _, block, row in free}
    return place, [ends[block] for block in range(blocks)]
