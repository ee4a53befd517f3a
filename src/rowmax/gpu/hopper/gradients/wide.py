"""Heads too wide for five products at once: a launch for dQ, and one for dK with dV (``pair.py``).

The sums of two gradients of 256 columns do not fit in registers beside the scores, and float32
sums of dQ in memory are more than memory takes in. So here every gradient is made from start to
end in registers: 64 rows a warpgroup stay, tiles of the other side pass by. That is seven products
where five would do, and no addition to memory: the result is the same in every run.

    KIND   stays    passes    scores, then      sum
    dq     Q, dO    K, V      S, dP, dS         dQ += dS K
    pair   K, V     Q, dO     S^T | dP^T, dS^T  dV += P^T dO | dK += dS^T Q

For dQ, which is here, the two warpgroups agree on nothing but the buffers of what passes: while one
is at its exponentials the other has the tensor core.

Barriers of a block (see ``pipeline.py``): a_full (producer's expect + bytes), a_empty (each
consumer, once a tile that has steps), b0_full[s], b1_full[s] (producer), b0_empty[s],
b1_empty[s] (each consumer, once a step), m_full[t], m_empty[t] as there, with two readers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import mbarrier, warpgroup_mma, warpgroup_mma_wait
from ..lib.layouts import product_layout as value_layout
from ..lib.layouts import weight_layout
from ..lib.positional import told
from ..lib.ring import phase, slot
from ..lib.softmax import rounded
from .consumer import block
from .layouts import in_columns, score_layout, store_rows
from .schedule import full_range, plane_of
from .terms import weights


@gluon.jit
def product(C: gl.constexpr, c: gl.constexpr, stays, passes, s, zero, WIDTH: gl.constexpr):
    """A warpgroup's rows of what stays times a tile of what passes by, on its way."""
    a = block(stays, zero, C.BLOCK_K, WIDTH).slice(c * C.TOKENS, C.TOKENS, dim=0)
    b = block(passes, s, C.BLOCK_Q, WIDTH).permute((1, 0))
    x = gl.full([C.TOKENS, C.BLOCK_Q], 0.0, gl.float32, score_layout(C))
    return warpgroup_mma(a, b, x, use_acc=False, is_async=True)


@gluon.jit
def bias_rows(C: gl.constexpr, c: gl.constexpr, tile, b_step, h_step, q_step):
    """Where the rows of a bias begin that belong to the 64 queries of a warpgroup; past the last
    query there is that one's."""
    first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    r = first + c * C.TOKENS + gl.arange(0, C.TOKENS, gl.SliceLayout(1, score_layout(C)))
    r = gl.minimum(r, nq - 1).to(gl.int64)
    return 8 * (b.to(gl.int64) * b_step + head.to(gl.int64) * h_step + r * q_step)


@gluon.jit
def bias_tile(C: gl.constexpr, t, bias, rows, tile):
    """(where the pairs of a tile are in a bias, which of its keys there are, of which there is a
    multiple of 8). It is read, and its gradient written, where it is: shared memory has no room
    for a tile."""
    first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    col = gl.arange(0, C.BLOCK_Q, gl.SliceLayout(0, score_layout(C)))
    end = (nq + offset) // 8 * 8 - t * C.BLOCK_Q
    return bias + (rows[:, None] + (t * C.BLOCK_Q + col)[None, :]), (col < end)[None, :]


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, t, head, use, end, x, of_rows,
    buffers, bars, tile, sizes, terms, scale,
):  # fmt: skip
    """x, the sum, with one tile of keys. ``of_rows`` are lse and delta of the queries, and where
    their bias and its gradient are."""
    a0, a1, b0, b1, stats = buffers
    a_full, a_empty, b0_full, b0_empty, b1_full, b1_empty = bars
    lse, delta, biases = of_rows
    dtype: gl.constexpr = a0.dtype
    s = slot(use, C.Q_STAGES)
    u = slot(use, C.DO_STAGES)
    # use >> 30 is a zero that the compiler cannot see
    S = product(C, c, a0, b0, s, use >> 30, C.D)
    mbarrier.wait(b1_full.index(u), phase(use, C.DO_STAGES))
    dp = product(C, c, a1, b1, u, use >> 30, C.DV)
    bias = 0
    if C.BIAS:
        at, there = bias_tile(C, t, biases[0], biases[1], tile)
        if MASKED:
            bias = gl.load(at, mask=there, other=0.0)
        else:
            bias = gl.load(at)
    S = warpgroup_mma_wait(1, deps=[S])
    less = lse[:, None]
    p, w = weights(C, MASKED, c, S, less, bias, t, head, tile, sizes, terms, scale, dtype)
    after = use + 1
    b0_next = b0_full.index(slot(after, C.Q_STAGES))
    # begins a basic block, so that the exponentials stay beside the product
    mbarrier.wait(b0_next, phase(after, C.Q_STAGES), pred=after < end)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(b1_empty.index(u), count=1)
    ds = rounded(w * (dp - delta[:, None]), dtype)
    if C.DBIAS:
        at, there = bias_tile(C, t, biases[2], biases[3], tile)
        r = gl.arange(0, C.TOKENS, gl.SliceLayout(1, score_layout(C)))
        ok = (r < tile[5] - tile[0] - c * C.TOKENS)[:, None]
        if MASKED:
            ok = ok & there
        gl.store(at, ds, mask=ok)
    ds = gl.convert_layout(ds, weight_layout(C.D))
    x = warpgroup_mma(ds, block(b0, s, C.BLOCK_Q, C.D), x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(b0_empty.index(s), count=1)
    return after, x


@gluon.jit
def rows_of_tile(C: gl.constexpr, c: gl.constexpr, rows, tile, planes):
    """lse and delta of the 64 queries of a warpgroup; +inf and 0 where there are none."""
    first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    hq, padded = planes
    plane, row = plane_of(C, b, head, q_row, hq)
    L: gl.constexpr = gl.SliceLayout(1, score_layout(C))
    r = first + c * C.TOKENS + gl.arange(0, C.TOKENS, L)
    at = rows + (plane.to(gl.int64) * 2 * padded + row) + in_columns(r)
    lse = gl.load(at, mask=r < nq, other=float("inf"))
    return lse, gl.load(at + padded, mask=r < nq, other=0.0)


@gluon.jit
def bias_of_tile(C: gl.constexpr, c: gl.constexpr, terms, tile, planes):
    """The bias and where its rows begin, and the same of its gradient, which has no gaps."""
    biases = (0, 0)
    if C.BIAS:
        nq, offset = tile[5], tile[7]
        bias, b_step, h_step, q_step, dbias = terms
        keys = (nq + offset) // 8
        own = bias_rows(C, c, tile, b_step, h_step, q_step)
        biases = (bias, own)
        if C.DBIAS:
            each = nq.to(gl.int64) * keys
            biases = (bias, own, dbias, bias_rows(C, c, tile, planes[0] * each, each, keys))
    return biases


@gluon.jit
def queries(
    C: gl.constexpr, c: gl.constexpr, out, rows, planes, bias, buffers, bars, mail, sizes, terms,
    rest,
):  # fmt: skip
    """Warpgroup c: queries ``64 c`` to ``64 c + 63`` of every tile of this block."""
    messages, m_full, m_empty = mail
    a_full, a_empty, b0_full, b0_empty, b1_full, b1_empty = bars
    scale, out_scale, group, heads = rest
    turn = 0
    use = 0
    kept = 0
    tile, live = told(C, 0, messages, m_full)
    mbarrier.arrive(m_empty.index(0), count=1)
    while live:
        first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        y, z = full_range(C, first + c * C.TOKENS, tile, sizes)
        some = lo < hi
        end = use + (hi - lo) * group
        mbarrier.wait(a_full.index(0), phase(kept, 1), pred=some)
        mbarrier.wait(b0_full.index(slot(use, C.Q_STAGES)), phase(use, C.Q_STAGES), pred=some)
        lse, delta = rows_of_tile(C, c, rows, tile, planes)
        of_rows = (lse, delta, bias_of_tile(C, c, bias, tile, planes))
        x = gl.full([C.TOKENS, C.D], 0.0, gl.float32, value_layout(C.D))
        for g in range(group):  # of one head; without the loop too much is kept in registers
            of = head * group + g
            if C.LOW_MASKED:
                for t in range(lo, y):
                    use, x = step(
                        C, True, c, t, of, use, end, x, of_rows, buffers, bars, tile, sizes, terms,
                        scale,
                    )  # fmt: skip
            for t in range(y, z):
                use, x = step(
                    C, False, c, t, of, use, end, x, of_rows, buffers, bars, tile, sizes, terms,
                    scale,
                )  # fmt: skip
            if C.HIGH_MASKED:
                for t in range(z, hi):
                    use, x = step(
                        C, True, c, t, of, use, end, x, of_rows, buffers, bars, tile, sizes, terms,
                        scale,
                    )  # fmt: skip
        mbarrier.arrive(a_empty.index(0), count=1, pred=some)
        kept += some.to(gl.int32)
        turn += 1
        after, live = told(C, turn, messages, m_full)
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)
        row = q_row
        if not C.VARLEN:
            row = row + b * nq
        row = row + first + c * C.TOKENS
        to = out + (row.to(gl.int64) * heads + head) * C.D_OUT
        store_rows(x * out_scale, to, heads * C.D_OUT, nq - first - c * C.TOKENS, C.D_OUT)
        tile = after
