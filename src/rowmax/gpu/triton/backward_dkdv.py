# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""dK and dV: a tile of keys is resident, tiles of queries pass, head by head of its group.

``dV_j = sum_i P_ij R_ij dO_i`` and ``dK_j = scale sum_i dX_ij q_i``. Scores are held with keys down
and queries across, so that P and dS are left operands without a transpose. There are no atomics:
one program computes its rows, in one order, or each share of a group has one and stores a part
(``key_parts.py``). A launch computes both, or one where ``ptr.dk`` or ``ptr.dv`` is None: a wide
head has no registers for both sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib, rules
from ..launch import JobSpec
from .key_parts import store_keys


@triton.jit
def at_head(place, head):
    """Return the place of another head of the group."""
    return lib.Place(
        place.b, head, place.kv_head, place.q_start, place.nq, place.k_start, place.nk, place.used,
        place.offset, place.prefix,
    )  # fmt: skip


@triton.jit
def plan_queries(ptr, num, cfg, place, tile):
    """Return the plan of the tiles of queries that see a tile of keys."""
    if ptr.order is not None:
        return lib.listed_plan(ptr, num, place, tile)
    else:
        j0 = tile * cfg.BLOCK_K
        j1 = tl.minimum(j0 + cfg.BLOCK_K, place.used) - 1
        end = place.nq if ptr.lengths is None else tl.where(j0 < place.used, place.nq, 0)
        shift = -place.offset
        right = num.right
        if ptr.prefix is None or right is None:
            return lib.band_plan(j0, j1, shift, right, right, num.left, end, None, cfg.BLOCK_Q)
        else:
            most = place.nq + place.nk
            first = rules.back_of_key(j0, place.prefix, right, most)
            last = rules.back_of_key(j1, place.prefix, right, most)
            return lib.band_plan(j0, j1, shift, first, last, num.left, end, None, cfg.BLOCK_Q)


@triton.jit
def add_queries(dk, dv, cols, k, v, j0, ptr, num, cfg, place, plan, KIND: tl.constexpr):
    """Return (dK, dV, sums of dS over queries) after the tiles of one kind.

    k and dk are ``[BLOCK_K, BLOCK_D]``, v and dv ``[BLOCK_K, BLOCK_DV]``, cols is ``[BLOCK_K]``.
    dk lacks the scale.
    """
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    WANT_DS: tl.constexpr = ptr.dk is not None or ptr.dbias_cols is not None
    q_base = lib.queries(ptr.q, num.q, cfg, place)
    do_base = lib.queries(ptr.dout, num.dout, cfg, place)
    lse2_base = lib.row_vector(ptr.lse2, num, cfg, place)
    delta_base = lib.row_vector(ptr.delta, num, cfg, place)
    j = tl.arange(0, cfg.BLOCK_K)[:, None]
    col = j0 + j
    cut = j0 + cfg.BLOCK_K > place.used  # some keys of the tile are not in use
    for i in tl.range(0, lib.tile_count(plan, KIND)):
        tile, partial = lib.nth_tile(i, ptr, plan, KIND)
        if ptr.lengths is not None:
            partial = partial | cut
        i0 = tile * BLOCK_Q
        rows = i0 + tl.arange(0, BLOCK_Q)
        row = rows[None, :]
        q = lib.load_tile(q_base, num.q, i0, place.nq, BLOCK_Q, cfg.RAGGED_Q)
        s = tl.dot(k, tl.trans(q), input_precision=cfg.PRECISION)
        lse2 = lib.load_rows(lse2_base, rows, place.nq, float("inf"), cfg.RAGGED_Q)
        rest = lib.load_rest(ptr, num, cfg, place, row, cfg.RAGGED_Q)
        p, y = lib.weights(s, lse2[None, :], rest, ptr, num, cfg, place, row, col, partial, KIND)
        do = lib.load_tile(do_base, num.dout, i0, place.nq, BLOCK_Q, cfg.RAGGED_Q)
        dp = p
        if WANT_DS:
            dp = tl.dot(v, tl.trans(do), input_precision=cfg.PRECISION)
        pr, dp = lib.dropped(p, dp, ptr, num, place, row, j0, j, cfg.BLOCK_K)
        if ptr.dv is not None:
            dv = tl.dot(pr.to(do.dtype), do, dv, input_precision=cfg.PRECISION)
        if WANT_DS:
            delta = lib.load_rows(delta_base, rows, place.nq, 0.0, cfg.RAGGED_Q)
            ds = rules.score_gradient(p, dp, delta[None, :])
            if ptr.dbias_cols is not None:
                ds = lib.only_seen(ds, ptr, num, cfg, place, row, col, partial, KIND)
                cols += tl.sum(ds, 1)
            ds = lib.product_gradient(ds, y, ptr, num, cfg, place)
            if ptr.dk is not None:
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=cfg.PRECISION)
    return dk, dv, cols


@triton.jit
def add_each_query(dk, dv, k, v, j0, i0, i1, ptr, num, cfg, place):
    """Return (dK, dV) with the queries in [i0, i1) of one head that see each key."""
    q_base = lib.queries(ptr.q, num.q, cfg, place)
    do_base = lib.queries(ptr.dout, num.dout, cfg, place)
    j = tl.arange(0, cfg.BLOCK_K)[:, None]
    col = j0 + j
    for i in tl.range(i0, i1, num_stages=1):
        row = tl.full([1, 1], 0, tl.int32) + i
        q = lib.load_row(q_base, num.q, i)
        do = lib.load_row(do_base, num.dout, i)
        rest = lib.load_rest(ptr, num, cfg, place, row, False)
        lse2, delta = lib.row_numbers(i + tl.arange(0, 1), do, i, ptr, num, cfg, place, False)
        s = lib.times_row(k, q)
        p, y = lib.weights(s, lse2[None, :], rest, ptr, num, cfg, place, row, col, False, "full")
        ok = lib.seen(ptr, num, cfg, place, row, col)
        dp = lib.times_row(v, do)
        pr, dp = lib.dropped(p, dp, ptr, num, place, row, j0, j, cfg.BLOCK_K)
        ds = lib.product_gradient(
            rules.score_gradient(p, dp, delta[None, :]), y, ptr, num, cfg, place
        )
        if ptr.dv is not None:
            dv += tl.where(ok, pr * do, 0.0)
        if ptr.dk is not None:
            dk += tl.where(ok, ds * q, 0.0)
    return dk, dv


@triton.jit
def resident_keys(tile, ptr, num, cfg, place):
    """Return (k, v, dk, dv) of a tile of keys, dk and dv of 0."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    j0 = tile * BLOCK_K
    k = lib.load_keys(ptr.k, num.k, j0, cfg, place, True)
    v = lib.load_keys(ptr.v, num.v, j0, cfg, place, True)
    dk = tl.zeros([BLOCK_K, num.k.BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, num.v.BLOCK_D], tl.float32)
    return k, v, dk, dv


@triton.jit
def store_cols(x, cols, j0, num, cfg, place):
    """Store sums over queries ``[BLOCK_K]`` of keys from j0 on, unless x is None."""
    if x is not None:
        col = j0 + tl.arange(0, cfg.BLOCK_K)
        to = lib.vector(x, place.b, place.head, 0, num.longest_k, cfg.HQ, False)
        tl.store(to + col, cols, mask=col < tl.where(place.b < num.batch, place.nk, 0))


@triton.jit
def sum_over_heads(tile, count, ptr, num, cfg, place):
    """Return (dK, dV) of a tile over ``count`` heads; store the sums over queries."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    j0 = tile * BLOCK_K
    k, v, dk, dv = resident_keys(tile, ptr, num, cfg, place)
    for g in tl.range(0, count, num_stages=1):
        here = at_head(place, place.head + g)
        plan = plan_queries(ptr, num, cfg, here, tile)
        cols = tl.zeros([BLOCK_K], tl.float32)
        if cfg.SPLIT:
            dk, dv, cols = add_queries(dk, dv, cols, k, v, j0, ptr, num, cfg, here, plan, "full")
            dk, dv, cols = add_queries(dk, dv, cols, k, v, j0, ptr, num, cfg, here, plan, "partial")
        else:
            dk, dv, cols = add_queries(dk, dv, cols, k, v, j0, ptr, num, cfg, here, plan, "any")
        store_cols(ptr.dbias_cols, cols, j0, num, cfg, here)
    return dk, dv


@triton.jit
def sum_each_over_heads(tile, count, i0, i1, ptr, num, cfg, place):
    """Return (dK, dV) of a tile over the queries in [i0, i1) of ``count`` heads, if they see it."""
    k, v, dk, dv = resident_keys(tile, ptr, num, cfg, place)
    for g in tl.range(0, count, num_stages=1):
        here = at_head(place, place.head + g)
        dk, dv = add_each_query(dk, dv, k, v, tile * cfg.BLOCK_K, i0, i1, ptr, num, cfg, here)
    return dk, dv


@triton.jit(do_not_specialize=["num"])
def backward_dkdv_kernel(ptr, num, cfg):
    """Store dK and dV of one tile of keys of a kv head, or of a share of its query heads."""
    HK: tl.constexpr = cfg.HQ // cfg.GROUP
    tile, head = lib.tile_and_head(num)
    part, count = 0, cfg.GROUP
    if num.parts is not None:
        part = head % num.parts
        head = head // num.parts
        count = cfg.GROUP // num.parts
    b = head // HK
    if cfg.PACKED:
        b, tile = lib.sequence_of_slot(ptr.cu_k, tile, num.batch, num.total_k, cfg.BLOCK_K)
    sizes = lib.sizes_of(ptr, num, cfg, b, True)
    j0 = tile * cfg.BLOCK_K
    if j0 >= sizes.nk:
        return
    place = lib.place_of(ptr, num, cfg, b, head % HK * cfg.GROUP + part * count, sizes)
    dk, dv = sum_over_heads(tile, count, ptr, num, cfg, place)
    if cfg.MASKS:
        if lib.has_nan(dk) | lib.has_nan(dv):
            # K and V are loaded again: kept until here, they would take registers from the loop
            dk, dv = sum_each_over_heads(tile, count, 0, place.nq, ptr, num, cfg, place)
    store_keys(ptr.dk, ptr.dk_parts, num.dk, dk * num.scale, j0, part, num, cfg, place)
    if ptr.seed is not None:
        dv = dv * num.keep_scale
    store_keys(ptr.dv, ptr.dv_parts, num.dv, dv, j0, part, num, cfg, place)


DKDV, DK, DV = (
    JobSpec(name, backward_dkdv_kernel, "keys", ("dout", "dk", "dv"), alternate=True, shared=True)
    for name in ("dkdv", "dk", "dv")
)
