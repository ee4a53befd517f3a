# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The forward: a tile of queries is resident, tiles of keys pass.

The recurrence is in ``rules/softmax.py``. At the end come the sink, ``O / l`` and ``LSE = m + log
l``. Exponentials are in base 2 with ``scale log2(e)`` folded in, except for natural scores
(``Problem.natural``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .. import lib, rules
from ..launch import JobSpec, launch
from ..tiles import Tiles


@triton.jit
def softmax_step(s, m, num, cfg):
    """Return (P, alpha, m) of a tile of scores, after rows of maximum m."""
    if cfg.FOLDED:
        m_new, base = rules.moved(m, tl.max(s, 1) * num.scale2)
        p = tl.exp2(s * num.scale2 - base[:, None])
    else:
        m_new, base = rules.moved(m, tl.max(s, 1))
        p = lib.power(s - base[:, None], cfg)
    return p, lib.power(m - base, cfg), m_new


@triton.jit
def attend_tiles(m, l, acc, q, ptr, num, cfg, place, row, plan, KIND: tl.constexpr):
    """Return (m, l, O) after the tiles of the plan; m is in the units of the scores.

    m and l are ``[BLOCK_Q]``, q and acc ``[BLOCK_Q, BLOCK_D]``, row ``[BLOCK_Q, 1]``.
    """
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, lib.tile_count(plan, KIND)):
        tile, partial = lib.nth_tile(i, ptr, plan, KIND)
        j0 = tile * BLOCK_K
        k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        s = tl.dot(q, tl.trans(k), input_precision=cfg.PRECISION)
        s, _ = lib.scored(s, ptr, num, cfg, place, row, j0 + j)
        if cfg.EDGES and KIND != "full":
            if KIND == "partial" or partial:
                s = tl.where(lib.seen(ptr, num, cfg, place, row, j0 + j), s, float("-inf"))
        p, alpha, m = softmax_step(s, m, num, cfg)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if ptr.seed is not None:
            p = tl.where(lib.kept(ptr, num, place, row, j0, j, BLOCK_K), p, 0.0)
        v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=cfg.PRECISION)
    return m, l, acc


@triton.jit
def attend_keys(m, q, start, end, ptr, num, cfg, place, row):
    """Return O ``[BLOCK_Q, BLOCK_DV]`` from the keys in [start, end) that each row sees.

    m is final.
    """
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    acc = tl.zeros([cfg.BLOCK_Q, num.v.BLOCK_D], tl.float32)
    for j in tl.range(start, end, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        x = lib.times_row(q, lib.load_row(k_base, num.k, j))
        s, _ = lib.scored(x, ptr, num, cfg, place, row, j0 + column)
        if cfg.FOLDED:
            s = s * num.scale2
        p = lib.power(s - tl.where(m == float("-inf"), 0.0, m)[:, None], cfg)
        if ptr.seed is not None:
            p = tl.where(lib.kept(ptr, num, place, row, j0, column, 16), p, 0.0)
        v = lib.load_row(v_base, num.v, j)
        acc += tl.where(lib.seen(ptr, num, cfg, place, row, j0 + column), p * v, 0.0)
    return acc


@triton.jit(do_not_specialize=["num"])
def forward_kernel(ptr, num, cfg):
    """Store out and lse of one tile of queries of a head."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    tile = tl.program_id(0) % num.tiles
    head = tl.program_id(0) // num.tiles
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    q_base = lib.queries(ptr.q, num.q, cfg, place)
    rows = i0 + tl.arange(0, BLOCK_Q)
    row = tl.minimum(rows, place.nq - 1)[:, None]  # rows past the end repeat the last
    q = lib.load_tile(q_base, num.q, i0, place.nq, BLOCK_Q, True)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, num.v.BLOCK_D], tl.float32)
    if cfg.SPLIT:
        m, l, acc = attend_tiles(m, l, acc, q, ptr, num, cfg, place, row, plan, "full")
        m, l, acc = attend_tiles(m, l, acc, q, ptr, num, cfg, place, row, plan, "partial")
    else:
        m, l, acc = attend_tiles(m, l, acc, q, ptr, num, cfg, place, row, plan, "any")
    if cfg.MASKS:
        if lib.has_nan(acc):
            # loaded again: kept until here, it would take registers from the loop
            q = lib.load_tile(q_base, num.q, i0, place.nq, BLOCK_Q, True)
            acc = attend_keys(m, q, 0, place.used, ptr, num, cfg, place, row)

    acc, lse = lib.finished(m, l, acc, ptr, num, cfg, place.head)
    lib.store_queries(ptr.out, num.out, acc, i0, cfg, place)
    to = lib.vector(ptr.lse, place.b, place.head, place.q_start, num.total_q, cfg.HQ, cfg.PACKED)
    tl.store(to + rows, lse, mask=rows < place.nq)


FORWARD = JobSpec("forward", forward_kernel, "queries", ("out",))


def forward(
    problem: Problem, tensors: Tensors, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``); ``tiles`` overrides the tables."""
    q = tensors.q
    out = q.new_empty(*problem.out_shape)
    lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
    if lse.numel():
        launch(FORWARD, problem, tensors, tiles, {"out": out, "lse": lse})
    return out, lse
