# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""dQ and dQ' of a tangent: a tile of queries is resident, tiles of keys pass.

``dQ_i = scale sum_j (dX_ij k_j + dX'_ij k'_j)`` and ``dQ'_i = scale sum_j dX'_ij k_j``. The kernel
also stores the gradients of a bias and of its tangent, as ``backward_dq.py`` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import lib, second_order
from ..launch import JobSpec
from ..second_order import At
from .backward_dq import store_rows


class QueryTile(NamedTuple):
    """The resident tile. Rows past the end repeat the last."""

    q: Any  # [BLOCK_Q, BLOCK_D]
    tq: Any  # as q, or None
    e: Any  # [BLOCK_Q, BLOCK_DV], or None
    g: Any  # [BLOCK_Q, BLOCK_DV]
    numbers: Any  # (lse2, rest, tlse), [BLOCK_Q, 1] each, as b and c
    b: Any
    c: Any
    row: Any  # [BLOCK_Q, 1]
    inside: Any  # bool [BLOCK_Q, 1]: not past the end


class Sums(NamedTuple):
    """The sums over keys; those that are not wanted stay 0."""

    dq: Any  # [BLOCK_Q, BLOCK_D], without the scale, as dtq
    dtq: Any
    rows: Any  # [BLOCK_Q], sums of dS
    trows: Any  # [BLOCK_Q], sums of dS'


@triton.jit
def load_numbers(i0, ptr, num, cfg, place):
    """Return ((lse2, rest, tlse), b, c) of a tile of queries, ``[BLOCK_Q, 1]`` each."""
    rows = i0 + tl.arange(0, cfg.BLOCK_Q)[:, None]
    numbers = second_order.load_numbers(rows, ptr, num, cfg, place, True)
    b = lib.load_vector(ptr.tdelta, rows, num, cfg, place, 0.0, True)
    return numbers, b, lib.load_vector(ptr.delta, rows, num, cfg, place, 0.0, True)


@triton.jit
def load_rows(i0, ptr, num, cfg, place):
    """Return (q, g, numbers, b, c, row, inside) of the QueryTile from row i0 on.

    Without tq and e: triton 3.6 refuses to return None, alone or in a record.
    """
    row = i0 + tl.arange(0, cfg.BLOCK_Q)[:, None]
    q = lib.load_queries(ptr.q, num.q, i0, cfg, place, True)
    g = lib.load_queries(ptr.dtout, num.dtout, i0, cfg, place, True)
    numbers, b, c = load_numbers(i0, ptr, num, cfg, place)
    return q, g, numbers, b, c, tl.minimum(row, place.nq - 1), row < place.nq


@triton.jit
def tile_gradients(x, k, tk, v, tv, at, ptr, num, cfg, place, KIND: tl.constexpr):
    """Return (dS, dS', q.k, its tangent, y) of the resident tile with a tile of keys."""
    s = tl.dot(x.q, tl.trans(k), input_precision=cfg.PRECISION)
    tx = second_order.two_products(x.tq, k, x.q, tk, cfg)
    w = second_order.weights(s, tx, x.numbers, at, ptr, num, cfg, place, KIND, cfg.BLOCK_K)
    beta = tl.dot(x.g, tl.trans(v), input_precision=cfg.PRECISION)
    gamma = second_order.two_products(x.e, v, x.g, tv, cfg)
    ds, dts = second_order.score_gradients(w, beta, gamma, x.b, x.c, ptr, num)
    return ds, dts, s, tx, w.y


@triton.jit
def add_keys(sums, x, ptr, num, cfg, place, plan, KIND: tl.constexpr):
    """Return the Sums after the tiles of one kind; ``x`` is the resident tile."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    dq, dtq, rows, trows = sums
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, lib.tile_count(plan, KIND)):
        tile, partial = lib.nth_tile(i, ptr, plan, KIND)
        j0 = tile * BLOCK_K
        at = At(x.row, j0 + j, j0, j, partial)
        k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        tk = lib.load_keys(ptr.tk, num.tk, j0, cfg, place, cfg.RAGGED_K)
        tv = lib.load_keys(ptr.tv, num.tv, j0, cfg, place, cfg.RAGGED_K)
        ds, dts, _, tx, y = tile_gradients(x, k, tk, v, tv, at, ptr, num, cfg, place, KIND)
        if ptr.dbias is not None or ptr.dbias_rows is not None:
            ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, at.col, partial, KIND)
            dts = lib.only_seen(dts, ptr, num, cfg, place, x.row, at.col, partial, KIND)
            if ptr.dbias is not None:
                lib.store_pairs(ptr.dbias, ds, num, cfg, place, x.row, at.col, x.inside)
                lib.store_pairs(ptr.dtbias, dts, num, cfg, place, x.row, at.col, x.inside)
            else:
                rows += tl.sum(ds, 1)
                trows += tl.sum(dts, 1)
        dx, dtx = second_order.product_gradients(ds, dts, tx, y, num, cfg)
        dtx = dtx.to(k.dtype)
        if ptr.dq is not None:
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=cfg.PRECISION)
            if ptr.tk is not None:
                dq = tl.dot(dtx, tk, dq, input_precision=cfg.PRECISION)
        if ptr.dtq is not None:
            dtq = tl.dot(dtx, k, dtq, input_precision=cfg.PRECISION)
    return Sums(dq, dtq, rows, trows)


@triton.jit
def add_each_key(x, ptr, num, cfg, place):
    """Return (dQ, dQ') ``[BLOCK_Q, BLOCK_D]``, without scale, from the keys that each row sees."""
    dq = tl.zeros([cfg.BLOCK_Q, num.q.BLOCK_D], tl.float32)
    dtq = tl.zeros([cfg.BLOCK_Q, num.q.BLOCK_D], tl.float32)
    for j in tl.range(0, place.used, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        at = At(x.row, j0 + column, j0, column, False)
        k = lib.key_row(ptr.k, num.k, j, cfg, place)
        v = lib.key_row(ptr.v, num.v, j, cfg, place)
        tk = lib.key_row(ptr.tk, num.tk, j, cfg, place)
        tv = lib.key_row(ptr.tv, num.tv, j, cfg, place)
        tx = second_order.two_times_row(x.tq, k, x.q, tk)
        gamma = second_order.two_times_row(x.e, v, x.g, tv)
        x_k = lib.times_row(x.q, k)
        w = second_order.weights(x_k, tx, x.numbers, at, ptr, num, cfg, place, "full", 16)
        beta = lib.times_row(x.g, v)
        ds, dts = second_order.score_gradients(w, beta, gamma, x.b, x.c, ptr, num)
        dx, dtx = second_order.product_gradients(ds, dts, tx, w.y, num, cfg)
        ok = lib.seen(ptr, num, cfg, place, x.row, at.col)
        dq += tl.where(ok, dx * k, 0.0)
        if ptr.tk is not None:
            dq += tl.where(ok, dtx * tk, 0.0)
        dtq += tl.where(ok, dtx * k, 0.0)
    return dq, dtq


@triton.jit
def add_seen_keys(sums, i0, ptr, num, cfg, place, plan, EACH: tl.constexpr):
    """Return the Sums of the tile of queries from i0 on: key by key if EACH, else tile by tile."""
    tq = lib.load_queries(ptr.tq, num.tq, i0, cfg, place, True)
    e = lib.load_queries(ptr.dout, num.dout, i0, cfg, place, True)
    q, g, numbers, b, c, row, inside = load_rows(i0, ptr, num, cfg, place)
    x = QueryTile(q, tq, e, g, numbers, b, c, row, inside)
    if EACH:
        dq, dtq = add_each_key(x, ptr, num, cfg, place)
        return Sums(dq, dtq, sums.rows, sums.trows)
    elif cfg.SPLIT:
        sums = add_keys(sums, x, ptr, num, cfg, place, plan, "full")
        return add_keys(sums, x, ptr, num, cfg, place, plan, "partial")
    else:
        return add_keys(sums, x, ptr, num, cfg, place, plan, "any")


@triton.jit(do_not_specialize=["num"])
def tangent_dq_kernel(ptr, num, cfg):
    """Store dQ and dQ' of one tile of queries of a head."""
    tile, head = lib.tile_and_head(num)
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * cfg.BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)
    wide = tl.zeros([cfg.BLOCK_Q, num.q.BLOCK_D], tl.float32)
    narrow = tl.zeros([cfg.BLOCK_Q], tl.float32)
    sums = Sums(wide, wide, narrow, narrow)
    sums = add_seen_keys(sums, i0, ptr, num, cfg, place, plan, False)
    if cfg.MASKS:
        if lib.has_nan(sums.dq) | lib.has_nan(sums.dtq):
            # tiles are loaded again: kept until here, they would take registers from the loop
            sums = add_seen_keys(sums, i0, ptr, num, cfg, place, plan, True)
    lib.store_queries(ptr.dq, num.dq, sums.dq, i0, cfg, place, num.scale)
    lib.store_queries(ptr.dtq, num.dtq, sums.dtq, i0, cfg, place, num.scale)
    store_rows(ptr.dbias_rows, sums.rows, i0, num, cfg, place)
    store_rows(ptr.dtbias_rows, sums.trows, i0, num, cfg, place)


TANGENT_DQ = JobSpec(
    "tangent_dq",
    tangent_dq_kernel,
    "queries",
    ("tq", "tk", "tv", "dout", "dtout", "dq", "dtq"),
    alternate=True,
)
