# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The forward of few queries: the heads of a group share a tile, and programs share its keys.

Row r of a kv head's rows is query ``r // GROUP`` of its query head ``r % GROUP``. A program stores
the sums of its part of the keys, O, m and l of ``rules/softmax.py``, in float32. The second kernel
continues the recurrence over the parts, in their order: m and l are apart, because ``m + log l``
would lose l where m is as large as its dtype goes. ``parts.py`` has the number of parts. A single
part needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .. import lib, parts, rules, short_keys
from ..kernel_args import prepared
from ..launch import Job, JobSpec, launch
from ..tiles import Tiles
from .forward import attend_keys, attend_tiles, finished
from .forward import forward as forward_of_tiles

#: parts that a program of the second kernel reads at once: with four warps 64 numbers a thread
MERGED = 64


@triton.jit
def plan_part(part, i0, i1, ptr, num, cfg, place):
    """Return the plan of one part of the tiles of keys that queries i0 to i1 see.

    The tiles that are seen are divided evenly, whatever the lengths and bands on the device.
    """
    plan = lib.plan_band(i0, i1, ptr, num, cfg, place)
    n_full = plan.n_full
    if ptr.q_ids is not None or ptr.allowed is not None:
        n_full = 0  # they may forbid any pair
    # 64 bits: the products of packed lengths and parts
    count = tl.cast(plan.count, tl.int64)
    first = (count * part // num.parts).to(tl.int32)
    last = (count * (part + 1) // num.parts).to(tl.int32)
    return lib.TilePlan(last - first, n_full, plan.first + first, plan.full)


@triton.jit
def row_of(number, head, place, num, cfg):
    """Return the number of a row in lse ``[B, Hq, Nq]``, or ``[1, Hq, total_q]``."""
    b = tl.cast(place.b, tl.int64)
    if cfg.PACKED:
        b = b * 0
    return (b * cfg.HQ + head) * num.total_q + place.q_start + number


@triton.jit(do_not_specialize=["num"])
def few_kernel(ptr, num, cfg):
    """Store the sums of a tile of rows of a kv head over a part of the keys.

    With one part store out and lse.
    """
    ROWS: tl.constexpr = cfg.BLOCK_Q
    GROUP: tl.constexpr = cfg.GROUP
    HK: tl.constexpr = cfg.HQ // cfg.GROUP
    # neighbours read the heads of the same keys, which are neighbours in memory
    kv = tl.program_id(0) % HK
    rest = tl.program_id(0) // HK
    tile = rest % num.tiles
    part = rest // num.tiles % num.parts
    b = rest // num.tiles // num.parts
    if cfg.PACKED:
        b, tile = lib.sequence_of_slot(ptr.cu_q, tile, num.batch, num.total_q, ROWS, GROUP)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    first = tile * ROWS
    if first >= sizes.nq * GROUP:
        return
    one = lib.place_of(ptr, num, cfg, b, kv * GROUP, sizes)
    rows = first + tl.arange(0, ROWS)
    inside = rows < sizes.nq * GROUP
    query = tl.minimum(rows // GROUP, sizes.nq - 1)  # rows past the end repeat the last query
    heads = kv * GROUP + rows % GROUP
    place = lib.Place(
        one.b, heads[:, None], kv, one.q_start, one.nq, one.k_start, one.nk, one.used, one.offset,
        one.prefix,
    )  # fmt: skip
    row = query[:, None]
    i1 = tl.minimum(first + ROWS, sizes.nq * GROUP) - 1
    plan = plan_part(part, first // GROUP, i1 // GROUP, ptr, num, cfg, one)
    q = load_group(lib.queries(ptr.q, num.q, cfg, one), num.q, rows, query, inside, GROUP)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, num.v.BLOCK_D], tl.float32)
    m, l, acc = attend_tiles(m, l, acc, q, ptr, num, cfg, place, row, plan, "any")
    if cfg.MASKS:
        if lib.has_nan(acc):
            # loaded again: kept until here, it would take registers from the loop
            q = load_group(lib.queries(ptr.q, num.q, cfg, one), num.q, rows, query, inside, GROUP)
            start = plan.first * cfg.BLOCK_K
            end = tl.minimum(start + plan.count * cfg.BLOCK_K, place.used)
            acc = attend_keys(m, q, start, end, ptr, num, cfg, place, row)

    number = row_of(query, heads, one, num, cfg)
    if ptr.part_out is None:
        acc, lse = finished(m, l, acc, ptr, num, cfg, heads)
        out = lib.queries(ptr.out, num.out, cfg, one)
        d = tl.arange(0, num.out.BLOCK_D)[None, :]
        at = group_pointers(out, num.out, rows, query, GROUP)[:, None] + d
        acc = acc.to(ptr.out.dtype.element_ty)
        tl.store(at, acc, mask=inside[:, None] & (d < num.out.D))
        tl.store(ptr.lse + number, lse, mask=inside)
    else:
        store_part(m, l, acc, part, number, inside, b, ptr, num, cfg)


@triton.jit
def group_pointers(x, matrix, rows, query, GROUP: tl.constexpr):
    """Return ``[ROWS]`` pointers to the rows of a group; x points to its first head's."""
    head = (rows % GROUP).to(tl.int64) * matrix.head * matrix.ALIGN
    return x + (head + query.to(tl.int64) * matrix.ROW)


@triton.jit
def load_group(x, matrix, rows, query, inside, GROUP: tl.constexpr):
    """Return the rows of a group ``[ROWS, BLOCK_D]``, zeros past the end and past D."""
    d = tl.arange(0, matrix.BLOCK_D)
    at = group_pointers(x, matrix, rows, query, GROUP)[:, None] + d[None, :]
    return tl.load(at, mask=inside[:, None] & (d < matrix.D)[None, :], other=0.0)


@triton.jit
def store_part(m, l, acc, part, number, inside, b, ptr, num, cfg):
    """Store the sums of a part; rows that saw nothing have l = 0, and their O is not read."""
    total = tl.cast(num.total_q, tl.int64) * cfg.HQ
    if not cfg.PACKED:
        total = total * num.batch
    tl.store(ptr.part_rows + 2 * part * total + number, m, mask=inside)
    tl.store(ptr.part_rows + (2 * part + 1) * total + number, l, mask=inside)
    d = tl.arange(0, num.v.BLOCK_D)[None, :]
    at = ptr.part_out + (part * total + number)[:, None] * num.v.D + d
    tl.store(at, acc, mask=(inside & (l != 0.0))[:, None] & (d < num.v.D))


@triton.jit(do_not_specialize=["num"])
def merge_kernel(ptr, num, cfg):
    """Store out and lse of one row, of one query head, from the sums of all parts."""
    MERGED: tl.constexpr = cfg.BLOCK_K
    number = tl.program_id(0).to(tl.int64)
    total = tl.num_programs(0).to(tl.int64)
    query = tl.program_id(0) % num.total_q
    head = tl.program_id(0) // num.total_q
    d = tl.arange(0, num.v.BLOCK_D)[None, :]

    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, num.v.BLOCK_D], tl.float32)
    for first in tl.range(0, num.parts, MERGED):
        part = first + tl.arange(0, MERGED)
        at = ptr.part_rows + 2 * part * total + number
        m_part = tl.load(at, mask=part < num.parts, other=float("-inf"))
        l_part = tl.load(at + total, mask=part < num.parts, other=0.0)
        seen = l_part != 0.0
        at = ptr.part_out + (part * total + number)[:, None] * num.v.D + d
        o = tl.load(at, mask=seen[:, None] & (d < num.v.D), other=0.0)
        m_new, base = rules.moved(m, tl.max(m_part, 0))
        weight = tl.where(seen, lib.power(m_part - base, cfg), 0.0)
        alpha = lib.power(m - base, cfg)
        l = l * alpha + tl.sum(weight * l_part, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, None] * o, 0)[None, :]
        m = m_new

    acc, lse = finished(m, l, acc, ptr, num, cfg, head % cfg.HQ)
    out = lib.first_row(ptr.out, num.out, head // cfg.HQ, head % cfg.HQ, 0, False)
    at = out + tl.cast(query, tl.int64) * num.out.ROW + d
    tl.store(at, acc.to(ptr.out.dtype.element_ty), mask=d < num.out.D)
    tl.store(ptr.lse + number + tl.arange(0, 1), lse)


FEW = JobSpec("few", few_kernel, "groups", ("out",), lists=False)
MERGE = JobSpec("merge", merge_kernel, "rows", ("out",))


def forward(
    problem: Problem, tensors: Tensors, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of any problem; ``tiles`` overrides the tables of few queries."""
    if tiles is None and not parts.splits(problem):
        return forward_of_tiles(problem, tensors, short_keys.forward_tiles(problem))
    tensors = prepared(tensors)  # also for the second kernel, which reads the sink
    q = tensors.q
    out = q.new_empty(*problem.out_shape)
    lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
    if not lse.numel():
        return out, lse

    def sums(job: Job) -> dict[str, Tensor]:
        count = job.numbers.parts
        if count == 1:
            return {"out": out, "lse": lse}
        size = lse.numel() * count
        # one tensor: an allocation takes 3 us of the host
        both = lse.new_empty(size * (problem.dv + 2))
        part_out = both[: size * problem.dv].view(count, *problem.lse_shape, problem.dv)
        return {"part_out": part_out, "part_rows": both[size * problem.dv :]}

    ptr = launch(FEW, problem, tensors, tiles, {}, sums)
    if ptr.part_out is not None:
        count = ptr.part_out.shape[0]
        merged = Tiles(1, min(MERGED, triton.next_power_of_2(count)), 4, 1, parts=count)
        names = ("sink", "seed", "out", "lse", "part_out", "part_rows")
        values = (tensors.sink, tensors.seed, out, lse, ptr.part_out, ptr.part_rows)
        launch(MERGE, problem, tensors, merged, dict(zip(names, values, strict=True)))
    return out, lse
