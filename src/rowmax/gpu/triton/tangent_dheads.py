# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The gradients of heads' parameters and of their tangents: a tile of queries is resident.

The kernel stores the sum of each row, as ``backward_dheads.py`` does; torch adds the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib
from ..launch import JobSpec
from ..second_order import At
from .backward_dheads import store_sums
from .tangent_dq import QueryTile, load_rows, tile_gradients


@triton.jit
def add_keys(sums, tsums, x, ptr, num, cfg, place, plan):
    """Return (sums, sums of the tangents' gradients), ``[PARAMETER_ROWS, BLOCK_Q]`` each."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, plan.count):
        tile, partial = lib.nth_tile(i, ptr, plan, "any")
        j0 = tile * BLOCK_K
        at = At(x.row, j0 + j, j0, j, partial)
        k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        tk = lib.load_keys(ptr.tk, num.tk, j0, cfg, place, cfg.RAGGED_K)
        tv = lib.load_keys(ptr.tv, num.tv, j0, cfg, place, cfg.RAGGED_K)
        ds, dts, s, _, y = tile_gradients(x, k, tk, v, tv, at, ptr, num, cfg, place, "any")
        ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, at.col, partial, "any")
        dts = lib.only_seen(dts, ptr, num, cfg, place, x.row, at.col, partial, "any")
        sums += lib.head_gradients(ds, s, y, ptr, num, cfg, place, x.row, at.col)
        tsums += lib.head_gradients(dts, s, y, ptr, num, cfg, place, x.row, at.col)
    return sums, tsums


@triton.jit(do_not_specialize=["num"])
def tangent_dheads_kernel(ptr, num, cfg):
    """Store the gradients of the parameters of one head from one tile of queries."""
    tile, head = lib.tile_and_head(num)
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * cfg.BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    tq = lib.load_queries(ptr.tq, num.tq, i0, cfg, place, True)
    e = lib.load_queries(ptr.dout, num.dout, i0, cfg, place, True)
    q, g, numbers, b, c, row, inside = load_rows(i0, ptr, num, cfg, place)
    x = QueryTile(q, tq, e, g, numbers, b, c, row, inside)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)
    sums = tl.zeros([lib.PARAMETER_ROWS, cfg.BLOCK_Q], tl.float32)
    sums, tsums = add_keys(sums, sums, x, ptr, num, cfg, place, plan)
    store_sums(ptr.dheads, sums, i0, num, cfg, place)
    store_sums(ptr.dtheads, tsums, i0, num, cfg, place)


TANGENT_DHEADS = JobSpec(
    "tangent_dheads",
    tangent_dheads_kernel,
    "queries",
    ("tq", "tk", "tv", "dout", "dtout"),
    alternate=True,
)
