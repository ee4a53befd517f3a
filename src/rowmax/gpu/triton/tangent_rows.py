# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The numbers of rows that the backward of a tangent reads: b and c of ``rules/tangent.py``.

The kernel also stores lse in the units of the scores, and the parts of the gradients of the sink.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .. import lib, rules
from ..launch import Job, JobSpec, launch
from ..preprocess import padded_rows
from ..rules import LOG2E
from ..tiles import Tiles


@triton.jit
def row_dots(x, x_matrix, y, y_matrix, i0, end, cfg, place):
    """Return the products of the rows of x with those of y, ``[BLOCK_Q]``."""
    x = lib.load_tile(lib.queries(x, x_matrix, cfg, place), x_matrix, i0, end, cfg.BLOCK_Q, True)
    y = lib.load_tile(lib.queries(y, y_matrix, cfg, place), y_matrix, i0, end, cfg.BLOCK_Q, True)
    return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@triton.jit(do_not_specialize=["num"])
def tangent_rows_kernel(ptr, num, cfg):
    """Store b, c and lse of a tile of rows, and the tile's part of the gradients of the sink.

    Packed rows are one sequence here, as in ``preprocess.delta_kernel``.
    """
    BLOCK_Q: tl.constexpr = cfg.BLOCK_Q
    end = num.total_q
    tile, head = lib.tile_and_head(num)
    part = head * num.tiles + tile
    b = head // cfg.HQ
    head = head % cfg.HQ
    place = lib.Place(b, head, head, 0, end, 0, 0, 0, 0, 0)
    i0 = tile * BLOCK_Q
    row = i0 + tl.arange(0, BLOCK_Q)
    tdelta = row_dots(ptr.dtout, num.dtout, ptr.out, num.out, i0, end, cfg, place)
    delta = row_dots(ptr.dtout, num.dtout, ptr.tout, num.tout, i0, end, cfg, place)
    if ptr.dout is not None:
        delta += row_dots(ptr.dout, num.dout, ptr.out, num.out, i0, end, cfg, place)
    if ptr.dlse is not None:
        dlse = lib.vector(ptr.dlse, b, head, 0, end, cfg.HQ, False)
        delta -= lib.load_rows(dlse, row, end, 0.0, True)
    if ptr.dtlse is not None:
        dtlse = lib.vector(ptr.dtlse, b, head, 0, end, cfg.HQ, False)
        tdelta -= lib.load_rows(dtlse, row, end, 0.0, True)
    lse = lib.vector(ptr.lse, b, head, 0, end, cfg.HQ, False)
    lse = lib.load_rows(lse, row, end, float("-inf"), True)
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)
    tdelta = tl.where(empty, 0.0, tdelta)
    lse2 = lse
    if not cfg.NATURAL:
        lse2 = lse * LOG2E
    lse2 = rules.without_weights(lse2)
    tl.store(lib.row_vector(ptr.lse2, num, cfg, place) + row, lse2, mask=row < end)
    tl.store(lib.row_vector(ptr.delta, num, cfg, place) + row, delta, mask=row < end)
    tl.store(lib.row_vector(ptr.tdelta, num, cfg, place) + row, tdelta, mask=row < end)
    if ptr.dsink is not None:
        sink = tl.load(ptr.sink + head).to(tl.float32)
        rest = lib.load_rest(ptr, num, cfg, place, row, True)
        p = rules.natural_weight(sink, rules.without_weights(lse), rest)
        tlse = lib.vector(ptr.tlse, b, head, 0, end, cfg.HQ, False)
        d = -lib.load_rows(tlse, row, end, 0.0, True)
        if ptr.tsink is not None:
            d += tl.load(ptr.tsink + head).to(tl.float32)
        ds, dts = rules.score_gradients(p, 0.0, 0.0, d, tdelta, delta)
        tl.store(ptr.dsink + part, tl.sum(tl.where(row < end, ds, 0.0), 0))
        tl.store(ptr.dtsink + part, tl.sum(tl.where(row < end, dts, 0.0), 0))


TANGENT_ROWS = JobSpec(
    "tangent_rows", tangent_rows_kernel, "rows", ("out", "tout", "dout", "dtout")
)


def row_numbers(
    problem: Problem,
    tensors: Tensors,
    tsink: Tensor | None,
    read: dict[str, Any],
    want_sink: bool,
    tiles: Tiles | None,
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Return (lse2, delta and tdelta by name, the gradients of the sink and of its tangent).

    ``read`` holds the results of the tangent, their cotangents and ``rest``, by name.
    """
    lse = read["lse"]
    made = {x: lse.new_empty(padded_rows(problem)) for x in ("lse2", "delta", "tdelta")}

    def sink(job: Job) -> dict[str, Tensor | None]:
        dsink, dtsink = (lse.new_empty((*lse.shape[:2], job.numbers.tiles)) for _ in range(2))
        return {"sink": tensors.sink, "tsink": tsink, "dsink": dsink, "dtsink": dtsink}

    more = sink if want_sink else None
    ptr = launch(TANGENT_ROWS, problem, tensors, tiles, read | made, more)
    if not want_sink:
        return made, None, None
    return made, ptr.dsink.sum((0, 2)), ptr.dtsink.sum((0, 2))
