# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The gradient of heads' parameters: a tile of queries is resident, tiles of keys pass.

``dtheta_h = sum_ij dS_ij ds_ij/dtheta_h``, the sum over sequences, too. The kernel stores the sum
of each row; torch adds the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib
from ..launch import JobSpec
from .backward_dq import load_queries, tile_gradient


@triton.jit
def add_keys(sums, x, ptr, num, cfg, place, plan):
    """Return the sums ``[PARAMETER_ROWS, BLOCK_Q]`` after all tiles of keys."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, plan.count):
        tile, partial = lib.nth_tile(i, ptr, plan, "any")
        j0 = tile * BLOCK_K
        _, s, y, ds = tile_gradient(x, k_base, v_base, j0, j, partial, ptr, num, cfg, place, "any")
        ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, j0 + j, partial, "any")
        sums += lib.head_gradients(ds, s, y, ptr, num, cfg, place, x.row, j0 + j)
    return sums


@triton.jit
def store_sums(x, sums, i0, num, cfg, place):
    """Store ``[PARAMETER_ROWS, BLOCK_Q]`` of the rows from i0 on."""
    ROWS: tl.constexpr = lib.PARAMETER_ROWS
    start = place.q_start * ROWS
    to = lib.vector(x, place.b, place.head, start, num.total_q * ROWS, cfg.HQ, cfg.PACKED)
    row = i0 + tl.arange(0, cfg.BLOCK_Q)
    at = row[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(to + at, sums, mask=(row < place.nq)[None, :])


@triton.jit(do_not_specialize=["num"])
def backward_dheads_kernel(ptr, num, cfg):
    """Store the gradients of the parameters of one head from one tile of queries."""
    tile, head = lib.tile_and_head(num)
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * cfg.BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    x = load_queries(i0, ptr, num, cfg, place)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)
    sums = tl.zeros([lib.PARAMETER_ROWS, cfg.BLOCK_Q], tl.float32)
    sums = add_keys(sums, x, ptr, num, cfg, place, plan)
    store_sums(ptr.dheads, sums, i0, num, cfg, place)


DHEADS = JobSpec("dheads", backward_dheads_kernel, "queries", ("dout",), alternate=True)
