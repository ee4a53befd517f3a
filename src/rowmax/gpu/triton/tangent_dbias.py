# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The gradients of a bias that broadcasts over the batch or heads, and of its tangent.

A tile of the bias is resident and its sharers pass, as in ``backward_dbias.py``; each reads its
operands by parts of the columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib, second_order
from ..launch import JobSpec
from ..second_order import At
from .backward_dbias import load_columns, sharer, tile_of_program, tile_state
from .tangent_dq import load_numbers


@triton.jit
def load_queries(x, matrix, i0, d0, cfg, place):
    """Return ``[BLOCK_Q, WIDTH]`` of queries from row i0, column d0 on."""
    x = lib.queries(x, matrix, cfg, place)
    return load_columns(x, matrix, i0, place.nq, d0, cfg, cfg.BLOCK_Q, True)


@triton.jit
def load_keys(x, matrix, j0, d0, cfg, place):
    """Return ``[BLOCK_K, WIDTH]`` of keys from row j0, column d0 on."""
    x = lib.keys(x, matrix, cfg, place)
    return load_columns(x, matrix, j0, place.used, d0, cfg, cfg.BLOCK_K, True)


@triton.jit
def sharer_products(i0, j0, ptr, num, cfg, place):
    """Return (q.k, its tangent, beta, gamma) of a tile of one sharer."""
    s = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    tx = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    beta = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    gamma = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    for part in tl.range(0, cfg.PARTS):
        d0 = part * cfg.WIDTH
        q = load_queries(ptr.q, num.q, i0, d0, cfg, place)
        k = tl.trans(load_keys(ptr.k, num.k, j0, d0, cfg, place))
        g = load_queries(ptr.dtout, num.dtout, i0, d0, cfg, place)
        v = tl.trans(load_keys(ptr.v, num.v, j0, d0, cfg, place))
        s = tl.dot(q, k, s, input_precision=cfg.PRECISION)
        beta = tl.dot(g, v, beta, input_precision=cfg.PRECISION)
        if ptr.tq is not None:
            tq = load_queries(ptr.tq, num.tq, i0, d0, cfg, place)
            tx = tl.dot(tq, k, tx, input_precision=cfg.PRECISION)
        if ptr.tk is not None:
            tk = load_keys(ptr.tk, num.tk, j0, d0, cfg, place)
            tx = tl.dot(q, tl.trans(tk), tx, input_precision=cfg.PRECISION)
        if ptr.dout is not None:
            e = load_queries(ptr.dout, num.dout, i0, d0, cfg, place)
            gamma = tl.dot(e, v, gamma, input_precision=cfg.PRECISION)
        if ptr.tv is not None:
            tv = load_keys(ptr.tv, num.tv, j0, d0, cfg, place)
            gamma = tl.dot(g, tl.trans(tv), gamma, input_precision=cfg.PRECISION)
    return s, tx, beta, gamma


@triton.jit
def add_sharer(acc, tacc, place, state, ptr, num, cfg, tile):
    """Return (acc, tacc) ``[BLOCK_Q, BLOCK_K]`` with dS and dS' of the sharer at ``place``."""
    i0 = tile.tile_q * cfg.BLOCK_Q
    j0 = tile.tile_k * cfg.BLOCK_K
    row = i0 + tl.arange(0, cfg.BLOCK_Q)[:, None]
    j = tl.arange(0, cfg.BLOCK_K)[None, :]
    at = At(row, j0 + j, j0, j, False)
    x, tx, beta, gamma = sharer_products(i0, j0, ptr, num, cfg, place)
    numbers, b, c = load_numbers(i0, ptr, num, cfg, place)
    w = second_order.weights(
        x, tx, numbers, at, ptr, num, cfg, place, "full", cfg.BLOCK_K, tile.bias
    )
    ds, dts = second_order.score_gradients(w, beta, gamma, b, c, ptr, num)
    partial = state < 2
    acc += lib.only_seen(ds, ptr, num, cfg, place, at.row, at.col, partial, "any")
    tacc += lib.only_seen(dts, ptr, num, cfg, place, at.row, at.col, partial, "any")
    return acc, tacc


@triton.jit(do_not_specialize=["num"])
def tangent_dbias_kernel(ptr, num, cfg):
    """Store the gradients of one tile of a plane of the bias and of its tangent."""
    tile, row, col, shared = tile_of_program(ptr, num, cfg)
    acc = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    tacc = tl.zeros([cfg.BLOCK_Q, cfg.BLOCK_K], tl.float32)
    sharers = cfg.SHARING * (num.batch // num.bias_batch)
    for i in tl.range(0, sharers, num_stages=1):
        place = sharer(i, ptr, num, cfg, tile)
        state = tile_state(ptr, num, cfg, tile, place)
        if state > 0:
            acc, tacc = add_sharer(acc, tacc, place, state, ptr, num, cfg, tile)
    inside = (row < shared.nq) & (col < shared.nk)
    lib.store_pairs(ptr.dbias, acc, num, cfg, shared, row, col, inside)
    lib.store_pairs(ptr.dtbias, tacc, num, cfg, shared, row, col, inside)


TANGENT_DBIAS = JobSpec(
    "tangent_dbias", tangent_dbias_kernel, "bias", ("tq", "tk", "tv", "dout", "dtout")
)
