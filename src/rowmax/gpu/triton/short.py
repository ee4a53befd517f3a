# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The backward of few keys: all keys of a kv head are resident, and one launch does everything.

A program loads K and V of a kv head once and visits the queries of its group, tile by tile. All
keys are there, so that dQ of a tile is complete: it needs no sum in memory. Delta is computed from
the tiles of O and dO. Few kv heads leave processors idle: then programs share the queries of a kv
head, and a second kernel adds their parts of dK and dV, in their order.

``short_keys.py`` has the calls that this kernel takes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Gradients, Problem, Tensors, Wanted
from .. import lib, preprocess, rules
from ..kernel_args import aligned, prepared
from ..launch import JobSpec
from ..tiles import Tiles
from .backward_dkdv import at_head, sum_each_over_heads
from .backward_dq import add_each_key, load_queries
from .key_parts import launch_in_parts, store_keys


@triton.jit
def seen_keys(ptr, num, cfg, place, row, col):
    """Return True for the pairs that may attend; rows past the end have weights of 0 anyway.

    A band is a range of keys for each row: one comparison a pair where ``lib.seen`` has four.
    """
    if ptr.q_ids is not None or ptr.allowed is not None:
        return lib.seen(ptr, num, cfg, place, row, col)
    else:
        prefix = None
        if ptr.prefix is not None:
            prefix = place.prefix
        low, high = rules.any_range(row, row, place.offset, num.left, num.right, place.used, prefix)
        ok = col < high
        if num.left is not None:
            ok = ok & (col >= low)
        return ok


@triton.jit
def tile_of(n, first, count, cfg, place):
    """Return (place, first row) of tile n of the group: ``count`` tiles of each head."""
    if cfg.GROUP == 1:
        return place, (first + n) * cfg.BLOCK_Q
    else:
        return at_head(place, place.head + n // count), (first + n % count) * cfg.BLOCK_Q


@triton.jit
def no_sums(ptr, num, cfg):
    """Return zeros of the shape in which a tile of dQ is computed, one number if none is needed."""
    if not cfg.MASKS:
        return tl.zeros([1, 1], tl.float32)
    elif cfg.BLOCK_Q >= 64:
        return tl.zeros([cfg.BLOCK_Q, num.q.BLOCK_D], tl.float32)
    else:
        return tl.zeros([num.q.BLOCK_D, cfg.BLOCK_Q], tl.float32)


@triton.jit
def add_tiles(dk, dv, sums, k, v, first, count, ptr, num, cfg, place):
    """Return (dK, dV, sums) after ``count`` tiles of queries of each head; store dQ of each tile.

    k and dk are ``[BLOCK_K, BLOCK_D]``, v and dv ``[BLOCK_K, BLOCK_DV]``. dk lacks the scale. With
    masks ``sums`` adds all tiles of dQ: it is NaN if one holds NaN.
    """
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    j = tl.arange(0, cfg.BLOCK_K)[:, None]
    for n in tl.range(0, count * cfg.GROUP):
        here, i0 = tile_of(n, first, count, cfg, place)
        rows = i0 + tl.arange(0, BLOCK_Q)
        row = rows[None, :]
        q = lib.load_queries(ptr.q, num.q, i0, cfg, here, cfg.RAGGED_Q)
        do = lib.load_queries(ptr.dout, num.dout, i0, cfg, here, cfg.RAGGED_Q)
        lse2, delta = lib.row_numbers(rows, do, i0, ptr, num, cfg, here, cfg.RAGGED_Q)
        rest = lib.load_rest(ptr, num, cfg, here, row, cfg.RAGGED_Q)
        s = tl.dot(k, tl.trans(q), input_precision=cfg.PRECISION)
        p, y = lib.weights(s, lse2[None, :], rest, ptr, num, cfg, here, row, j, False, "full")
        if cfg.EDGES:
            p = tl.where(seen_keys(ptr, num, cfg, here, row, j), p, 0.0)
        dp = tl.dot(v, tl.trans(do), input_precision=cfg.PRECISION)
        pr, dp = lib.dropped(p, dp, ptr, num, here, row, 0, j, cfg.BLOCK_K)
        dv = tl.dot(pr.to(do.dtype), do, dv, input_precision=cfg.PRECISION)
        ds = rules.score_gradient(p, dp, delta[None, :])
        ds = lib.product_gradient(ds, y, ptr, num, cfg, here).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=cfg.PRECISION)
        if BLOCK_Q >= 64:
            dq = tl.dot(tl.trans(ds), k, input_precision=cfg.PRECISION)
            if cfg.MASKS:
                sums += dq
        else:  # the height of a wgmma is 64
            dq = tl.dot(tl.trans(k), ds, input_precision=cfg.PRECISION)
            if cfg.MASKS:
                sums += dq
            dq = tl.trans(dq)
        lib.store_queries(ptr.dq, num.dq, dq, i0, cfg, here, num.scale)
    return dk, dv, sums


@triton.jit
def store_each_dq(first, count, ptr, num, cfg, place):
    """Store dQ of tiles of queries from the keys that each row sees."""
    for n in tl.range(0, count * cfg.GROUP, num_stages=1):
        here, i0 = tile_of(n, first, count, cfg, place)
        dq = add_each_key(load_queries(i0, ptr, num, cfg, here), ptr, num, cfg, here)
        lib.store_queries(ptr.dq, num.dq, dq, i0, cfg, here, num.scale)


@triton.jit(do_not_specialize=["num"])
def short_kernel(ptr, num, cfg):
    """Store dQ of a part of the queries of a kv head's group, and dK and dV of these queries."""
    HK: tl.constexpr = cfg.HQ // cfg.GROUP
    part = tl.program_id(0) % num.parts
    head = tl.program_id(0) // num.parts
    b = head // HK
    sizes = lib.sizes_of(ptr, num, cfg, b, True)
    place = lib.place_of(ptr, num, cfg, b, head % HK * cfg.GROUP, sizes)
    tiles = tl.cdiv(place.nq, cfg.BLOCK_Q)
    first = tiles * part // num.parts
    count = tiles * (part + 1) // num.parts - first

    k = lib.load_keys(ptr.k, num.k, 0, cfg, place, cfg.RAGGED_K)
    v = lib.load_keys(ptr.v, num.v, 0, cfg, place, cfg.RAGGED_K)
    dk = tl.zeros([cfg.BLOCK_K, num.k.BLOCK_D], tl.float32)
    dv = tl.zeros([cfg.BLOCK_K, num.v.BLOCK_D], tl.float32)
    sums = no_sums(ptr, num, cfg)
    dk, dv, sums = add_tiles(dk, dv, sums, k, v, first, count, ptr, num, cfg, place)
    if cfg.MASKS:
        if lib.has_nan(sums):
            tl.debug_barrier()  # other threads have stored these rows
            store_each_dq(first, count, ptr, num, cfg, place)
        if lib.has_nan(dk) | lib.has_nan(dv):
            i0 = first * cfg.BLOCK_Q
            i1 = tl.minimum(i0 + count * cfg.BLOCK_Q, place.nq)
            dk, dv = sum_each_over_heads(0, cfg.GROUP, i0, i1, ptr, num, cfg, place)
    if ptr.seed is not None:
        dv = dv * num.keep_scale
    store_keys(ptr.dk, ptr.dk_parts, num.dk, dk * num.scale, 0, part, num, cfg, place)
    store_keys(ptr.dv, ptr.dv_parts, num.dv, dv, 0, part, num, cfg, place)


SHORT = JobSpec("short", short_kernel, "heads", ("out", "dout", "dq", "dk", "dv"), lists=False)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    tiles: Tiles,
) -> Gradients:
    """Return the wanted gradients of q, k and v; the tiles hold all keys."""
    tensors = prepared(tensors)
    q, k, v = tensors[:3]
    lse = lse.contiguous()
    dq = q.new_empty(q.shape)
    dk, dv = (
        t.new_empty(t.shape, dtype=problem.gradient_dtype(name, t))
        for name, t in (("k", k), ("v", v))
    )
    made: dict[str, Any] = {
        "out": out.contiguous(),
        "lse": lse,
        "dout": aligned(dout),
        "dlse": None if dlse is None else dlse.contiguous(),
        "rest": preprocess.row_sums(problem, tensors, lse),
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }
    launch_in_parts(SHORT, problem, tensors, tiles, made, lse)
    return Gradients(dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None)
