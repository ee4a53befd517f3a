# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The lists of streamed tiles that a mask of documents or booleans leaves, one a resident tile.

A kernel states each tile, as ``rules/mask.tile_states`` does: in torch that takes forty launches,
which cost the host more than the forward of a thousand tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import lib, rules

#: the tiles that a program states at a time, without a boolean tensor
TILES = tl.constexpr(16)
LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num"])
def tile_lists_kernel(ptr, num, cfg, KEYS: tl.constexpr):
    """Store the list of a resident tile of queries, or of KEYS, and its counts.

    A list has room for all streamed tiles twice: first are the full ones, then, from the second
    half on, the partial ones.
    """
    count = tl.cdiv(num.longest_q, cfg.BLOCK_Q)
    streamed = tl.cdiv(num.longest_k, cfg.BLOCK_K)
    if KEYS:
        count, streamed = streamed, count
    lists = num.order
    number = tl.program_id(0)
    heads = tl.where(lists.b > 0, lists.b, tl.num_programs(0)) // count
    plane = number // count
    resident = number % count
    sizes = lib.Sizes(0, num.longest_q, 0, num.longest_k)
    place = lib.place_of(ptr, num, cfg, plane // heads, plane % heads, sizes)
    # with pairs one: of three axes, triton 3.6 loaded every second tile wrong on an H200
    AT_ONCE: tl.constexpr = TILES if ptr.allowed is None else 1
    order = ptr.order + tl.cast(number, tl.int64) * 2 * streamed
    n_full = 0
    n_partial = 0
    for first in tl.range(0, streamed, AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        there = tile < streamed
        tile = tl.minimum(tile, streamed - 1)
        some, every = tile_states(tile, resident, ptr, num, cfg, place, KEYS)
        full = (some & every & there).to(tl.int32)
        partial = (some & there).to(tl.int32) - full
        tl.store(order + n_full + before(full), tile, mask=full > 0)
        tl.store(order + streamed + n_partial + before(partial), tile, mask=partial > 0)
        n_full += tl.sum(full, 0)
        n_partial += tl.sum(partial, 0)
    tl.store(ptr.counts + 2 * number, n_full)
    tl.store(ptr.counts + 2 * number + 1, n_partial)


@triton.jit
def before(x):
    """Return for each number the sum of those before it."""
    n = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(n[None, :] < n[:, None], x[None, :], 0), 1)


@triton.jit
def tile_states(tile, resident, ptr, num, cfg, place, KEYS: tl.constexpr):
    """Return (some, every) pair of each streamed tile may attend; at a ragged edge not every one.

    In packed sequences, whose bands and lengths differ, the boolean tensor alone decides, and
    ``every`` is False.
    """
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    if KEYS:
        i0 = tile * BLOCK_Q
        j0 = resident * BLOCK_K + tile * 0
    else:
        i0 = resident * BLOCK_Q + tile * 0
        j0 = tile * BLOCK_K
    i1 = tl.minimum(i0 + BLOCK_Q, place.nq) - 1
    j1 = tl.minimum(j0 + BLOCK_K, place.nk) - 1
    some = i0 <= i1
    every = (i0 + BLOCK_Q <= place.nq) & (j0 + BLOCK_K <= place.nk)
    if cfg.PACKED:
        every = every & (i0 < 0)
    else:
        prefix = None
        if ptr.prefix is not None:
            prefix = place.prefix
        end = place.used
        low, high = rules.any_range(i0, i1, place.offset, num.left, num.right, end, prefix)
        some = rules.touches(some, low, high, j0, j1)
        low, high = rules.all_range(i0, i1, place.offset, num.left, num.right, end, prefix)
        every = rules.fills(every, low, high, j0, j1)
    if ptr.q_ids is not None:
        b = tl.cast(place.b, tl.int64)
        q_low, q_high = id_range(ptr.q_ids + b * num.q_ids, i0, place.nq, BLOCK_Q)
        k_low, k_high = id_range(ptr.k_ids + b * num.k_ids, j0, place.nk, BLOCK_K)
        some = rules.may_be_equal(some, q_low, q_high, k_low, k_high)
        every = rules.are_equal(every, q_low, q_high, k_low, k_high)
    if ptr.allowed is not None:
        row = i0[:, None] + tl.arange(0, BLOCK_Q)[:, None]
        col = j0[None, :] + tl.arange(0, BLOCK_K)[None, :]
        may = lib.load_pairs(ptr.allowed, num.allowed, cfg, place, row, col) != 0
        may = (may & (row < place.nq) & (col < place.nk)).to(tl.int32)
        some = some & (tl.max(may, None) > 0)
        every = every & (tl.min(may, None) > 0)
    return some, every


@triton.jit
def id_range(ids, first, end, BLOCK: tl.constexpr):
    """Return the least and the greatest id of each block of positions from ``first`` on."""
    at = first[:, None] + tl.arange(0, BLOCK)[None, :]
    low = tl.load(ids + at, mask=at < end, other=MOST)
    high = tl.load(ids + at, mask=at < end, other=LEAST)
    return tl.min(low, 1), tl.max(high, 1)
