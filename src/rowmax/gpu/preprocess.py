# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The numbers of rows that a backward computes before its gradients: the rest of LSE, Delta.

The rest is ``log2(sum_j exp(s_ij - LSE_i))``, the rounding error of LSE. A backward recomputes the
weights from LSE. In a row whose biases are all -1e9 it lacks log n, and the weights would sum to
n. A kernel sums the weights of such rows (``FAR``) again; for others the rest is 0.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..call.problem import FAR, Problem, Tensors
from . import lib, rules
from .kernel_args import ROW_UNIT
from .launch import Job, JobSpec, launch
from .rules import LOG2E
from .tiles import Tiles

#: tiles whose rows a program tests at once: it costs as much as to test those of one
TOGETHER = 8

_FAR = tl.constexpr(FAR)
_TOGETHER = tl.constexpr(TOGETHER)
_ROW_UNIT = tl.constexpr(ROW_UNIT)


def padded_rows(problem: Problem) -> tuple[int, int, int]:
    """Return the shape of lse2, delta and rest: ``[B, Hq, Nq]``, rows padded to ``ROW_UNIT``."""
    b, h, n = problem.lse_shape
    return b, h, -(-n // ROW_UNIT) * ROW_UNIT


# --- the rest of LSE ---------------------------------------------------------------------------


@triton.jit
def is_far(lse):
    """Return True for rows whose LSE lacks a part of their sum."""
    return (tl.abs(lse) >= _FAR) & (tl.abs(lse) < float("inf"))


@triton.jit(do_not_specialize=["num"])
def row_sums_kernel(ptr, num, cfg):
    """Store the rest of LSE of TOGETHER tiles of queries; of dense rows all are tested at once."""
    heads = cfg.HQ if cfg.PACKED else num.batch * cfg.HQ
    first = tl.program_id(0) * _TOGETHER
    end = tl.minimum(first + _TOGETHER, num.tiles * heads)
    some = True
    if not cfg.PACKED:
        n = tl.arange(0, _TOGETHER * cfg.BLOCK_Q)
        tile = first + n // cfg.BLOCK_Q
        row = tile % num.tiles * cfg.BLOCK_Q + n % cfg.BLOCK_Q
        head = (tile // num.tiles).to(tl.int64)
        here = (tile < end) & (row < num.total_q)
        lse = tl.load(ptr.lse + head * num.total_q + row, mask=here, other=0.0)
        some = tl.max(is_far(lse).to(tl.int32), 0) > 0
        if not some:
            rest = ptr.rest + head * (num.rows * _ROW_UNIT) + row
            tl.store(rest, tl.zeros([_TOGETHER * cfg.BLOCK_Q], tl.float32), mask=here)
    if some:
        for i in range(first, end):
            store_rest(ptr, num, cfg, i % num.tiles, i // num.tiles)


@triton.jit
def store_rest(ptr, num, cfg, tile, head):
    """Store the rest of LSE of a tile of queries of a head: of dense rows that of its number."""
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    BLOCK_K: tl.constexpr = cfg.BLOCK_K
    b = head // cfg.HQ
    if cfg.PACKED:
        b, tile = lib.sequence_of_slot(ptr.cu_q, tile, num.batch, num.total_q, BLOCK_Q)
    sizes = lib.sizes_of(ptr, num, cfg, b, False)
    i0 = tile * BLOCK_Q
    place = lib.place_of(ptr, num, cfg, b, head % cfg.HQ, sizes)
    rows = i0 + tl.arange(0, BLOCK_Q)
    lse = lib.vector(ptr.lse, place.b, place.head, place.q_start, num.total_q, cfg.HQ, cfg.PACKED)
    lse = lib.load_rows(lse, rows, place.nq, 0.0, True)
    far = is_far(lse)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if tl.max(far.to(tl.int32), 0) > 0:
        q = lib.load_queries(ptr.q, num.q, i0, cfg, place, True)
        k_base = lib.keys(ptr.k, num.k, cfg, place)
        row = tl.minimum(rows, place.nq - 1)[:, None]
        j = tl.arange(0, BLOCK_K)[None, :]
        plan = lib.plan_keys(ptr, num, cfg, place, tile)
        for i in tl.range(0, plan.count):
            tile, partial = lib.nth_tile(i, ptr, plan, "any")
            j0 = tile * BLOCK_K
            k = lib.load_tile(k_base, num.k, j0, place.used, BLOCK_K, cfg.RAGGED_K)
            x = tl.dot(q, tl.trans(k), input_precision=cfg.PRECISION)
            s, _ = lib.scored(x, ptr, num, cfg, place, row, j0 + j)
            p = rules.natural_weight(s, lse[:, None], 0.0)
            # without lists any tile may hold pairs that documents or booleans forbid
            if ptr.q_ids is not None or ptr.allowed is not None:
                p = lib.only_seen(p, ptr, num, cfg, place, row, j0 + j, partial, "partial")
            else:
                p = lib.only_seen(p, ptr, num, cfg, place, row, j0 + j, partial, "any")
            total += tl.sum(p, 1)
        if ptr.sink is not None:
            total += rules.natural_weight(tl.load(ptr.sink + place.head).to(tl.float32), lse, 0.0)
    rest = tl.where(far & (total > 0.0), tl.log2(total), 0.0)
    tl.store(lib.row_vector(ptr.rest, num, cfg, place) + rows, rest, mask=rows < place.nq)


#: its lists would be made at every call, and few calls have rows that it sums
ROW_SUMS = JobSpec("row_sums", row_sums_kernel, "queries", lists=False, together=TOGETHER)


def row_sums(
    problem: Problem, tensors: Tensors, lse: Tensor, tiles: Tiles | None = None
) -> Tensor | None:
    """Return the rest of lse, ``padded_rows``; None if scores are not natural."""
    if not problem.natural:
        return None
    rest = lse.new_empty(padded_rows(problem))
    if not (problem.nk and problem.batch):
        return rest.zero_()
    launch(ROW_SUMS, problem, tensors, tiles, {"lse": lse.contiguous(), "rest": rest})
    return rest


# --- Delta and dsink ---------------------------------------------------------------------------


@triton.jit
def rows_of_program(num, cfg):
    """Return (place, first row) of this program, and its number; packed rows are one sequence."""
    end = num.total_q
    tile, head = lib.tile_and_head(num)
    part = head * num.tiles + tile
    b = head // cfg.HQ
    head = head % cfg.HQ
    return lib.Place(b, head, head, 0, end, 0, 0, 0, 0, 0), tile * cfg.BLOCK_Q, part


@triton.jit
def row_dots(x, x_matrix, y, y_matrix, i0, cfg, place):
    """Return the products of the rows of x with those of y, ``[BLOCK_Q]``."""
    x = lib.load_queries(x, x_matrix, i0, cfg, place, True)
    y = lib.load_queries(y, y_matrix, i0, cfg, place, True)
    return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@triton.jit
def row_numbers(x, row, other, cfg, place):
    """Return the numbers of rows in a vector ``[B, Hq, Nq]``; ``other`` past the end."""
    x = lib.vector(x, place.b, place.head, 0, place.nq, cfg.HQ, False)
    return lib.load_rows(x, row, place.nq, other, True)


@triton.jit
def store_lse2(lse, row, ptr, num, cfg, place):
    """Store LSE in the units of the scores, +inf for a row that sees nothing."""
    lse2 = lse
    if not cfg.NATURAL:
        lse2 = lse * LOG2E
    lse2 = rules.without_weights(lse2)
    tl.store(lib.row_vector(ptr.lse2, num, cfg, place) + row, lse2, mask=row < place.nq)


@triton.jit
def weight_of_sink(lse, row, ptr, num, cfg, place):
    """Return the weights of the sink in these rows."""
    sink = tl.load(ptr.sink + place.head).to(tl.float32)
    rest = lib.load_rest(ptr, num, cfg, place, row, True)
    return rules.natural_weight(sink, rules.without_weights(lse), rest)


@triton.jit(do_not_specialize=["num"])
def delta_kernel(ptr, num, cfg):
    """Store ``Delta_i - dLSE_i`` and LSE of a tile of rows, and the tile's part of dsink.

    LSE is stored in the units of the scores. It is +inf, for weights of 0, in a row that sees
    nothing: that of -inf, or of a sink that is too low for units of log 2.
    """
    place, i0, part = rows_of_program(num, cfg)
    row = i0 + tl.arange(0, cfg.BLOCK_Q)
    delta = row_dots(ptr.out, num.out, ptr.dout, num.dout, i0, cfg, place)
    if ptr.dlse is not None:
        delta -= row_numbers(ptr.dlse, row, 0.0, cfg, place)
    lse = row_numbers(ptr.lse, row, float("inf"), cfg, place)
    store_lse2(lse, row, ptr, num, cfg, place)
    tl.store(lib.row_vector(ptr.delta, num, cfg, place) + row, delta, mask=row < place.nq)
    if ptr.dsink is not None:
        p = weight_of_sink(lse, row, ptr, num, cfg, place)
        tl.store(ptr.dsink + part, -tl.sum(tl.where(row < place.nq, p * delta, 0.0), 0))


DELTA = JobSpec("delta", delta_kernel, "rows", ("out", "dout"))


def row_vectors(
    spec: JobSpec,
    problem: Problem,
    tensors: Tensors,
    read: dict[str, Any],
    names: tuple[str, ...],
    sinks: dict[str, Tensor | None],
    tiles: Tiles | None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return (the named vectors of padded rows, the gradients of ``sinks``) that a job computes.

    ``read`` has the tensors that it reads, by name. A tile stores its part of a gradient.
    """
    lse = read["lse"]
    made = {name: lse.new_empty(padded_rows(problem)) for name in names}

    def parts(job: Job) -> dict[str, Tensor]:
        shape = (*lse.shape[:2], job.numbers.tiles)
        return {f"d{name}": lse.new_empty(shape) for name in sinks}

    more = parts if sinks else None
    ptr = launch(spec, problem, tensors, tiles, {**read, **made, **sinks}, more)
    return made, [getattr(ptr, f"d{name}").sum((0, 2)) for name in sinks]
