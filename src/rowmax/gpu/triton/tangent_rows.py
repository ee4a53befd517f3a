# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""The numbers of rows that the backward of a tangent reads: b and c of ``rules/tangent.py``.

The kernel also stores lse in the units of the scores, and the parts of the gradients of the sink.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lib, preprocess, rules
from ..launch import JobSpec
from ..preprocess import row_dots, rows_of_program, store_lse2, weight_of_sink


@triton.jit(do_not_specialize=["num"])
def tangent_rows_kernel(ptr, num, cfg):
    """Store b, c and lse of a tile of rows, and the tile's part of the gradients of the sink."""
    place, i0, part = rows_of_program(num, cfg)
    row = i0 + tl.arange(0, cfg.BLOCK_Q)
    tdelta = row_dots(ptr.dtout, num.dtout, ptr.out, num.out, i0, cfg, place)
    delta = row_dots(ptr.dtout, num.dtout, ptr.tout, num.tout, i0, cfg, place)
    if ptr.dout is not None:
        delta += row_dots(ptr.dout, num.dout, ptr.out, num.out, i0, cfg, place)
    if ptr.dlse is not None:
        delta -= preprocess.row_numbers(ptr.dlse, row, 0.0, cfg, place)
    if ptr.dtlse is not None:
        tdelta -= preprocess.row_numbers(ptr.dtlse, row, 0.0, cfg, place)
    lse = preprocess.row_numbers(ptr.lse, row, float("-inf"), cfg, place)
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)
    tdelta = tl.where(empty, 0.0, tdelta)
    store_lse2(lse, row, ptr, num, cfg, place)
    tl.store(lib.row_vector(ptr.delta, num, cfg, place) + row, delta, mask=row < place.nq)
    tl.store(lib.row_vector(ptr.tdelta, num, cfg, place) + row, tdelta, mask=row < place.nq)
    if ptr.dsink is not None:
        p = weight_of_sink(lse, row, ptr, num, cfg, place)
        d = -preprocess.row_numbers(ptr.tlse, row, 0.0, cfg, place)
        if ptr.tsink is not None:
            d += tl.load(ptr.tsink + place.head).to(tl.float32)
        ds, dts = rules.score_gradients(p, 0.0, 0.0, d, tdelta, delta)
        tl.store(ptr.dsink + part, tl.sum(tl.where(row < place.nq, ds, 0.0), 0))
        tl.store(ptr.dtsink + part, tl.sum(tl.where(row < place.nq, dts, 0.0), 0))


TANGENT_ROWS = JobSpec(
    "tangent_rows", tangent_rows_kernel, "rows", ("out", "tout", "dout", "dtout")
)
