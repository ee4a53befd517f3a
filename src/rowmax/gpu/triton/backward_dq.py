# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""dQ: a tile of queries is resident, tiles of keys pass.

``dQ_i = scale sum_j dX_ij k_j``. The kernel also stores the gradient of a bias that broadcasts
over nothing, tile by tile, and sums that of a bias that broadcasts over keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import lib, rules
from ..launch import JobSpec


class QueryTile(NamedTuple):
    """The resident tile. Rows past the end repeat the last."""

    q: Any  # [BLOCK_Q, BLOCK_D]
    do: Any  # [BLOCK_Q, BLOCK_DV]
    lse2: Any  # [BLOCK_Q]
    rest: Any  # [BLOCK_Q, 1], or 0
    delta: Any  # [BLOCK_Q]
    row: Any  # [BLOCK_Q, 1]
    inside: Any  # bool [BLOCK_Q, 1]: not past the end


@triton.jit
def load_queries(i0, ptr, num, cfg, place):
    """Return the QueryTile from row i0 on."""
    rows = i0 + tl.arange(0, cfg.BLOCK_Q)
    q = lib.load_queries(ptr.q, num.q, i0, cfg, place, True)
    do = lib.load_queries(ptr.dout, num.dout, i0, cfg, place, True)
    lse2, delta = lib.row_numbers(rows, do, i0, ptr, num, cfg, place, True)
    rest = lib.load_rest(ptr, num, cfg, place, rows[:, None], True)
    row = tl.minimum(rows, place.nq - 1)[:, None]
    return QueryTile(q, do, lse2, rest, delta, row, (rows < place.nq)[:, None])


@triton.jit
def tile_gradient(
    x, k_base, v_base, j0, j, partial, ptr, num, cfg, place, KIND: tl.constexpr
):  # fmt: skip
    """Return (k, q.k, y of ``rules.score``, dS) of the resident tile x with the keys from j0 on."""
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
    s = tl.dot(x.q, tl.trans(k), input_precision=cfg.PRECISION)
    v = lib.load_tile(v_base, num.v, j0, place.used, BLOCK_K, cfg.RAGGED_K)
    dp = tl.dot(x.do, tl.trans(v), input_precision=cfg.PRECISION)
    p, y = lib.weights(
        s, x.lse2[:, None], x.rest, ptr, num, cfg, place, x.row, j0 + j, partial, KIND
    )
    _, dp = lib.dropped(p, dp, ptr, num, place, x.row, j0, j, BLOCK_K)
    return k, s, y, rules.score_gradient(p, dp, x.delta[:, None])


@triton.jit
def add_keys(dq, sums, x, ptr, num, cfg, place, plan, KIND: tl.constexpr):
    """Return (dQ, row sums of dS) after the tiles of one kind; ``x`` is the resident tile.

    dq is ``[BLOCK_Q, BLOCK_D]`` and lacks the scale, sums is ``[BLOCK_Q]``.
    """
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, lib.tile_count(plan, KIND)):
        tile, partial = lib.nth_tile(i, ptr, plan, KIND)
        j0 = tile * BLOCK_K
        k, _, y, ds = tile_gradient(x, k_base, v_base, j0, j, partial, ptr, num, cfg, place, KIND)
        if ptr.dbias is not None:
            ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, j0 + j, partial, KIND)
            lib.store_pairs(ptr.dbias, ds, num, cfg, place, x.row, j0 + j, x.inside)
        if ptr.dbias_rows is not None:
            ds = lib.only_seen(ds, ptr, num, cfg, place, x.row, j0 + j, partial, KIND)
            sums += tl.sum(ds, 1)
        ds = lib.product_gradient(ds, y, ptr, num, cfg, place)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=cfg.PRECISION)
    return dq, sums


@triton.jit
def add_each_key(x, ptr, num, cfg, place):
    """Return dQ ``[BLOCK_Q, BLOCK_D]``, without scale, from the keys that each row sees."""
    k_base = lib.keys(ptr.k, num.k, cfg, place)
    v_base = lib.keys(ptr.v, num.v, cfg, place)
    dq = tl.zeros([cfg.BLOCK_Q, num.q.BLOCK_D], tl.float32)
    for j in tl.range(0, place.used, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        k = lib.load_row(k_base, num.k, j)
        v = lib.load_row(v_base, num.v, j)
        s = lib.times_row(x.q, k)
        p, y = lib.weights(
            s, x.lse2[:, None], x.rest, ptr, num, cfg, place, x.row, j0 + column, False, "full"
        )
        dp = lib.times_row(x.do, v)
        _, dp = lib.dropped(p, dp, ptr, num, place, x.row, j0, column, 16)
        ds = lib.product_gradient(
            rules.score_gradient(p, dp, x.delta[:, None]), y, ptr, num, cfg, place
        )
        dq += tl.where(lib.seen(ptr, num, cfg, place, x.row, j0 + column), ds * k, 0.0)
    return dq


@triton.jit
def store_rows(x, sums, i0, num, cfg, place):
    """Store sums over keys ``[BLOCK_Q]`` of rows from i0 on, unless x is None."""
    if x is not None:
        to = lib.vector(x, place.b, place.head, 0, num.longest_q, cfg.HQ, False)
        row = i0 + tl.arange(0, cfg.BLOCK_Q)
        tl.store(to + row, sums, mask=row < tl.where(place.b < num.batch, place.nq, 0))


@triton.jit(do_not_specialize=["num"])
def backward_dq_kernel(ptr, num, cfg):
    """Store dQ of one tile of queries of a head."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    tile, head = lib.tile_and_head(num)
    b, tile = lib.sequence_of_queries(ptr, num, cfg, tile, head)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= sizes.nq:
        return
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    x = load_queries(i0, ptr, num, cfg, place)
    plan = lib.plan_keys(ptr, num, cfg, place, tile)

    dq = tl.zeros([BLOCK_Q, num.q.BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_Q], tl.float32)
    if cfg.SPLIT:
        dq, sums = add_keys(dq, sums, x, ptr, num, cfg, place, plan, "full")
        dq, sums = add_keys(dq, sums, x, ptr, num, cfg, place, plan, "partial")
    else:
        dq, sums = add_keys(dq, sums, x, ptr, num, cfg, place, plan, "any")
    if cfg.MASKS:
        if lib.has_nan(dq):
            # loaded again: kept until here, they would take registers from the loop
            x = load_queries(i0, ptr, num, cfg, place)
            dq = add_each_key(x, ptr, num, cfg, place)
    lib.store_queries(ptr.dq, num.dq, dq, i0, cfg, place, num.scale)
    store_rows(ptr.dbias_rows, sums, i0, num, cfg, place)


DQ = JobSpec("dq", backward_dq_kernel, "queries", ("dout", "dq"), alternate=True)
