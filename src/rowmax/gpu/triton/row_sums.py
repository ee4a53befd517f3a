# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""The rest of LSE, ``log2(sum_j exp(s_ij - LSE_i))``: what LSE lost when it was rounded.

A backward makes weights from LSE. Of a row whose biases are all -1e9 it has lost log n, and the
weights would sum to n. Such rows (``FAR``) are passed over once more here; for all others the
rest is 0 and a program ends after it has read its LSE.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import FAR, Problem, Tensors
from .bundles import (
    ROW_UNIT,
    Pointers,
    constants,
    dense_batch,
    numbers,
    pointers,
    precision_of,
    slots,
    strides_of,
)
from .launch import Job, launch
from .maps import listed, order_steps, with_order
from .scores import LOG2E, load_rows, scored, seen
from .steps import (
    keys_in_use,
    load_tile,
    matrix,
    nth_tile,
    offset_of,
    plan_tiles,
    sequence_of_slot,
    sizes,
    vector,
)
from .tiles import Tiles

_FAR = tl.constexpr(FAR)


@triton.jit
def add_weights(total, q, lse, k_base, t, n, c, b, head, row, plan, nq, nk, used, offset):
    """total with ``exp(s - lse)`` of every key that a row sees."""
    BLOCK_K: tl.constexpr = c.BLOCK_K
    j = tl.arange(0, BLOCK_K)[None, :]
    for i in tl.range(0, plan[0]):
        tile, partial = nth_tile(i, t, plan, "any")
        j0 = tile * BLOCK_K
        k = load_tile(k_base, c.ROW_K, j0, used, BLOCK_K, c.D, c.BLOCK_D, c.RAGGED_K)
        x = tl.dot(q, tl.trans(k), input_precision=c.PRECISION)
        s, _ = scored(x, t, n, c, b, head, row, j0 + j, nq, nk, offset)
        p = tl.exp2((s - lse[:, None]) * LOG2E)
        if c.EDGES:
            if partial:
                p = tl.where(seen(t, n, b, head, row, j0 + j, nq, used, offset), p, 0.0)
        total += tl.sum(p, 1)
    return total


@triton.jit(do_not_specialize=["n"])
def row_sums_kernel(t, n, c):
    PACKED: tl.constexpr = t.cu_q is not None
    BLOCK_Q: tl.constexpr = c.BLOCK_Q
    tile = tl.program_id(0) % n.tiles
    head = tl.program_id(0) // n.tiles
    b = head // c.HQ
    head = head % c.HQ
    if PACKED:
        b, tile = sequence_of_slot(t.cu_q, tile, n.batch, n.total_q, BLOCK_Q)
    q_start, nq, k_start, nk = sizes(t, n, b, False)
    i0 = tile * BLOCK_Q
    if i0 >= nq:
        return
    rows = i0 + tl.arange(0, BLOCK_Q)
    lse = vector(t.lse, b, head, q_start, n.total_q, c.HQ, PACKED)
    lse = load_rows(lse, rows, nq, 0.0, True)
    far = (tl.abs(lse) >= _FAR) & (tl.abs(lse) < float("inf"))
    total = tl.zeros([BLOCK_Q], tl.float32)
    if tl.max(far.to(tl.int32), 0) > 0:
        used = keys_in_use(t, b, nk, n)
        offset = offset_of(nq, nk, used, c)
        kv_head = head // c.GROUP
        q = matrix(t.q, n.stride.q, b, head, q_start, c.ROW_Q, PACKED, c.ALIGN)
        q = load_tile(q, c.ROW_Q, i0, nq, BLOCK_Q, c.D, c.BLOCK_D, True)
        k_base = matrix(t.k, n.stride.k, b, kv_head, k_start, c.ROW_K, PACKED, c.ALIGN)
        i1 = tl.minimum(i0 + BLOCK_Q, nq) - 1
        plan = plan_tiles(
            t, n, b, head, tile, i0, i1, offset, n.left, n.right, used, c.BLOCK_K
        )  # fmt: skip
        row = tl.minimum(rows, nq - 1)[:, None]
        total = add_weights(
            total, q, lse, k_base, t, n, c, b, head, row, plan, nq, nk, used, offset
        )  # fmt: skip
        if t.sink is not None:
            total += tl.exp2((tl.load(t.sink + head).to(tl.float32) - lse) * LOG2E)
    rest = tl.where(far & (total > 0.0), tl.log2(total), 0.0)
    to = vector(t.rest, b, head, q_start, n.rows * 16, c.HQ, PACKED)
    tl.store(to + rows, rest, mask=rows < nq)


def row_sums(
    problem: Problem, tensors: Tensors, lse: Tensor, tiles: Tiles | None = None
) -> Tensor | None:
    """The rest of lse, ``[B, Hq, Nq]`` with rows padded to ``ROW_UNIT``; None if scores are not
    natural."""
    if not problem.natural:
        return None
    rest = lse.new_empty((*lse.shape[:2], -(-problem.total_q // ROW_UNIT) * ROW_UNIT))

    def complete(job: Job, tensors: Tensors) -> Pointers:
        t = pointers(tensors, lse=lse.contiguous())._replace(rest=rest)
        return with_order(t, problem, tensors, job.tiles, over="keys")

    if problem.nk and problem.batch:
        launch("row_sums", problem, tensors, tiles, plan_row_sums, complete)
        return rest
    return rest.zero_()


def plan_row_sums(problem: Problem, tensors: Tensors, tiles: Tiles) -> Job:
    stride, fixed = strides_of(problem, tensors, {})
    if listed(problem):
        stride = stride._replace(order=order_steps(problem, tensors, tiles, over="keys"))
    n = numbers(problem, stride)._replace(tiles=slots(problem, tiles.block_q, "queries"))
    c = constants(problem, tiles, fixed, precision_of(tensors))
    return Job(row_sums_kernel, n, c, tiles, heads=problem.hq * dense_batch(problem))
