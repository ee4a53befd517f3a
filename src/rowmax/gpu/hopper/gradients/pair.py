"""dK and dV of wide heads in one launch: each of the two warpgroups makes one of them.

64 keys stay, tiles of 64 queries pass by. The sum of one gradient of 64 keys, 256 columns wide, is
all that a warpgroup has registers for, and the weights that both need are made by one of them.

    warpgroup   scores           then                      sum
    values      S^T = K Q^T      P; w to the other         dV += P^T dO
    keys        dP^T = V dO^T    dS^T = w (dP - delta)     dK += dS^T Q

w (``terms.weights``; P, but for a softcap) goes through shared memory as float32: it is no operand
of a product, and to round it would double the error of dS, which is rounded anyway. Both hold it
alike, so in memory it lies by threads: stores and loads of 16 bytes that meet no bank twice.

There are as many buffers of w as of dO, two: ``keys`` may be a step behind, and what one does
between its products runs beside those of the other.

Scores of 64 by 64 ask as much of shared memory as they take of the tensor core's time, and w and
the copies come on top. So half of K and half of V are in registers as well, and where memory is
short nowhere else (ALONE): they come by a buffer of Q, which leaves room for a third of those. Q
is in use from S in one warpgroup to dK in the other, for longer than a step.

Barriers of a block: as of ``wide.py``, and

    w_full[s]     values, w of the use is there         keys, before dS of the use

Nobody need tell that w has been read: ``keys`` lets go of dO when dS of the use is made, and
``values`` puts w into the same buffer of its ring when it has waited for the next dO there.

A tile of a bias comes with dO (b1_full) into the first half of the buffer of w of the same use, in
which ``values`` puts w when it has read it.

Where K and V come by a buffer of Q its ring has one use more for each tile that has steps, ahead of
those: K and V are there at b0_full, and b0_empty tells that they are in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..lib.layouts import matrix, weight_layout
from ..lib.layouts import product_layout as value_layout
from ..lib.positional import told
from ..lib.ring import barriers, phase, slot
from ..lib.scores import settled
from ..lib.softmax import rounded
from .consumer import block, in_lanes, row_numbers, store_row
from .layouts import by_thread, held_layout, score_layout, store_rows
from .schedule import full_range
from .terms import weights


@gluon.jit
def handing_over(C: gl.constexpr):
    """Buffers for w, and barriers that say that it is there."""
    over = (0, 0)
    if C.KIND == "pair":
        shape: gl.constexpr = [C.DO_STAGES, C.BLOCK_K, C.BLOCK_Q]
        over = (
            gl.allocate_shared_memory(gl.float32, shape, by_thread(C)),
            barriers(C.DO_STAGES, 1),
        )
    return over


@gluon.jit
def product(C: gl.constexpr, HELD: gl.constexpr, held, stays, passes, s, zero, WIDTH: gl.constexpr):
    """A tile of what stays, of which HELD columns are held, times one of what passes by, on its
    way: as many columns at a time as are held."""
    FROM: gl.constexpr = HELD if C.ALONE else 0  # the first column in shared memory
    a = block(stays, zero, C.BLOCK_K, WIDTH - FROM)
    b = block(passes, s, C.BLOCK_Q, WIDTH)
    x = gl.full([C.BLOCK_K, C.BLOCK_Q], 0.0, gl.float32, score_layout(C))
    for i in gl.static_range(WIDTH // HELD):
        part = b.slice(i * HELD, HELD, dim=1).permute((1, 0))
        if i == 0:
            x = warpgroup_mma(held, part, x, use_acc=False, is_async=True)
        else:
            left = a.slice(i * HELD - FROM, HELD, dim=1)
            x = warpgroup_mma(left, part, x, use_acc=True, is_async=True)
    return x


@gluon.jit
def held_columns(C: gl.constexpr, c: gl.constexpr, use, some, buffers, bars):
    """The first columns of K (0) or V (1), as a left operand in registers. Where these are nowhere
    else they come by a buffer of Q: those of K to the left, those of V beside them."""
    a0, a1, b0, b1, stats = buffers
    a_full, a_empty, b0_full, b0_empty, b1_full, b1_empty = bars
    HELD: gl.constexpr = C.HELD_1 if c else C.HELD_0
    if C.ALONE:
        s = slot(use, C.Q_STAGES)
        mbarrier.wait(b0_full.index(s), phase(use, C.Q_STAGES), pred=some)
        both = block(b0, s, C.BLOCK_Q, C.D)
        x = settled(both.slice(c * C.HELD_0, HELD, dim=1).load(held_layout(C)))
        mbarrier.arrive(b0_empty.index(s), count=1, pred=some)
    elif c:
        x = block(a1, 0, C.BLOCK_K, C.DV).slice(0, HELD, dim=1).load(held_layout(C))
    else:
        x = block(a0, 0, C.BLOCK_K, C.D).slice(0, HELD, dim=1).load(held_layout(C))
    return x


@gluon.jit
def step_of_values(
    C: gl.constexpr, MASKED: gl.constexpr, m, head, use, left, x, buffers, bars, over, tile,
    sizes, terms, scale,
):  # fmt: skip
    """x, the sum of dV, with one tile of queries."""
    a0, a1, b0, b1, stats = buffers
    a_full, a_empty, b0_full, b0_empty, b1_full, b1_empty = bars
    ws, w_full = over
    held, shift = left
    dtype: gl.constexpr = a0.dtype
    s = slot(use + shift, C.Q_STAGES)
    u = slot(use, C.DO_STAGES)
    mbarrier.wait(b0_full.index(s), phase(use + shift, C.Q_STAGES))
    # use >> 30 is a zero that the compiler cannot see
    S = product(C, C.HELD_0, held, a0, b0, s, use >> 30, C.D)
    lse = row_numbers(C, stats, s, 0)[None, :]
    S = warpgroup_mma_wait(0, deps=[S])
    bias = 0
    if C.BIAS:  # its tile came with dO, to the first half of where w will be put
        mbarrier.wait(b1_full.index(u), phase(use, C.DO_STAGES))
        layout: gl.constexpr = matrix(C.BLOCK_Q, C.BLOCK_K, dtype)
        halves = reinterpret(ws.index(u), dtype, [2, C.BLOCK_Q, C.BLOCK_K], layout)
        bias = halves.index(0).permute((1, 0)).load(score_layout(C))
    p, w = weights(C, MASKED, 0, S, lse, bias, m, head, tile, sizes, terms, scale, dtype)
    P = gl.convert_layout(rounded(p, dtype), weight_layout(C.DV))
    if not C.BIAS:
        mbarrier.wait(b1_full.index(u), phase(use, C.DO_STAGES))
    x = warpgroup_mma(P, block(b1, u, C.BLOCK_Q, C.DV), x, is_async=True)
    ws.index(u).store(w)
    mbarrier.arrive(w_full.index(u), count=1)
    mbarrier.arrive(b0_empty.index(s), count=1)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(b1_empty.index(u), count=1)
    return use + 1, x


@gluon.jit
def step_of_keys(C: gl.constexpr, use, left, x, drow, buffers, bars, over):
    """x, the sum of dK, with one tile of queries; and the sums of rows of dS."""
    a0, a1, b0, b1, stats = buffers
    a_full, a_empty, b0_full, b0_empty, b1_full, b1_empty = bars
    ws, w_full = over
    held, shift = left
    dtype: gl.constexpr = a0.dtype
    s = slot(use + shift, C.Q_STAGES)
    u = slot(use, C.DO_STAGES)
    mbarrier.wait(b1_full.index(u), phase(use, C.DO_STAGES))
    dp = product(C, C.HELD_1, held, a1, b1, u, use >> 30, C.DV)
    mbarrier.wait(b0_full.index(s), phase(use + shift, C.Q_STAGES))
    mbarrier.wait(w_full.index(u), phase(use, C.DO_STAGES))
    w = ws.index(u).load(score_layout(C))
    if C.BIAS:  # which comes to where w lay
        fence_async_shared()
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = row_numbers(C, stats, s, 1)[None, :]
    ds = w * (dp - delta)
    if C.DROW:
        drow = drow + in_lanes(ds)
    ds = gl.convert_layout(rounded(ds, dtype), weight_layout(C.D))
    x = warpgroup_mma(ds, block(b0, s, C.BLOCK_Q, C.D), x, is_async=True)
    mbarrier.arrive(b1_empty.index(u), count=1)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(b0_empty.index(s), count=1)
    return use + 1, x, drow


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, out, buffers, bars, over, mail, sizes, terms, rest):
    """Warpgroup c: the gradient of values (0) or keys (1) of every tile of this block."""
    messages, m_full, m_empty = mail
    a_full, a_empty = bars[:2]
    scale, out_scale, group, heads, sums = rest
    WIDTH: gl.constexpr = C.D if c else C.DV
    OUT: gl.constexpr = C.D_OUT if c else C.DV_OUT
    turn = 0
    use = 0
    kept = 0
    tile, live = told(C, 0, messages, m_full)
    mbarrier.arrive(m_empty.index(0), count=1)
    while live:
        first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
        some = lo < hi
        mbarrier.wait(a_full.index(0), phase(kept, 1), pred=some)
        shift = 0  # from a step's use to that of the ring of Q
        if C.ALONE:
            shift = kept + 1
        left = (held_columns(C, c, use + kept, some, buffers, bars), shift)
        x = gl.full([C.BLOCK_K, WIDTH], 0.0, gl.float32, value_layout(WIDTH))
        if c:
            drow = 0
            if C.DROW:
                drow = in_lanes(gl.full([C.BLOCK_K, C.BLOCK_Q], 0.0, gl.float32, score_layout(C)))
            for _ in range((hi - lo) * group):
                use, x, drow = step_of_keys(C, use, left, x, drow, buffers, bars, over)
            x = x * out_scale
            if C.DROW:
                place = (b * heads + head).to(gl.int64) * sizes[1] + first
                store_row(drow, sums + place, nq + offset - first)
        else:
            y, z = full_range(C, first, tile, sizes)
            for g in range(group):
                q_head = head * group + g
                if C.LOW_MASKED:
                    for m in range(lo, y):
                        use, x = step_of_values(
                            C, True, m, q_head, use, left, x, buffers, bars, over, tile, sizes,
                            terms, scale,
                        )  # fmt: skip
                for m in range(y, z):
                    use, x = step_of_values(
                        C, False, m, q_head, use, left, x, buffers, bars, over, tile, sizes, terms,
                        scale,
                    )  # fmt: skip
                if C.HIGH_MASKED:
                    for m in range(z, hi):
                        use, x = step_of_values(
                            C, True, m, q_head, use, left, x, buffers, bars, over, tile, sizes,
                            terms, scale,
                        )  # fmt: skip
        mbarrier.arrive(a_empty.index(0), count=1, pred=some)
        kept += some.to(gl.int32)
        turn += 1
        after, live = told(C, turn, messages, m_full)
        mbarrier.arrive(m_empty.index(slot(turn, 2)), count=1)
        n = nq + offset
        row = k_row + first
        if not C.VARLEN:
            row = row + b * n
        to = out + (row.to(gl.int64) * heads + head) * OUT
        store_rows(x, to, heads * OUT, n - first, OUT)
        tile = after


@gluon.jit
def values(C: gl.constexpr, dv, buffers, bars, over, mail, sizes, terms, rest):
    consumer(C, 0, dv, buffers, bars, over, mail, sizes, terms, rest)


@gluon.jit
def keys(C: gl.constexpr, dk, buffers, bars, over, mail, sizes, terms, rest):
    consumer(C, 1, dk, buffers, bars, over, mail, sizes, terms, rest)
