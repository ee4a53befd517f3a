# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The forward of few queries: the heads of a group share a tile, and programs share its keys.

Row r of a kv head's rows is query ``r // GROUP`` of its query head ``r % GROUP``. A program stores
the sums of its part of the keys, which ``merge.py`` adds. ``parts.py`` has the number of parts. A
single part needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .. import lib, parts, short_keys
from ..kernel_args import prepared
from ..launch import Job, JobSpec, launch
from ..merge import merge
from ..tiles import Tiles
from .forward import attend_keys, attend_tiles
from .forward import forward as forward_of_tiles


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
def places_of(query, head, place, num, cfg):
    """Return the places of rows in lse ``[B, Hq, Nq]`` and in out ``[B, Nq, Hq]``.

    Packed ones are of ``[Hq, total_q]`` and ``[total_q, Hq]``.
    """
    b = tl.cast(place.b, tl.int64)
    if cfg.PACKED:
        b = b * 0
    row = place.q_start + query
    return (b * cfg.HQ + head) * num.total_q + row, (b * num.total_q + row) * cfg.HQ + head


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

    number, at = places_of(query, heads, one, num, cfg)
    if ptr.part_out is None:
        acc, lse = lib.finished(m, l, acc, ptr, num, cfg, heads)
        out = lib.queries(ptr.out, num.out, cfg, one)
        d = tl.arange(0, num.out.BLOCK_D)[None, :]
        at = group_pointers(out, num.out, rows, query, GROUP)[:, None] + d
        acc = acc.to(ptr.out.dtype.element_ty)
        tl.store(at, acc, mask=inside[:, None] & (d < num.out.D))
        tl.store(ptr.lse + number, lse, mask=inside)
    else:
        store_part(m, l, acc, part, number, at, inside, ptr, num, cfg)


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
def store_part(m, l, acc, part, number, place, inside, ptr, num, cfg):
    """Store the sums of a part; rows that saw nothing have l = 0, and their O is not read.

    ``number`` is the place of a row in lse, ``place`` that in out.
    """
    total = tl.cast(num.total_q, tl.int64) * cfg.HQ
    if not cfg.PACKED:
        total = total * num.batch
    tl.store(ptr.part_rows + part * total + number, m, mask=inside)
    tl.store(ptr.part_rows + (num.parts + part) * total + number, l, mask=inside)
    d = tl.arange(0, num.v.BLOCK_D)[None, :]
    at = ptr.part_out + (part * total + place)[:, None] * num.v.D + d
    tl.store(at, acc, mask=(inside & (l != 0.0))[:, None] & (d < num.v.D))


FEW = JobSpec("few", few_kernel, "groups", ("out",), lists=False)


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
        return {"out": out, "lse": lse} if count == 1 else parts.parts_for(problem, lse, count)

    ptr = launch(FEW, problem, tensors, tiles, {}, sums)
    if ptr.part_out is not None:
        merge(problem, tensors, ptr.part_out, ptr.part_rows, out, lse)
    return out, lse
