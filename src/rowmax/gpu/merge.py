# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""Merge the sums of parts of the keys: out and lse from O, m and l of each part.

The kernel continues the recurrence of ``rules/softmax.py`` over the parts, in their order. m and l
are apart, because ``m + log l`` would lose l where m is as large as its dtype goes. The parts are
float32; they come from Triton's forward of few queries, and from Hopper's forward.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..call.problem import Problem, Tensors
from . import lib, rules
from .launch import JobSpec, launch
from .parts import MERGED
from .tiles import Tiles

#: the most columns of a row that a program stores
COLUMNS = 128
_COLUMNS = tl.constexpr(COLUMNS)
#: parts for each warp of a program: with few, one warp has all of them, 32 numbers a thread
PARTS_OF_WARP = 8


@triton.jit(do_not_specialize=["num"])
def merge_kernel(ptr, num, cfg):
    """Store some columns of out, and lse, of a row of a query head from the sums of all parts."""
    MERGED: tl.constexpr = cfg.BLOCK_K
    WIDTH: tl.constexpr = num.v.BLOCK_D if num.v.BLOCK_D < _COLUMNS else _COLUMNS
    number = tl.program_id(0).to(tl.int64)
    total = tl.num_programs(0).to(tl.int64)
    query = tl.program_id(0) % num.total_q
    head = tl.program_id(0) // num.total_q
    b, head = head // cfg.HQ, head % cfg.HQ
    place = (tl.cast(b, tl.int64) * num.total_q + query) * cfg.HQ + head
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]

    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for first in tl.range(0, num.parts, MERGED):
        part = first + tl.arange(0, MERGED)
        at = ptr.part_rows + part * total + number
        m_part = tl.load(at, mask=part < num.parts, other=float("-inf"))
        l_part = tl.load(at + num.parts * total, mask=part < num.parts, other=0.0)
        # a load does not wait for l: it also reads what a part that saw nothing has not stored
        at = ptr.part_out + (part * total + place)[:, None] * num.v.D + d
        o = tl.load(at, mask=(part < num.parts)[:, None] & (d < num.v.D), other=0.0)
        seen = l_part != 0.0
        o = tl.where(seen[:, None], o, 0.0)
        m_new, base = rules.moved(m, tl.max(tl.where(seen, m_part, float("-inf")), 0))
        weight = tl.where(seen, lib.power(m_part - base, cfg), 0.0)
        alpha = lib.power(m - base, cfg)
        l = l * alpha + tl.sum(weight * l_part, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, None] * o, 0)[None, :]
        m = m_new

    acc, lse = lib.finished(m, l, acc, ptr, num, cfg, head)
    out = lib.first_row(ptr.out, num.out, b, head, 0, False)
    at = out + tl.cast(query, tl.int64) * num.out.ROW + d
    tl.store(at, acc.to(ptr.out.dtype.element_ty), mask=d < num.out.D)
    tl.store(ptr.lse + number + tl.arange(0, 1), lse)


MERGE = JobSpec("merge", merge_kernel, "rows", ("out",), columns=COLUMNS)


def merge(
    problem: Problem,
    tensors: Tensors,
    part_out: Tensor,
    part_rows: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Store out and lse from the sums of parts."""
    count = part_rows.shape[0] // 2
    at_once = min(MERGED, triton.next_power_of_2(count))
    merged = Tiles(1, at_once, min(4, -(-at_once // PARTS_OF_WARP)), 1, parts=count)
    names = ("sink", "seed", "out", "lse", "part_out", "part_rows")
    values = (tensors.sink, tensors.seed, out, lse, part_out, part_rows)
    launch(MERGE, problem, tensors, merged, dict(zip(names, values, strict=True)))
