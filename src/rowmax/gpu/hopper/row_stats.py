"""The passes over rows before and after the backward: lse and delta, and dq from its sums.

Both split rows into tiles of ROW_TILE with the same padding (``backward_order.plane_of``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_args import ROW_UNIT
from ..lib import sequence, sequence_of_slot
from ..rules import LOG2E, natural_weight, without_weights
from .backward_tiles import FIRST
from .packed import clear_rest

_ROW_UNIT = tl.constexpr(ROW_UNIT)
_FIRST = tl.constexpr(FIRST)


@triton.jit
def place(t, n, c):
    """Return the numbers of this program's tile of rows.

    They are (program, tile, plane, sequence, head, first row and length of the sequence, first row
    of the tile).

    The last tile comes first. L2 then holds the first tiles when the next kernel begins with them,
    and that kernel's last tiles when the next pass begins.
    """
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = i % n.tiles
    plane = i // n.tiles
    i0 = tile
    if t.cu_q is not None:
        b, i0 = sequence_of_slot(t.cu_q, tile, n.batch, n.total_q, c.ROWS)
        start, size = sequence(t.cu_q, b, n.batch, n.total_q, n.total_q)
        head = plane
    else:
        b = plane // n.hq
        head = plane % n.hq
        start = 0
        size = n.total_q
    return i, tile, plane, b, head, start, size, i0 * c.ROWS


@triton.jit
def memory_order(x, ROWS: tl.constexpr):
    """Return ROWS numbers in the order that ``backward_lib.from_memory_order`` reads."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS // 16, 2, 4, 2]), (0, 2, 1, 3)), [ROWS])


@triton.jit
def clear_part(to, ROWS: tl.constexpr, W: tl.constexpr):
    """Store zeros in ROWS times W numbers of the sums."""
    r = tl.arange(0, ROWS)
    w = tl.arange(0, W)
    tl.store(to + (r * W)[:, None] + w[None, :], tl.zeros([ROWS, W], tl.float32))


@triton.jit
def clear(t, n, c, i):
    """Store zeros in sums and counters, and in gradients past the last packed sequence."""
    if t.sums is not None and i // n.tiles < n.zeroed:
        to = t.sums + i.to(tl.int64) * (c.ROWS * (c.D0 + c.D1))
        clear_part(to, c.ROWS, c.D0)
        if c.D1:
            clear_part(to + c.ROWS * c.D0, c.ROWS, c.D1)
    if t.done is not None:
        for word in range(i, n.done, tl.num_programs(0)):
            begun = 0
            if c.COMPLETE:
                begun = tl.where(word < n.zeroed // (n.hq // n.hk), _FIRST, 0)
            tl.store(t.done + word, begun)
    if t.counters is not None and i == 0:
        tl.store(t.counters + tl.arange(0, 16), tl.zeros([16], tl.int32))
    if t.cu_q is not None:
        rest_q = tl.maximum(tl.load(t.cu_q + n.batch), 0)
        rest_k = tl.maximum(tl.load(t.cu_k + n.batch), 0)
        if t.dq is not None:
            clear_rest(t.dq, rest_q, n.total_q, n.hq * c.D)
        heads = n.hk // n.shares
        row = tl.zeros([], tl.int64)
        for _ in range(n.shares):
            if t.dk is not None:
                clear_rest(t.dk + row * (heads * c.D), rest_k, n.total_k, heads * c.D)
            if t.dv is not None:
                clear_rest(t.dv + row * (heads * c.DV), rest_k, n.total_k, heads * c.DV)
            row += n.total_k


@triton.jit
def prepare(t, n, c):
    """Store lse in the units of the scores, ``Delta - dLSE`` and the tile's part of dsink.

    Also clear the sums that kernels add to.

    Rows that see nothing, rows that pad a tile, and rows whose sink is too low for base 2 have an
    lse of +inf: weights of 0.

    In natural units lse has a rest (``gpu/preprocess.py``): weights from lse without it sum to
    ``2^rest``. All gradients are linear in dO and Delta, so both are divided by it, dO in a copy.
    """
    gdc_launch_dependents()
    i, tile, plane, b, head, start, size, i0 = place(t, n, c)
    size = tl.where(b < n.batch, size, 0)
    r = tl.arange(0, c.ROWS)
    here = i0 + r < size
    d = tl.arange(0, c.BLOCK_DV)
    there = here[:, None] & (d < c.DV)[None, :]
    row = (start + i0 + r).to(tl.int64)
    if t.cu_q is None:
        row += b.to(tl.int64) * n.total_q
    at = (row * n.hq + head) * c.DV
    o = tl.load(t.out + at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    of_do = (start + i0 + r).to(tl.int64) * n.stride_n + head.to(tl.int64) * n.stride_h
    if t.cu_q is None:
        of_do += b.to(tl.int64) * n.stride_b
    do = tl.load(t.dout + (8 * of_do)[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    of_output = tl.sum(o * do, 1)  # sum P dP
    delta = of_output
    at = plane.to(tl.int64) * n.total_q + start + i0 + r
    value = tl.load(t.lse + at, mask=here, other=float("-inf"))
    if t.dlse is not None:
        delta -= tl.load(t.dlse + at, mask=here, other=0.0)
    less = value
    if not c.NATURAL:
        less = value * LOG2E
    less = without_weights(less)
    lse = without_weights(value)
    rest = 0.0
    share = 1.0
    if t.rest is not None:
        width = (n.total_q + _ROW_UNIT - 1) // _ROW_UNIT * _ROW_UNIT
        at = plane.to(tl.int64) * width + start + i0 + r
        rest = tl.load(t.rest + at, mask=here, other=0.0)
        share = tl.exp2(-rest)
        scaled = (do * share[:, None]).to(t.scaled.dtype.element_ty)
        tl.store(t.scaled + (8 * of_do)[:, None] + d[None, :], scaled, mask=there)
    rows = n.tiles * c.ROWS
    to = t.stats + plane.to(tl.int64) * (2 * rows) + tile * c.ROWS + r
    tl.store(to, memory_order(less, c.ROWS))
    tl.store(to + rows, memory_order(delta * share, c.ROWS))
    total = tl.where(lse < float("inf"), 1.0, 0.0)  # the sum of the weights of a row
    if t.sink is not None:
        p = natural_weight(tl.load(t.sink + head).to(tl.float32), lse, rest)
        total -= p
        if t.dsink is not None:
            tl.store(t.dsink + i, -tl.sum(tl.where(here, p * delta, 0.0), 0))
    if t.dcolumn is not None:
        at = (b.to(tl.int64) * n.hq + head) * n.nq + i0 + r
        tl.store(t.dcolumn + at, of_output - delta * total, mask=here)
    clear(t, n, c, i)


@triton.jit
def finish(t, n, c):
    """Store ``dq = scale sums`` of a tile of rows, in the dtype of q; 0 past the last sequence."""
    gdc_wait()
    i, tile, plane, b, head, start, size, i0 = place(t, n, c)
    at = i.to(tl.int64) * (c.ROWS * (c.D0 + c.D1))
    row = (start + i0 + tl.arange(0, c.ROWS)).to(tl.int64)
    if t.cu_q is None:
        row += b.to(tl.int64) * n.total_q
    to = (row * n.hq + head) * c.D
    finish_part(t, n, c, at, to, size - i0, c.D0, 0)
    if c.D > c.D0:
        finish_part(t, n, c, at + c.ROWS * c.D0, to, size - i0, c.D1, c.D0)


@triton.jit
def finish_part(t, n, c, at, to, rows, W: tl.constexpr, column: tl.constexpr):
    """Store W columns of dq from ``column`` on, from the sums from ``at`` on."""
    r = tl.arange(0, c.ROWS)
    d = column + tl.arange(0, W)
    there = (r < rows)[:, None] & (d < c.D)[None, :]
    x = tl.load(t.sums + at + tl.arange(0, c.ROWS * W))
    x = (x * n.scale).to(t.dq.dtype.element_ty)
    # from the order of backward_steps.thread_order
    x = tl.permute(tl.reshape(x, [4, W // 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5))
    x = tl.reshape(x, [c.ROWS, W])
    tl.store(t.dq + to[:, None] + d[None, :], x, mask=there)
