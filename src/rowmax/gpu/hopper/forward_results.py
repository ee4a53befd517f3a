"""The results of a forward: lse and the output of a finished tile, stored by its consumer.

A kernel whose reference lags stores NaN as lse of a row that overflowed (``forward_kernel.py``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import fence_async_shared, tma_store, tma_store_wait
from .lib import ring, rules
from .lib.assembly import LOG2
from .lib.layouts import output_layout
from .lib.softmax import FIRST, FIRST_WEIGHT, FULL, LEAST, LN2, LOWEST_NATURAL, by_lane


@gluon.jit
def place_of_lse(C: gl.constexpr, first, head, b, q_row, r, n):
    """Return (the place of lse of row r of 64, its position); ``first`` is that of row 0."""
    row = first + r // C.GROUP
    h = head * C.GROUP + r % C.GROUP
    if C.VARLEN:
        at = h.to(gl.int64) * n.total_q + q_row + row
    else:
        at = (b * n.hq + h).to(gl.int64) * n.total_q + row
    return at, row


@gluon.jit
def store_lse(C: gl.constexpr, c: gl.constexpr, m, l, tile, t, n):
    """Store lse = log sum exp of a finished tile, and return the factor ``[64]`` of O's rows.

    Of a part of the keys m and l are stored, and the factor is 1.
    """
    m = gl.max(m, 1)
    l = gl.sum(l, 1)
    if n.parts is not None:
        inverse = store_part(C, c, m, l, tile, t, n)
    else:
        inverse = store_whole(C, c, m, l, tile, t, n)
    return inverse


@gluon.jit
def store_part(C: gl.constexpr, c: gl.constexpr, m, l, tile, t, n):
    """Store m, and l a part of memory on, in the order of ``merge.py``; return a factor of 1."""
    r = gl.arange(0, 64, l.type.layout)
    first = tile.first + c * C.TOKENS
    at, row = place_of_lse(C, first, tile.head, tile.b, tile.q_row, r, n)
    gl.store(t.lse + at, m, mask=row < tile.nq)
    total = (n.parts * n.batch * n.hq).to(gl.int64) * n.total_q
    gl.store(t.lse + at + total, l, mask=row < tile.nq)
    return gl.full([64], 1.0, gl.float32, l.type.layout)


@gluon.jit
def store_whole(C: gl.constexpr, c: gl.constexpr, m, l, tile, t, n):
    """Store lse, and return the factor ``[64]`` of O's rows."""
    wrong = l >= FULL
    if C.ONTO_BIAS:  # the reference may be too far above the scores
        wrong = wrong | ((l < LEAST) & (tile.used > 0))
    overflow = gl.where(wrong | (l != l), float("nan"), 0.0)
    unit = gl.full([64], 1.0, gl.float32, l.type.layout)
    if C.ONTO_BIAS:  # log2 of a large sum by a reference that never moved would lose digits
        first_m = m == FIRST
        unit = gl.where(first_m, FIRST_WEIGHT, 1.0)
        m = gl.where(first_m, 0.0, m)
        l = l * unit
    r = gl.arange(0, 64, l.type.layout)
    if C.SINK:
        # in natural units: the sink may be the largest number of its dtype
        if not C.NATURAL:
            m = gl.where(l > 0.0, m * LN2, LOWEST_NATURAL)
        h = tile.head * C.GROUP + r % C.GROUP
        m, l, alpha = rules.with_sink(m, l, gl.load(t.sink + h).to(gl.float32))
        inverse = gl.where(l > 0.0, alpha / l, 0.0)
    else:
        inverse = gl.where(l > 0.0, 1.0 / l, 0.0)
    if C.SINK or C.NATURAL:
        value = m + log2(C, l) * LN2
    else:
        value = (m + log2(C, l)) * LN2
    value = gl.where(l > 0.0, value, float("-inf"))
    if C.LAGS:
        value += overflow
    first = tile.first + c * C.TOKENS
    at, row = place_of_lse(C, first, tile.head, tile.b, tile.q_row, r, n)
    gl.store(t.lse + at, value, mask=row < tile.nq)
    if C.LAGS:
        gl.store(t.overflow + 0 * r, 1, mask=(row < tile.nq) & (value != value))
    inverse = inverse * unit
    if C.DROPOUT:
        inverse = inverse * n.keep_scale
    return inverse


@gluon.jit
def log2(C: gl.constexpr, l):
    """Return log2 of sums of weights, within 2^-22: those are 0 or normal numbers.

    With wide values, and with three warpgroups, the library's: compilers would keep registers in
    local memory (42 words of three warpgroups at head size 64).
    """
    if C.DV > 256 or C.WARPGROUPS == 3:
        x = gl.log2(l)
    else:
        x = gl.inline_asm_elementwise(LOG2, "=f,f", [l], gl.float32, is_pure=True, pack=1)
    return x


@gluon.jit
def mark_overflow(C: gl.constexpr, c: gl.constexpr, o0, o1, inverse, tile, t, n):
    """Store NaN as lse of the rows of O that are not finite, by the threads that stored lse.

    ``inverse`` has the layout of those threads.
    """
    L: gl.constexpr = inverse.type.layout
    x = sums_of_zeros(o0, L)
    if C.DV1:
        x += sums_of_zeros(o1, L)
    r = gl.arange(0, 64, L)
    first = tile.first + c * C.TOKENS
    at, row = place_of_lse(C, first, tile.head, tile.b, tile.q_row, r, n)
    wrong = (row < tile.nq) & (x != x)
    gl.store(t.lse + at, x, mask=wrong)
    gl.store(t.overflow + 0 * r, 1, mask=wrong)


@gluon.jit
def sums_of_zeros(o, L: gl.constexpr):
    """Return the sums ``[64]`` of the rows of 0 O: 0, or NaN where O is not finite."""
    x = gl.sum(gl.sum(by_lane(o) * 0.0, 3), 1)
    return gl.convert_layout(gl.sum(x, 1), L)


@gluon.jit
def store_output(
    C: gl.constexpr, c: gl.constexpr, o0, o1, inverse, tile, copies, shared, t, n
):  # fmt: skip
    """Store out = O / l of a finished tile."""
    if C.LAGS:
        mark_overflow(C, c, o0, o1, inverse, tile, t, n)
    first = tile.first + c * C.TOKENS
    base, rest = output_place(C, first, tile, t, n)
    if C.STAGED and not C.VARLEN:
        corner = (tile.b, first, tile.head, 0)
        stage_output(C, c, o0, inverse, corner, copies.out, shared.out)
    elif C.STAGED:
        if first + C.TOKENS <= tile.nq:
            corner = (0, tile.q_row + first, tile.head, 0)
            stage_output(C, c, o0, inverse, corner, copies.out, shared.out)
        else:  # a TMA copy would overwrite rows of the next sequence
            store_rows(C, o0, inverse, base, 0, rest, n)
    else:
        store_rows(C, o0, inverse, base, 0, rest, n)
        if C.DV1:
            store_rows(C, o1, inverse, base, C.DV0, rest, n)


@gluon.jit
def output_place(C: gl.constexpr, first, tile, t, n):
    """Return (a pointer to out of row ``first`` of a tile, the rows from there on)."""
    row = tile.q_row + first
    if not C.VARLEN:
        row = row + tile.b * tile.nq
    base = t.out + (row.to(gl.int64) * n.hq + tile.head * C.GROUP) * C.OUT_ROW
    return base, tile.nq - first


@gluon.jit
def copy_out(x, corner, column: gl.constexpr, copy, stages, c: gl.constexpr):
    """Copy x, a tile in registers, once the copy before has read its buffer."""
    tma_store_wait(0)
    ring.tile_at(stages, c, 64, x.shape[1]).store(x)
    fence_async_shared()
    tma_store(copy, corner + (column,), stages.index(c))


@gluon.jit
def stage_output(C: gl.constexpr, c: gl.constexpr, o, inverse, corner, copy, stages):
    """Store O / l through shared memory; TMA copies it while the kernel continues."""
    W: gl.constexpr = C.STAGED
    dtype: gl.constexpr = stages.dtype
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout))
    x = (o * inverse[:, None]).to(dtype)
    if C.DV == W:
        copy_out(x, corner, 0, copy, stages, c)
    else:
        x0, x1 = x.reshape([64, 2, W]).permute((0, 2, 1)).split()
        copy_out(x0, corner, 0, copy, stages, c)
        copy_out(x1, corner, W, copy, stages, c)


@gluon.jit
def store_rows(C: gl.constexpr, o, inverse, base, column: gl.constexpr, tokens, n):
    """Store O / l by the threads, up to the end of the sequence."""
    WL: gl.constexpr = output_layout(o.shape[1]) if C.TURNED else o.type.layout
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout))
    x = gl.convert_layout((o * inverse[:, None]).to(base.dtype.element_ty), WL)
    r = gl.arange(0, 64, gl.SliceLayout(1, WL))
    d = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, WL))
    at = ((r // C.GROUP) * n.hq + r % C.GROUP)[:, None] * C.OUT_ROW + d[None, :]
    there = (r // C.GROUP < tokens)[:, None]
    if C.DV_OUT != C.DV:
        there = there & (d < C.DV_OUT)[None, :]
    gl.store(base + at, x, mask=there)
