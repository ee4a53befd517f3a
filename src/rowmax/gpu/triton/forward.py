# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""The forward: a tile of queries stays, tiles of keys pass by it.

``m' = max(m, rowmax S)``, ``alpha = exp(m - m')``, ``l' = alpha l + rowsum exp(S - m')``,
``O' = alpha O + exp(S - m') V``, and at the end the sink, ``O / l`` and ``LSE = m + log l``.
Exponentials are in base 2, with ``scale log2(e)`` folded in, but for natural scores
(``Problem.natural``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .bundles import (
    Pointers,
    constants,
    contiguous_steps,
    dense_batch,
    numbers,
    pointers,
    precision_of,
    slots,
    strides_of,
)
from .launch import Job, launch
from .maps import listed, order_steps, with_order
from .scores import LOG2E, kept, power, scored, seen, to_natural
from .steps import (
    has_nan,
    keys_in_use,
    load_row,
    load_tile,
    matrix,
    nth_tile,
    offset_of,
    plan_tiles,
    sequence_of_slot,
    sizes,
    store_tile,
    times_row,
    vector,
)
from .tiles import Tiles


@triton.jit
def attend_tiles(
    m, l, acc, q, k_base, v_base, t, n, c, b, head, row, plan, nq, nk, used, offset
):  # fmt: skip
    """The recurrence over the tiles that hold something to see; m is in the units of the scores."""
    BLOCK_K: tl.constexpr = c.BLOCK_K
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, plan[0]):
        tile, partial = nth_tile(i, t, plan, "any")
        j0 = tile * BLOCK_K
        k = load_tile(k_base, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, c.RAGGED_K)
        s = tl.dot(q, tl.trans(k), input_precision=c.PRECISION)
        s, _ = scored(s, t, n, c, b, head, row, j0 + j, nq, nk, offset)
        if c.EDGES:
            if partial:
                ok = seen(t, n, b, head, row, j0 + j, nq, used, offset)
                s = tl.where(ok, s, float("-inf"))
        if c.FOLDED:
            m_new = tl.maximum(m, tl.max(s, 1) * n.scale2)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * n.scale2 - safe[:, None])
        else:
            m_new = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = power(s - safe[:, None], c)
        alpha = power(m - safe, c)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
        acc = acc * alpha[:, None]
        if t.seed is not None:
            p = tl.where(kept(t, n, b, head, row, j0, j, BLOCK_K), p, 0.0)
        v = load_tile(v_base, c.ROW_V, j0, used, BLOCK_K, c.DV, c.BLOCK_DV, c.RAGGED_K)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=c.PRECISION)
    return m, l, acc


@triton.jit
def average_key_by_key(
    m, q, k_base, v_base, t, n, c, b, head, row, nq, nk, used, offset
):  # fmt: skip
    """O once m is known, of the keys that each row sees and no others."""
    acc = tl.zeros([c.BLOCK_Q, c.BLOCK_DV], tl.float32)
    for j in tl.range(0, used, num_stages=1):
        j0 = j // 16 * 16
        column = tl.full([1, 1], 0, tl.int32) + (j - j0)
        x = times_row(q, load_row(k_base, c.ROW_K, j, c.D, c.BLOCK_D))
        s, _ = scored(x, t, n, c, b, head, row, j0 + column, nq, nk, offset)
        if c.FOLDED:
            s = s * n.scale2
        p = power(s - tl.where(m == float("-inf"), 0.0, m)[:, None], c)
        if t.seed is not None:
            p = tl.where(kept(t, n, b, head, row, j0, column, 16), p, 0.0)
        ok = seen(t, n, b, head, row, j0 + column, nq, used, offset)
        v = load_row(v_base, c.ROW_V, j, c.DV, c.BLOCK_DV)
        acc += tl.where(ok, p * v, 0.0)
    return acc


@triton.jit
def with_sink(m, l, t, head):
    """(m, l, the factor of O) with the sink; m in natural units, which hold any sink."""
    sink = tl.load(t.sink + head).to(tl.float32)
    m_new = tl.maximum(m, sink)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m - safe) * LOG2E)
    return m_new, l * alpha + tl.exp2((sink - safe) * LOG2E), alpha


@triton.jit(do_not_specialize=["n"])
def forward_kernel(t, n, c):
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    tile = tl.program_id(0) % n.tiles
    head = tl.program_id(0) // n.tiles
    b = head // c.HQ
    head = head % c.HQ
    if PACKED:
        b, tile = sequence_of_slot(t.cu_q, tile, n.batch, n.total_q, BLOCK_Q)
    elif n.right is not None:
        tile = n.tiles - 1 - tile  # the longest first
    q_start, nq, k_start, nk = sizes(t, n, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= nq:
        return
    used = keys_in_use(t, b, nk, n)
    offset = offset_of(nq, nk, used, c)
    kv_head = head // c.GROUP
    q_base = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
    k_base = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
    v_base = matrix(t.v, n.stride.v, b, kv_head, k_start, c.ROW_V, PACKED, c.ALIGN)

    row = tl.minimum(i0 + tl.arange(0, BLOCK_Q), nq - 1)  # those past the end copy the last
    q = load_tile(q_base, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
    i1 = tl.minimum(i0 + BLOCK_Q, nq) - 1
    plan = plan_tiles(
        t, n, b, head, tile, i0, i1, offset, n.left, n.right, used, c.BLOCK_K
    )  # fmt: skip

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, c.BLOCK_DV], tl.float32)
    m, l, acc = attend_tiles(
        m, l, acc, q, k_base, v_base, t, n, c, b, head, row[:, None], plan, nq, nk, used, offset
    )  # fmt: skip
    if c.MASKS:
        if has_nan(acc):
            # loaded again: kept in registers until here, it would cost the loop its own
            q = load_tile(q_base, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
            acc = average_key_by_key(
                m, q, k_base, v_base, t, n, c, b, head, row[:, None], nq, nk, used, offset
            )

    m = to_natural(m, c)
    if t.sink is not None:
        m, l, alpha = with_sink(m, l, t, head)
        acc = acc * alpha[:, None]
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    if t.seed is not None:
        acc = acc * n.keep_scale
    acc = acc / l[:, None]
    lse = tl.where(empty, float("-inf"), m + tl.log(l))
    out = matrix(t.out, n.stride.out, b, head, q_start, c.ROW_OUT, PACKED, c.OUT_ALIGN)
    store_tile(out, c.ROW_OUT, i0, nq, acc, BLOCK_Q, c.DV, c.BLOCK_DV)
    to = vector(t.lse, b, head, q_start, n.total_q, c.HQ, PACKED)
    row = i0 + tl.arange(0, BLOCK_Q)
    tl.store(to + row, lse, mask=row < nq)


def forward(
    problem: Problem, tensors: Tensors, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``); ``tiles`` overrides the tables."""
    q = tensors.q
    out = q.new_empty(*problem.out_shape)
    lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
    if not lse.numel():
        return out, lse

    def complete(job: Job, tensors: Tensors) -> Pointers:
        t = pointers(tensors, out=out, lse=lse)
        return with_order(t, problem, tensors, job.tiles, over="keys")

    launch("forward", problem, tensors, tiles, plan_forward, complete)
    return out, lse


def plan_forward(problem: Problem, tensors: Tensors, tiles: Tiles) -> Job:
    out = contiguous_steps(problem.out_shape)
    stride, fixed = strides_of(problem, tensors, {"out": out})
    if listed(problem):
        stride = stride._replace(order=order_steps(problem, tensors, tiles, over="keys"))
    n = numbers(problem, stride)._replace(tiles=slots(problem, tiles.block_q, "queries"))
    c = constants(problem, tiles, fixed, precision_of(tensors))
    return Job(forward_kernel, n, c, tiles, heads=problem.hq * dense_batch(problem))
