# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""dbias of a bias that broadcasts over the batch or heads: a tile is resident, its sharers pass.

``dbias_ij = sum dS_ij`` over the broadcast dimensions, in one order, in registers: no memory beyond
the gradient itself. Where all sharers of a tile see it, one loop reads them without a condition, so
that Triton prefetches. A step of it reads some columns of Q, K, V and dO: shared memory has no room
for all columns of a wide head, of this step and of the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import lib, rules
from ..launch import JobSpec


class BiasTile(NamedTuple):
    """The resident tile of the bias."""

    b: Any  # the first sequence and head that share it
    head: Any
    tile_q: Any
    tile_k: Any
    bias: Any  # [BLOCK_Q, BLOCK_K]


@triton.jit
def sharer(i, ptr, num, cfg, tile):
    """Return the place of the i-th sharer of the tile.

    Heads vary faster than sequences: neighbouring heads share keys and values, too.
    """
    n = i // cfg.SHARING
    b = tile.b + n
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    return lib.place_of(ptr, num, cfg, b, tile.head + i - n * cfg.SHARING, sizes)


@triton.jit
def tile_state(ptr, num, cfg, tile, place):
    """Return 0 if no pair of the tile may attend, 2 if all may, else 1; by map or by band."""
    if ptr.states is not None:
        at = lib.pair_pointers(ptr.states, num.states, place, tile.tile_q, tile.tile_k)
        return tl.load(at).to(tl.int32)
    else:
        i0 = tile.tile_q * cfg.BLOCK_Q
        end = i0 + cfg.BLOCK_Q
        plan = lib.plan_band(i0, tl.minimum(end, place.nq) - 1, ptr, num, cfg, place)
        k = tile.tile_k
        some = (i0 < place.nq) & (k >= plan.first) & (k < plan.first + plan.count)
        every = some & (end <= place.nq) & (k >= plan.full) & (k < plan.full + plan.n_full)
        return some.to(tl.int32) + every.to(tl.int32)


@triton.jit
def load_columns(x, matrix, i0, end, d0, cfg, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Return ``[ROWS, WIDTH]`` from row i0, column d0; zeros past D and, if RAGGED, ``end``."""
    at = lib.tile_pointers(x + d0, i0, matrix.ROW, ROWS, cfg.WIDTH)
    inside = i0 + tl.arange(0, ROWS) < end
    within = tl.arange(0, cfg.WIDTH) < matrix.D - d0
    return lib.load_within(at, inside, within, RAGGED, matrix.D != cfg.WIDTH * cfg.PARTS)


@triton.jit
def add_sharers(acc, first, end, ptr, num, cfg, tile):
    """Return acc ``[BLOCK_Q, BLOCK_K]`` with dS of the sharers from ``first`` to ``end``."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    PARTS: tl.constexpr = cfg.PARTS
    i0 = tile.tile_q * BLOCK_Q
    j0 = tile.tile_k * BLOCK_K
    rows = i0 + tl.arange(0, BLOCK_Q)
    row = rows[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    # Parts pass sums as bits. As numbers Triton would wait for the products only in the branch that
    # uses them, and ptxas serialises products that end in a branch.
    x_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    dp_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    for step in tl.range(first * PARTS, end * PARTS):
        i = step // PARTS
        part = step - i * PARTS
        d0 = part * cfg.WIDTH
        place = sharer(i, ptr, num, cfg, tile)
        nq = place.nq
        used = place.used
        q = lib.queries(ptr.q, num.q, cfg, place)
        k = lib.keys(ptr.k, num.k, cfg, place)
        v = lib.keys(ptr.v, num.v, cfg, place)
        do = lib.queries(ptr.dout, num.dout, cfg, place)
        q = load_columns(q, num.q, i0, nq, d0, cfg, BLOCK_Q, cfg.RAGGED_Q)
        k = load_columns(k, num.k, j0, used, d0, cfg, BLOCK_K, cfg.RAGGED_K)
        do = load_columns(do, num.dout, i0, nq, d0, cfg, BLOCK_Q, cfg.RAGGED_Q)
        v = load_columns(v, num.v, j0, used, d0, cfg, BLOCK_K, cfg.RAGGED_K)
        lse2, delta = lib.row_numbers(rows, do, i0, ptr, num, cfg, place, cfg.RAGGED_Q)
        x = x_bits.to(tl.float32, bitcast=True)
        x = tl.dot(q, tl.trans(k), x, input_precision=cfg.PRECISION)
        dp = dp_bits.to(tl.float32, bitcast=True)
        dp = tl.dot(do, tl.trans(v), dp, input_precision=cfg.PRECISION)
        x_bits = x.to(tl.int32, bitcast=True)
        dp_bits = dp.to(tl.int32, bitcast=True)
        if part == PARTS - 1:
            rest = lib.load_rest(ptr, num, cfg, place, row, cfg.RAGGED_Q)
            p, _ = lib.weights(
                x, lse2[:, None], rest, ptr, num, cfg, place, row, j0 + j, False, "full", tile.bias
            )
            _, dp = lib.dropped(p, dp, ptr, num, place, row, j0, j, BLOCK_K)
            ds = rules.score_gradient(p, dp, delta[:, None])
            if cfg.EDGES:
                partial = tile_state(ptr, num, cfg, tile, place) < 2
                ds = lib.only_seen(ds, ptr, num, cfg, place, row, j0 + j, partial, "any")
            acc += ds
            x_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
            dp_bits = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32)
    return acc


@triton.jit
def tile_of_program(ptr, num, cfg):
    """Return (BiasTile, its rows, its columns, the place of all sharers) of this program."""
    HEADS: tl.constexpr = cfg.HQ // cfg.SHARING
    nq = num.longest_q
    nk = num.longest_k
    tiles_k = tl.cdiv(nk, cfg.BLOCK_K)
    i = tl.program_id(0) % num.tiles
    plane = tl.program_id(0) // num.tiles
    b = plane // HEADS
    head = plane % HEADS
    tile_q = i // tiles_k
    tile_k = i % tiles_k
    row = tile_q * cfg.BLOCK_Q + tl.arange(0, cfg.BLOCK_Q)[:, None]
    col = tile_k * cfg.BLOCK_K + tl.arange(0, cfg.BLOCK_K)[None, :]
    shared = lib.Place(b, head, 0, 0, nq, 0, nk, nk, 0, 0)
    bias = lib.load_pairs(ptr.bias, num.bias, cfg, shared, row, col)
    return BiasTile(b, head, tile_q, tile_k, bias), row, col, shared


@triton.jit(do_not_specialize=["num"])
def backward_dbias_kernel(ptr, num, cfg):
    """Store dbias of one tile of a plane of the bias."""
    # some sharers may see the tile and others not
    VARIES: tl.constexpr = (
        ptr.states is not None or ptr.lengths is not None or ptr.prefix is not None or cfg.PACKED
    )
    tile, row, col, shared = tile_of_program(ptr, num, cfg)
    acc = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    sharers = cfg.SHARING * (num.batch // num.bias_batch)
    if VARIES:
        # One by one: for runs of sharers that see the tile, with a begin that the loop carries,
        # triton 3.6.0 compiles code that always begins with the first sharer.
        for i in tl.range(0, sharers, num_stages=1):
            if tile_state(ptr, num, cfg, tile, sharer(i, ptr, num, cfg, tile)) > 0:
                acc = add_sharers(acc, i, i + 1, ptr, num, cfg, tile)
    else:
        state = tile_state(ptr, num, cfg, tile, sharer(0, ptr, num, cfg, tile))
        acc = add_sharers(acc, 0, tl.where(state > 0, sharers, 0), ptr, num, cfg, tile)
    inside = (row < shared.nq) & (col < shared.nk)
    lib.store_pairs(ptr.dbias, acc, num, cfg, shared, row, col, inside)


DBIAS = JobSpec("dbias", backward_dbias_kernel, "bias", ("dout",))
