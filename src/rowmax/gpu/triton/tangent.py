# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The tangent: the forward's pass over tiles of keys, with two more running sums.

The recurrence is in ``rules/softmax.py`` and ``rules/tangent.py``. The kernel stores out, lse and
their tangents. A number r of each row is subtracted from s' before it is rounded for a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call.inputs import Results, Tangents
from ...call.problem import Problem, Tensors
from .. import lib, rules, second_order
from ..kernel_args import prepared_tangents
from ..launch import JobSpec, launch
from ..rules import LN2
from ..tiles import Tiles
from .forward import softmax_step


class Queries(NamedTuple):
    """The resident tile. Rows past the end repeat the last."""

    q: Any  # [BLOCK_Q, BLOCK_D]
    tq: Any  # as q, or None
    row: Any  # [BLOCK_Q, 1]


@triton.jit
def attend_tiles(m, l, acc, sums, r, tacc, x, ptr, num, cfg, place, plan):
    """Return (m, l, O, tl, r, tO) after the tiles of the plan; m is in the units of the scores.

    m, l, r and ``sums``, which is tl, are ``[BLOCK_Q]``; acc and tacc ``[BLOCK_Q, BLOCK_DV]``.
    """
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    # tangents of a bias and of slopes may differ much from tile to tile
    MOVES: tl.constexpr = ptr.tbias is not None or ptr.theads is not None
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, plan.count):
        tile, partial = lib.nth_tile(i, ptr, plan, "any")
        j0 = tile * BLOCK_K
        k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        tk = lib.load_keys(ptr.tk, num.tk, j0, cfg, place, cfg.RAGGED_K)
        s = tl.dot(x.q, tl.trans(k), input_precision=cfg.PRECISION)
        s, y = lib.scored(s, ptr, num, cfg, place, x.row, j0 + j)
        if cfg.EDGES:
            if partial:
                s = tl.where(lib.seen(ptr, num, cfg, place, x.row, j0 + j), s, float("-inf"))
        p, alpha, m = softmax_step(s, m, num, cfg)
        tile_l = tl.sum(p, 1)
        tx = second_order.two_products(x.tq, k, x.q, tk, cfg)
        t = second_order.score_tangent(tx, y, ptr, num, cfg, place, x.row, j0 + j)
        if cfg.EDGES:
            if partial:  # s' of a pair that is not seen may be NaN
                t = tl.where(p == 0.0, 0.0, t)
        before = r
        l = l * alpha
        sums = sums * alpha
        if MOVES:
            r = rules.tangent_base(l, sums, tile_l, tl.sum(p * t, 1), r)
            sums += (before - r) * l
        else:  # only while the sums are 0: no register is left for more
            r = tl.where(l > 0.0, r, rules.tangent_base(0.0, 0.0, tile_l, tl.sum(p * t, 1), 0.0))
        t = p * (t - r[:, None])
        l += tile_l
        sums += tl.sum(t, 1)
        if ptr.seed is not None:
            keep = lib.kept(ptr, num, place, x.row, j0, j, BLOCK_K)
            p = tl.where(keep, p, 0.0)
            t = tl.where(keep, t, 0.0)
        v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        if MOVES:
            tacc += acc * (before - r)[:, None]
        tacc = tl.dot(t.to(v.dtype), v, tacc * alpha[:, None], input_precision=cfg.PRECISION)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=cfg.PRECISION)
        if ptr.tv is not None:
            tv = lib.load_keys(ptr.tv, num.tv, j0, cfg, place, cfg.RAGGED_K)
            tacc = tl.dot(p.to(v.dtype), tv, tacc, input_precision=cfg.PRECISION)
    return m, l, acc, sums, r, tacc


@triton.jit
def attend_keys(m, r, x, ptr, num, cfg, place):
    """Return (O, tO) ``[BLOCK_Q, BLOCK_DV]`` from the keys that each row sees; m is final."""
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    acc = tl.zeros([cfg.BLOCK_Q, num.v.BLOCK_D], tl.float32)
    tacc = tl.zeros([cfg.BLOCK_Q, num.v.BLOCK_D], tl.float32)
    for j in tl.range(0, place.used, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        k = lib.load_row(k_base, num.k, j)
        tk = lib.key_row(ptr.tk, num.tk, j, cfg, place)
        tx = second_order.two_times_row(x.tq, k, x.q, tk)
        s, y = lib.scored(lib.times_row(x.q, k), ptr, num, cfg, place, x.row, j0 + column)
        t = second_order.score_tangent(tx, y, ptr, num, cfg, place, x.row, j0 + column)
        if cfg.FOLDED:
            s = s * num.scale2
        p = lib.power(s - tl.where(m == float("-inf"), 0.0, m)[:, None], cfg)
        t = p * (t - r[:, None])
        if ptr.seed is not None:
            keep = lib.kept(ptr, num, place, x.row, j0, column, 16)
            p = tl.where(keep, p, 0.0)
            t = tl.where(keep, t, 0.0)
        ok = lib.seen(ptr, num, cfg, place, x.row, j0 + column)
        v = lib.load_row(v_base, num.v, j)
        acc += tl.where(ok, p * v, 0.0)
        tacc += tl.where(ok, t * v, 0.0)
        if ptr.tv is not None:
            tv = lib.key_row(ptr.tv, num.tv, j, cfg, place)
            tacc += tl.where(ok, p * tv, 0.0)
    return acc, tacc


@triton.jit
def store_results(m, l, acc, sums, r, tacc, rows, ptr, num, cfg, place):
    """Store out, lse and their tangents of a tile of rows, from the sums of ``attend_tiles``."""
    i0 = tl.min(rows, 0)
    if not cfg.NATURAL:
        m = m * LN2
    if ptr.sink is not None:
        sink = tl.load(ptr.sink + place.head).to(tl.float32)
        keys = l
        m, l, alpha = rules.with_sink(m, l, sink)
        tsink = 0.0
        if ptr.tsink is not None:
            tsink = tl.load(ptr.tsink + place.head).to(tl.float32)
        sums, tlse = rules.sink_in_tangent(sums * alpha, keys * alpha, m, sink, tsink, r)
        acc = acc * alpha[:, None]
        tacc = tacc * alpha[:, None]
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    if ptr.seed is not None:
        acc = acc * num.keep_scale
        tacc = tacc * num.keep_scale
    acc = acc / l[:, None]
    sums = tl.where(empty, 0.0, sums / l)
    if ptr.sink is None:
        tlse = sums + r
    tacc = rules.out_tangent(tacc / l[:, None], sums[:, None], acc)
    lse = tl.where(empty, float("-inf"), m + tl.log(l))
    nq = place.nq
    lib.store_queries(ptr.out, num.out, acc, i0, cfg, place)
    lib.store_queries(ptr.tout, num.tout, tacc, i0, cfg, place)
    start, total = place.q_start, num.total_q
    to = lib.vector(ptr.lse, place.b, place.head, start, total, cfg.HQ, cfg.PACKED)
    tl.store(to + rows, lse, mask=rows < nq)
    to = lib.vector(ptr.tlse, place.b, place.head, start, total, cfg.HQ, cfg.PACKED)
    tl.store(to + rows, tl.where(empty, 0.0, tlse), mask=rows < nq)


@triton.jit(do_not_specialize=["num"])
def tangent_kernel(ptr, num, cfg):
    """Store out, lse and their tangents of one tile of queries of a head."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    tile = tl.program_id(0) % num.tiles
    head = tl.program_id(0) // num.tiles
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    rows = i0 + tl.arange(0, BLOCK_Q)
    row = tl.minimum(rows, place.nq - 1)[:, None]
    q = lib.load_queries(ptr.q, num.q, i0, cfg, place, True)
    tq = lib.load_queries(ptr.tq, num.tq, i0, cfg, place, True)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, num.v.BLOCK_D], tl.float32)
    x = Queries(q, tq, row)
    m, l, acc, sums, r, tacc = attend_tiles(
        m, zero, acc, zero, zero, acc, x, ptr, num, cfg, place, plan
    )
    if cfg.MASKS:
        if lib.has_nan(acc) | lib.has_nan(tacc):
            # loaded again: kept until here, they would take registers from the loop
            q = lib.load_queries(ptr.q, num.q, i0, cfg, place, True)
            tq = lib.load_queries(ptr.tq, num.tq, i0, cfg, place, True)
            acc, tacc = attend_keys(m, r, Queries(q, tq, row), ptr, num, cfg, place)
    store_results(m, l, acc, sums, r, tacc, rows, ptr, num, cfg, place)


TANGENT = JobSpec("tangent", tangent_kernel, "queries", ("out", "tq", "tk", "tv", "tout"))


def tangent(
    problem: Problem, tensors: Tensors, tangents: Tangents, tiles: Tiles | None = None
) -> Results:
    """Return the results and their tangents; ``tiles`` overrides the tables."""
    q = tensors.q
    out, tout = (q.new_empty(*problem.out_shape) for _ in range(2))
    lse, tlse = (q.new_empty(*problem.lse_shape, dtype=torch.float32) for _ in range(2))
    results = Results(out, lse, tout, tlse)
    if lse.numel():
        made = {**results._asdict(), **named(tangents)}
        launch(TANGENT, problem, tensors, tiles, made)
    return results


def named(tangents: Tangents) -> dict[str, Tensor | None]:
    """Return the tangents as kernels read them, by their names among ``Pointers``."""
    return {f"t{name}": x for name, x in prepared_tangents(tangents)._asdict().items()}
