# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The gradient of heads' parameters: a tile of queries is resident, tiles of keys pass.

``dtheta_h = sum_ij dS_ij ds_ij/dtheta_h``, the sum over sequences, too. The kernel stores the sum
of each row; torch adds the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib, rules
from ..launch import JobSpec
from .backward_dq import load_queries


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
        k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        s = tl.dot(x.q, tl.trans(k), input_precision=cfg.PRECISION)
        v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        dp = tl.dot(x.do, tl.trans(v), input_precision=cfg.PRECISION)
        p, y = lib.weights(
            s, x.lse2[:, None], x.rest, ptr, num, cfg, place, x.row, j0 + j, partial, "any"
        )
        _, dp = lib.dropped(p, dp, ptr, num, place, x.row, j0, j, BLOCK_K)
        ds = rules.score_gradient(p, dp, x.delta[:, None])
        ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, j0 + j, partial, "any")
        sums += lib.head_gradients(ds, s, y, ptr, num, cfg, place, x.row, j0 + j)
    return sums


@triton.jit(do_not_specialize=["num"])
def backward_dheads_kernel(ptr, num, cfg):
    """Store the gradients of the parameters of one head from one tile of queries."""
    ROWS: tl.constexpr = lib.PARAMETER_ROWS
    tile, head = lib.tile_and_head(num)
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * cfg.BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    x = load_queries(i0, ptr, num, cfg, place)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)
    sums = tl.zeros([ROWS, cfg.BLOCK_Q], tl.float32)
    sums = add_keys(sums, x, ptr, num, cfg, place, plan)
    start = place.q_start * ROWS
    to = lib.vector(ptr.dheads, place.b, place.head, start, num.total_q * ROWS, cfg.HQ, cfg.PACKED)
    row = i0 + tl.arange(0, cfg.BLOCK_Q)
    at = row[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(to + at, sums, mask=(row < place.nq)[None, :])


DHEADS = JobSpec("dheads", backward_dheads_kernel, "queries", ("dout",), alternate=True)
