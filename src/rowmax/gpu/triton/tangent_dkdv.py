# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""dK, dK', dV and dV' of a tangent: a tile of keys is resident, tiles of queries pass.

``dK_j = scale sum_i (dX_ij q_i + dX'_ij q'_i)``, ``dK'_j = scale sum_i dX'_ij q_i``, ``dV_j = sum_i
P_ij R_ij (D_ij g_i + e_i)`` and ``dV'_j = sum_i P_ij R_ij g_i``. Scores are held with keys down, as
in ``backward_dkdv.py``. A launch computes those of them whose pointers are not None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import lib, second_order
from ..launch import JobSpec
from ..second_order import At
from .backward_dkdv import at_head, plan_queries, store_cols


class KeyTile(NamedTuple):
    """The resident tile, zeros past the keys in use."""

    k: Any  # [BLOCK_K, BLOCK_D]
    tk: Any  # as k, or None
    v: Any  # [BLOCK_K, BLOCK_DV]
    tv: Any  # as v, or None
    j0: Any


class Sums(NamedTuple):
    """The sums over queries; those that are not wanted stay 0."""

    dk: Any  # [BLOCK_K, BLOCK_D], without the scale, as dtk
    dtk: Any
    dv: Any  # [BLOCK_K, BLOCK_DV], as dtv
    dtv: Any
    cols: Any  # [BLOCK_K], of dS of one head
    tcols: Any  # those of dS'


@triton.jit
def add_queries(sums, x, ptr, num, cfg, place, plan, KIND: tl.constexpr):
    """Return the Sums after the tiles of a kind."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    WANT_DS: tl.constexpr = ptr.dk is not None or ptr.dtk is not None or ptr.dbias_cols is not None
    dk, dtk, dv, dtv, cols, tcols = sums
    q_base = lib.queries(ptr.q, num.q, cfg, place)
    g_base = lib.queries(ptr.dtout, num.dtout, cfg, place)
    j = tl.arange(0, cfg.BLOCK_K)[:, None]
    cut = x.j0 + cfg.BLOCK_K > place.used  # some keys of the tile are not in use
    for i in tl.range(0, lib.tile_count(plan, KIND)):
        tile, partial = lib.nth_tile(i, ptr, plan, KIND)
        if ptr.lengths is not None:
            partial = partial | cut
        i0 = tile * BLOCK_Q
        rows = i0 + tl.arange(0, BLOCK_Q)
        at = At(rows[None, :], x.j0 + j, x.j0, j, partial)
        q = lib.load_tile(q_base, num.q, i0, place.nq, BLOCK_Q, cfg.RAGGED_Q)
        g = lib.load_tile(g_base, num.dtout, i0, place.nq, BLOCK_Q, cfg.RAGGED_Q)
        tq = lib.load_queries(ptr.tq, num.tq, i0, cfg, place, cfg.RAGGED_Q)
        e = lib.load_queries(ptr.dout, num.dout, i0, cfg, place, cfg.RAGGED_Q)
        s = tl.dot(x.k, tl.trans(q), input_precision=cfg.PRECISION)
        tx = second_order.two_products(x.tk, q, x.k, tq, cfg)
        numbers = second_order.load_numbers(at.row, ptr, num, cfg, place, cfg.RAGGED_Q)
        w = second_order.weights(s, tx, numbers, at, ptr, num, cfg, place, KIND, cfg.BLOCK_K)
        pr = w.pr.to(g.dtype)
        if ptr.dtv is not None:
            dtv = tl.dot(pr, g, dtv, input_precision=cfg.PRECISION)
        if ptr.dv is not None:
            prd = (w.pr * w.d).to(g.dtype)
            dv = tl.dot(prd, g, dv, input_precision=cfg.PRECISION)
            if ptr.dout is not None:
                dv = tl.dot(pr, e, dv, input_precision=cfg.PRECISION)
        if WANT_DS:
            beta = tl.dot(x.v, tl.trans(g), input_precision=cfg.PRECISION)
            gamma = second_order.two_products(x.tv, g, x.v, e, cfg)
            b = lib.load_vector(ptr.tdelta, at.row, num, cfg, place, 0.0, cfg.RAGGED_Q)
            c = lib.load_vector(ptr.delta, at.row, num, cfg, place, 0.0, cfg.RAGGED_Q)
            ds, dts = second_order.score_gradients(w, beta, gamma, b, c, ptr, num)
            if ptr.dbias_cols is not None:
                ds = lib.only_seen(ds, ptr, num, cfg, place, at.row, at.col, partial, KIND)
                dts = lib.only_seen(dts, ptr, num, cfg, place, at.row, at.col, partial, KIND)
                cols += tl.sum(ds, 1)
                tcols += tl.sum(dts, 1)
            dx, dtx = second_order.product_gradients(ds, dts, tx, w.y, num, cfg)
            dtx = dtx.to(q.dtype)
            if ptr.dk is not None:
                dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=cfg.PRECISION)
                if ptr.tq is not None:
                    dk = tl.dot(dtx, tq, dk, input_precision=cfg.PRECISION)
            if ptr.dtk is not None:
                dtk = tl.dot(dtx, q, dtk, input_precision=cfg.PRECISION)
    return Sums(dk, dtk, dv, dtv, cols, tcols)


@triton.jit
def add_each_query(sums, x, ptr, num, cfg, place):
    """Return the Sums with the queries of one head that see each key."""
    dk, dtk, dv, dtv, cols, tcols = sums
    j = tl.arange(0, cfg.BLOCK_K)[:, None]
    for i in tl.range(0, place.nq, num_stages=1):
        row = tl.full([1, 1], 0, tl.int32) + i
        at = At(row, x.j0 + j, x.j0, j, False)
        q = lib.query_row(ptr.q, num.q, i, cfg, place)
        g = lib.query_row(ptr.dtout, num.dtout, i, cfg, place)
        tq = lib.query_row(ptr.tq, num.tq, i, cfg, place)
        e = lib.query_row(ptr.dout, num.dout, i, cfg, place)
        tx = second_order.two_times_row(x.tk, q, x.k, tq)
        gamma = second_order.two_times_row(x.tv, g, x.v, e)
        numbers = second_order.load_numbers(row, ptr, num, cfg, place, False)
        s = lib.times_row(x.k, q)
        w = second_order.weights(s, tx, numbers, at, ptr, num, cfg, place, "full", cfg.BLOCK_K)
        b = lib.load_vector(ptr.tdelta, row, num, cfg, place, 0.0, False)
        c = lib.load_vector(ptr.delta, row, num, cfg, place, 0.0, False)
        beta = lib.times_row(x.v, g)
        ds, dts = second_order.score_gradients(w, beta, gamma, b, c, ptr, num)
        dx, dtx = second_order.product_gradients(ds, dts, tx, w.y, num, cfg)
        ok = lib.seen(ptr, num, cfg, place, row, at.col)
        dtk += tl.where(ok, dtx * q, 0.0)
        dk += tl.where(ok, dx * q, 0.0)
        if ptr.tq is not None:
            dk += tl.where(ok, dtx * tq, 0.0)
        dtv += tl.where(ok, w.pr * g, 0.0)
        dv += tl.where(ok, w.pr * w.d * g, 0.0)
        if ptr.dout is not None:
            dv += tl.where(ok, w.pr * e, 0.0)
    return Sums(dk, dtk, dv, dtv, cols, tcols)


@triton.jit
def sum_over_group(tile, ptr, num, cfg, place, EACH: tl.constexpr):
    """Return the Sums of a tile over the heads of its group; store the sums over queries.

    Query by query if EACH, else tile by tile.
    """
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    j0 = tile * BLOCK_K
    tk = lib.load_keys(ptr.tk, num.tk, j0, cfg, place, True)
    tv = lib.load_keys(ptr.tv, num.tv, j0, cfg, place, True)
    k = lib.load_keys(ptr.k, num.k, j0, cfg, place, True)
    v = lib.load_keys(ptr.v, num.v, j0, cfg, place, True)
    x = KeyTile(k, tk, v, tv, j0)
    dk = tl.zeros([BLOCK_K, num.k.BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, num.v.BLOCK_D], tl.float32)
    none = tl.zeros([BLOCK_K], tl.float32)
    sums = Sums(dk, dk, dv, dv, none, none)
    for g in tl.range(0, cfg.GROUP, num_stages=1):
        here = at_head(place, place.head + g)
        if EACH:
            sums = add_each_query(sums, x, ptr, num, cfg, here)
        else:
            plan = plan_queries(ptr, num, cfg, here, tile)
            cols = tl.zeros([BLOCK_K], tl.float32)
            tcols = tl.zeros([BLOCK_K], tl.float32)
            sums = Sums(sums.dk, sums.dtk, sums.dv, sums.dtv, cols, tcols)
            if cfg.SPLIT:
                sums = add_queries(sums, x, ptr, num, cfg, here, plan, "full")
                sums = add_queries(sums, x, ptr, num, cfg, here, plan, "partial")
            else:
                sums = add_queries(sums, x, ptr, num, cfg, here, plan, "any")
            store_cols(ptr.dbias_cols, sums.cols, j0, num, cfg, here)
            store_cols(ptr.dtbias_cols, sums.tcols, j0, num, cfg, here)
    return sums


@triton.jit
def has_nan(sums, ptr):
    """Return True if a sum that is stored holds NaN."""
    found = False
    if ptr.dk is not None:
        found = found | lib.has_nan(sums.dk)
    if ptr.dtk is not None:
        found = found | lib.has_nan(sums.dtk)
    if ptr.dv is not None:
        found = found | lib.has_nan(sums.dv)
    if ptr.dtv is not None:
        found = found | lib.has_nan(sums.dtv)
    return found


@triton.jit(do_not_specialize=["num"])
def tangent_dkdv_kernel(ptr, num, cfg):
    """Store the gradients of one tile of keys of a kv head and of their tangents."""
    HK: tl.constexpr = cfg.HQ // cfg.GROUP
    tile, head = lib.tile_and_head(num)
    b = head // HK
    if cfg.PACKED:
        b, tile = lib.sequence_of_slot(ptr.cu_k, tile, num.batch, num.total_k, cfg.BLOCK_K)
    sizes = lib.sizes_of(ptr, num, cfg, b, True)
    j0 = tile * cfg.BLOCK_K
    if j0 >= sizes.nk:
        return
    place = lib.place_of(ptr, num, cfg, b, head % HK * cfg.GROUP, sizes)
    sums = sum_over_group(tile, ptr, num, cfg, place, False)
    if cfg.MASKS:
        if has_nan(sums, ptr):
            # K and V are loaded again: kept until here, they would take registers from the loop
            sums = sum_over_group(tile, ptr, num, cfg, place, True)
    keep_scale = 1.0
    if ptr.seed is not None:
        keep_scale = num.keep_scale
    lib.store_keys(ptr.dk, num.dk, sums.dk, j0, cfg, place, num.scale)
    lib.store_keys(ptr.dtk, num.dtk, sums.dtk, j0, cfg, place, num.scale)
    lib.store_keys(ptr.dv, num.dv, sums.dv, j0, cfg, place, keep_scale)
    lib.store_keys(ptr.dtv, num.dtv, sums.dtv, j0, cfg, place, keep_scale)


_MATRICES = ("tq", "tk", "tv", "dout", "dtout", "dk", "dtk", "dv", "dtv")
TANGENT_DKDV, TANGENT_DK, TANGENT_DV = (
    JobSpec(name, tangent_dkdv_kernel, "keys", _MATRICES, alternate=True)
    for name in ("tangent_dkdv", "tangent_dk", "tangent_dv")
)
