"""dk and dv of wide heads: keys are resident, queries streamed; each warpgroup sums one gradient.

The sum of one gradient of 64 keys and 256 columns fills the registers of a warpgroup. One warpgroup
computes the weights for both:

    warpgroup   scores           then                            sum
    of dV       S^T = K Q^T      P; w to the other warpgroup     dV += P^T dO
    of dK       dP^T = V dO^T    dS^T = w (dP - delta)           dK += dS^T Q

w (``weights``; P except under a softcap) passes through shared memory as float32: it is no operand
of a product, and rounding it would double the rounding error of dS. Both warpgroups hold it in one
layout, so in memory it is ordered by thread: loads and stores of 16 bytes have no bank conflict.

There are as many buffers of w as of dO, two: dK may be a step behind, so the arithmetic of one
warpgroup overlaps with the products of the other.

A product of 64 by 64 scores takes the bandwidth of shared memory for as long as the tensor core; w
and the copies take more. So half of K and half of V are in registers as well. Where shared memory
is short they are only in registers (ALONE): they arrive in a buffer of Q, which leaves room for a
third buffer of Q. Q is in use from S in one warpgroup to dK in the other, longer than a step.

Barriers of a block, with the arrivals that complete a phase:

    barrier        arrivals                              waited for by
    own.full       producer's expect + bytes of K, V     consumers, before a tile's first product
    own.empty      each consumer, after a tile's last    producer, before it loads another
    q.full[s]      producer's expect + bytes of Q, rows  dV before S, dK before dS of the use
    q.empty[s]     dV, S is made; dK is finished         producer, before it fills s again
    do.full[s]     producer's expect + bytes of dO       dV before dV, dK before dP of the use
                   (and of a bias)
    do.empty[s]    dV is finished; dK, dS is made        producer, before it fills s again
    w.full[s]      dV, w of the use is stored            dK, before dS of the use
    mail           as in ``backward_fused.py``           consumers; producer

No barrier signals that w has been read. The warpgroup of dK releases dO after dS of the use. The
warpgroup of dV waits for the next dO in that buffer before it stores w in the same slot.

A tile of a bias arrives with dO, in the first half of the buffer of w of the same use. dV reads it
before it stores w there.

ALONE, the ring of Q has one more use for each tile that has steps, before its steps: K and V have
arrived at q.full, and are in registers at q.empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import (
    Descriptors,
    bits_of_keys,
    follow,
    held_layout,
    kept_of_keys,
    masked_steps,
    no_scores,
    place_of,
    produce,
    row_numbers,
    score_layout,
    store_parts,
    store_sums,
    sums_by_lane,
    thread_layout,
    weights,
)
from .backward_order import full_range, gradient_row, place_of_share, plane_of, rows_left
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .lib.layouts import matrix
from .lib.parts import (
    Parts,
    columns_of,
    issue_over_columns,
    issue_with_columns,
    scaled_parts,
    wait_parts,
    zeros,
)
from .lib.ring import (
    Ring,
    barriers,
    clear_rows,
    cleared,
    full_barriers,
    landing,
    mailbox,
    read_message,
    release,
    release_message,
    slot,
    take_message,
    tile_at,
    tile_buffers,
    wait_empty,
    wait_full,
)
from .lib.rules import score_gradient
from .lib.scores import settled
from .lib.softmax import rounded


class Rings(NamedTuple):
    """The rings of a block. Rings filled by one barrier share it."""

    own: Any  # K's buffer; V's, ``v``, has the same barriers
    v: Any
    q: Any
    rows: Any  # buffers of lse and delta, filled with Q
    do: Any
    w: Any  # it has no empty barriers


class Held(NamedTuple):
    """The warpgroup's columns of K or V in registers, and its offset in the ring of Q."""

    columns: Any
    shift: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    x: Any  # Parts of the sum of dK [64, D] or dV [64, DV]
    drow: Any  # parts of dbias of a row [64, 4]


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_step(C: gl.constexpr, descs, rings, tile, i, use, nth, cut, n):
    """Load Q, lse and delta, dO and the bias of step i of the nth tile of keys.

    ``use`` is the tile's first; the ring of Q has ``nth`` more where K and V arrive in it. Return
    the number of tiles so far that end after their sequence; ``cut`` were before this step.
    """
    q_use = use + nth if C.ALONE else use
    q_use = q_use + i
    use = use + i
    steps = tile.hi - tile.lo
    g = i // steps
    part = 0 if C.VARLEN else tile.b
    first = (tile.lo + i - g * steps) * C.BLOCK_STREAMED
    rest = tile.nq - first
    short = rest < C.BLOCK_STREAMED
    s = slot(q_use, C.Q_STAGES)
    bar = landing(rings.q.full, s, C.Q_STAGES, C.VARLEN, short)
    wait_empty(rings.q, q_use, C.Q_STAGES)
    row = tile.q_row + first
    head = tile.head * n.group + g
    plane, at = plane_of(C, tile.b, head, tile.q_row, n.hq)
    mbarrier.expect(bar, descs.q.block_type.nbytes + descs.rows.block_type.nbytes)
    tma_load(descs.rows, [plane, 0, at + first], bar, rings.rows.index(s))
    q = rings.q.buffers.index(s)
    tma_load(descs.q, [part, row, head, 0], bar, q)
    if C.VARLEN:  # before the wait for a buffer of dO
        cleared(rings.q.full, s, C.Q_STAGES, q, C.BLOCK_STREAMED, C.BUFFER_D, rest, cut)
    u = slot(use, C.DO_STAGES)
    bar = landing(rings.do.full, u, C.DO_STAGES, C.VARLEN, short)
    wait_empty(rings.do, use, C.DO_STAGES)
    if C.BIAS:
        mbarrier.expect(bar, descs.do.block_type.nbytes + descs.bias.block_type.nbytes)
        box: gl.constexpr = [2] + descs.bias.block_type.shape
        halves = reinterpret(rings.w.buffers.index(u), descs.do.dtype, box, descs.bias.layout)
        corner = [tile.b * n.each_b, head * n.each_h, first, tile.first]
        tma_load(descs.bias, corner, bar, halves.index(0))
    else:
        mbarrier.expect(bar, descs.do.block_type.nbytes)
    do = rings.do.buffers.index(u)
    tma_load(descs.do, [part, row, head, 0], bar, do)
    if C.VARLEN:
        cleared(rings.do.full, u, C.DO_STAGES, do, C.BLOCK_STREAMED, C.DV, rest, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_resident(C: gl.constexpr, descs, rings, tile, head, use, nth, cut):
    """Load K and V of the nth tile that has steps; ``cut`` as of ``load_step``.

    Rows of dK and dV for keys past a prefix length are stored, and V contributes to them: so these
    keys are cleared. Rows for keys of another sequence are not stored.
    """
    part = 0 if C.VARLEN else tile.b
    row = tile.k_row + tile.first
    rest = tile.used - tile.first
    short = rest < C.BLOCK_RESIDENT
    k = rings.own.buffers.index(0)
    v = rings.v.index(0)
    bar = landing(rings.own.full, 0, 1, C.PREFIX, short)
    wait_empty(rings.own, nth, 1)
    mbarrier.expect(bar, descs.k.block_type.nbytes + descs.v.block_type.nbytes)
    tma_load(descs.v, [part, row, head, 0], bar, v)
    tma_load(descs.k, [part, row, head, 0], bar, k)
    if C.PREFIX:
        if short:
            mbarrier.wait(rings.own.full.index(1), cut & 1)
            clear_rows(k, C.BLOCK_RESIDENT, C.BUFFER_D, rest)
            clear_rows(v, C.BLOCK_RESIDENT, C.DV, rest)
            fence_async_shared()
            mbarrier.arrive(rings.own.full.index(0), count=1)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_halves(C: gl.constexpr, descs, rings, tile, head, use, nth, cut):
    """Load K and V like ``load_resident``, the left half of each in a buffer of Q (``held``)."""
    part = 0 if C.VARLEN else tile.b
    row = tile.k_row + tile.first
    rest = tile.used - tile.first
    k = rings.own.buffers.index(0)
    v = rings.v.index(0)
    s = slot(use, C.Q_STAGES)
    each: gl.constexpr = descs.k.block_type.nbytes + descs.v.block_type.nbytes
    q = rings.q.buffers
    left = reinterpret(q.index(s), q.dtype, [2] + descs.k.block_type.shape, descs.k.layout)
    wait_empty(rings.q, use, C.Q_STAGES)
    short = rest < C.BLOCK_RESIDENT
    if C.PREFIX:
        if short:
            bar = rings.own.full.index(1)
            wait_empty(rings.own, nth, 1)
            mbarrier.expect(bar, 2 * each)
            load_both(C, descs, part, row, head, 0, bar, left.index(0), left.index(1))
            load_both(C, descs, part, row, head, 1, bar, k, v)
            mbarrier.wait(bar, cut & 1)
            for half in gl.static_range(2):
                clear_rows(left.index(half), C.BLOCK_RESIDENT, C.D // 2, rest)
            clear_rows(k, C.BLOCK_RESIDENT, C.D // 2, rest)
            clear_rows(v, C.BLOCK_RESIDENT, C.DV // 2, rest)
            fence_async_shared()
            mbarrier.arrive(rings.q.full.index(s), count=1)
            mbarrier.arrive(rings.own.full.index(0), count=1)
        cut += short.to(gl.int32)
    if not (C.PREFIX and short):
        bar = rings.q.full.index(s)
        mbarrier.expect(bar, each)
        load_both(C, descs, part, row, head, 0, bar, left.index(0), left.index(1))
        bar = rings.own.full.index(0)
        wait_empty(rings.own, nth, 1)
        mbarrier.expect(bar, each)
        load_both(C, descs, part, row, head, 1, bar, k, v)
    return cut


@gluon.jit
def load_both(C: gl.constexpr, descs, part, row, head, HALF: gl.constexpr, bar, k, v):
    """Load the left (0) or right (1) half of the columns of K and of V."""
    tma_load(descs.k, [part, row, head, HALF * (C.D // 2)], bar, k)
    tma_load(descs.v, [part, row, head, HALF * (C.DV // 2)], bar, v)


@gluon.jit
def producer(C: gl.constexpr, descs, rings, mail, t, n):
    """Load all tiles of this block into shared memory, in one warp."""
    LOAD: gl.constexpr = load_halves if C.ALONE else load_resident
    produce(C, LOAD, load_step, C.DO_STAGES, descs, rings, mail, n.group, n.heads, t, n)


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def product(
    C: gl.constexpr, HELD: gl.constexpr, held, resident, streamed, s, zero, WIDTH: gl.constexpr
):
    """Issue the product of the resident tile ``[64, WIDTH]`` and a streamed tile.

    HELD columns of the resident tile are in registers; each product takes as many.
    """
    FROM: gl.constexpr = HELD if C.ALONE else 0  # first column in shared memory
    a = tile_at(resident, zero, C.BLOCK_RESIDENT, WIDTH - FROM)
    b = tile_at(streamed, s, C.BLOCK_STREAMED, WIDTH)
    x = gl.full([C.BLOCK_RESIDENT, C.BLOCK_STREAMED], 0.0, gl.float32, score_layout(C))
    for i in gl.static_range(WIDTH // HELD):
        part = b.slice(i * HELD, HELD, dim=1).permute((1, 0))
        if i == 0:
            x = warpgroup_mma(held, part, x, use_acc=False, is_async=True)
        else:
            left = a.slice(i * HELD - FROM, HELD, dim=1)
            x = warpgroup_mma(left, part, x, use_acc=True, is_async=True)
    return x


@gluon.jit
def held_columns(C: gl.constexpr, OF_K: gl.constexpr, use, some, rings):
    """Return the first columns of K or of V as a left operand in registers ``[64, HELD]``.

    ALONE they arrive in a buffer of Q: first the columns of K, then those of V.
    """
    HELD: gl.constexpr = C.HELD_K if OF_K else C.HELD_V
    if C.ALONE:
        FROM: gl.constexpr = 0 if OF_K else C.HELD_K
        s = slot(use, C.Q_STAGES)
        wait_full(rings.q, use, C.Q_STAGES, pred=some)
        both = tile_at(rings.q.buffers, s, C.BLOCK_STREAMED, C.D)
        x = settled(both.slice(FROM, HELD, dim=1).load(held_layout(C)))
        release(rings.q, use, C.Q_STAGES, pred=some)
    elif OF_K and C.D1:
        k = tile_at(rings.own.buffers, 0, C.BLOCK_RESIDENT, C.BUFFER_D)
        both = columns_of(k, C.D0, C.D1)
        x = Parts(both.low.load(held_layout(C)), both.high.load(held_layout(C)))
    elif OF_K:
        k = tile_at(rings.own.buffers, 0, C.BLOCK_RESIDENT, C.D)
        x = k.slice(0, HELD, dim=1).load(held_layout(C))
    else:
        v = tile_at(rings.v, 0, C.BLOCK_RESIDENT, C.DV)
        x = v.slice(0, HELD, dim=1).load(held_layout(C))
    return x


@gluon.jit
def step_of_dv(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, k, rings, tile, t, n
):  # fmt: skip
    """Return the State after tile m of the queries of a head; k is the Held part of K."""
    use = state.use
    dtype: gl.constexpr = rings.q.buffers.dtype
    q_use = use + k.shift
    s = slot(q_use, C.Q_STAGES)
    u = slot(use, C.DO_STAGES)
    wait_full(rings.q, q_use, C.Q_STAGES)
    # use >> 30 is 0, which the compiler cannot derive
    if C.D1:
        q = tile_at(rings.q.buffers, s, C.BLOCK_STREAMED, C.BUFFER_D)
        S = issue_over_columns(k.columns, columns_of(q, C.D0, C.D1), no_scores(C), C.D1)
    else:
        S = product(C, C.HELD_K, k.columns, rings.own.buffers, rings.q.buffers, s, use >> 30, C.D)
    lse = row_numbers(C, rings.rows, s, 0)[None, :]
    S = warpgroup_mma_wait(0, deps=[S])
    bias = 0
    if C.BIAS:
        wait_full(rings.do, use, C.DO_STAGES)
        layout: gl.constexpr = matrix(C.BLOCK_STREAMED, C.BLOCK_RESIDENT, dtype)
        box: gl.constexpr = [2, C.BLOCK_STREAMED, C.BLOCK_RESIDENT]
        halves = reinterpret(rings.w.buffers.index(u), dtype, box, layout)
        bias = halves.index(0).permute((1, 0)).load(score_layout(C))
    p, w = weights(C, MASKED, c, S, lse, bias, m, head, tile, t, n, dtype)
    if C.DROPOUT:
        bits = bits_of_keys(C, tile.first, m, head, tile, t, n)
        p = kept_of_keys(C, p, bits)
        w = 2.0 * kept_of_keys(C, w, bits) - w  # -w of a dropped pair: w is never negative
    P = rounded(p, dtype)
    if not C.BIAS:
        wait_full(rings.do, use, C.DO_STAGES)
    do = columns_of(tile_at(rings.do.buffers, u, C.BLOCK_STREAMED, C.DV), C.DV, 0)
    dv = issue_with_columns(P, do, state.x, C.DV, 0)
    rings.w.buffers.index(u).store(w)
    mbarrier.arrive(rings.w.full.index(u), count=1)
    release(rings.q, q_use, C.Q_STAGES)
    dv = wait_parts(0, dv, 0)
    release(rings.do, use, C.DO_STAGES)
    return State(use + 1, dv, state.drow)


@gluon.jit
def step_of_dk(C: gl.constexpr, state, v, rings, n):
    """Return the State after one tile of queries; v is the Held part of V."""
    use = state.use
    dtype: gl.constexpr = rings.q.buffers.dtype
    q_use = use + v.shift
    s = slot(q_use, C.Q_STAGES)
    u = slot(use, C.DO_STAGES)
    wait_full(rings.do, use, C.DO_STAGES)
    dp = product(C, C.HELD_V, v.columns, rings.v, rings.do.buffers, u, use >> 30, C.DV)
    wait_full(rings.q, q_use, C.Q_STAGES)
    wait_full(rings.w, use, C.DO_STAGES)
    w = rings.w.buffers.index(u).load(score_layout(C))
    if C.BIAS:  # the next tile of the bias arrives where w was
        fence_async_shared()
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = row_numbers(C, rings.rows, s, 1)[None, :]
    if C.DROPOUT:
        dp = gl.where(w > 0.0, dp * n.keep_scale, 0.0)
        w = gl.abs(w)
    ds = score_gradient(w, dp, delta)
    drow = state.drow
    if C.DROW:
        drow = drow + sums_by_lane(ds)
    q = columns_of(tile_at(rings.q.buffers, s, C.BLOCK_STREAMED, C.BUFFER_D), C.D0, C.D1)
    dk = issue_with_columns(rounded(ds, dtype), q, state.x, C.D0, C.D1)
    release(rings.do, use, C.DO_STAGES)
    dk = wait_parts(0, dk, C.D1)
    release(rings.q, q_use, C.Q_STAGES)
    return State(use + 1, dk, drow)


@gluon.jit
def consumer(C: gl.constexpr, OF_DK: gl.constexpr, rings, mail, t, n):
    """Compute dK, or dV, of every tile of this block."""
    W0: gl.constexpr = C.D0 if OF_DK else C.DV
    W1: gl.constexpr = C.D1 if OF_DK else 0
    OUT: gl.constexpr = C.D_OUT if OF_DK else C.DV_OUT
    message = 0
    use = 0
    nth = 0
    tile, live = take_message(mail, 0)
    while live:
        some = tile.lo < tile.hi
        wait_full(rings.own, nth, 1, pred=some)
        shift = 0
        if C.ALONE:
            shift = nth + 1
        operand = Held(held_columns(C, not OF_DK, use + nth, some, rings), shift)
        x = zeros(C.BLOCK_RESIDENT, W0, W1)
        if OF_DK:
            drow = 0
            if C.DROW:
                shape: gl.constexpr = [C.BLOCK_RESIDENT, C.BLOCK_STREAMED]
                drow = sums_by_lane(gl.full(shape, 0.0, gl.float32, score_layout(C)))
            state = State(use, x, drow)
            for _ in range((tile.hi - tile.lo) * n.group):
                state = step_of_dk(C, state, operand, rings, n)
            x = scaled_parts(state.x, n.out_scale, W1)
            if C.DROW:
                plane = (tile.b * n.heads + tile.head).to(gl.int64)
                to = t.dbias + plane * n.nk + tile.first
                store_sums(state.drow, to, tile.nq + tile.offset - tile.first)
        else:
            state = State(use, x, 0)
            full = full_range(C, tile.first, tile, t, n)
            state = masked_steps(C, step_of_dv, 0, state, operand, rings, tile, full, t, n)
            x = state.x
            if C.DROPOUT:
                x = scaled_parts(x, n.keep_scale, W1)
        use = state.use
        release(rings.own, nth, 1, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = read_message(mail, message)
        row, head, heads = place_of_share(gradient_row(C, 0, tile), tile, n)
        table, alone = t.dv_rows, t.dv_alone
        if OF_DK:
            table, alone = t.dk_rows, t.dk_alone
        to = place_of(t.out if OF_DK else t.dv, row, head, heads, OUT, table)
        if alone is not None:
            alone = alone + head * OUT
        stride = heads * OUT
        store_parts(x, to, stride, rows_left(C, 0, tile), W0, OUT, table, row, alone)
        release_message(mail, message, following, live)
        tile = following


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def backward_dkdv(k, v, q, do, rows, bias, t, n, C: gl.constexpr):
    """Run the partitions of a block.

    The arguments are descriptors of copies (rows are lse and delta), ``backward_args.Pointers`` and
    ``Numbers``.
    """
    descs = Descriptors(q, do, k, v, rows, bias)
    ks = tile_buffers(k, 1)
    vs = tile_buffers(v, 1)
    qs = tile_buffers(q, C.Q_STAGES)
    dos = tile_buffers(do, C.DO_STAGES)
    stats = tile_buffers(rows, C.Q_STAGES)
    mail = mailbox(C.WARPGROUPS)
    own = Ring(ks, full_barriers(1, C.PREFIX), barriers(1, C.WARPGROUPS))
    q_full = full_barriers(C.Q_STAGES, C.VARLEN)
    q_ring = Ring(qs, q_full, barriers(C.Q_STAGES, C.WARPGROUPS))
    do_full = full_barriers(C.DO_STAGES, C.VARLEN)
    do_ring = Ring(dos, do_full, barriers(C.DO_STAGES, C.WARPGROUPS))
    shape: gl.constexpr = [C.DO_STAGES, C.BLOCK_RESIDENT, C.BLOCK_STREAMED]
    ws = gl.allocate_shared_memory(gl.float32, shape, thread_layout(C))
    w_ring = Ring(ws, barriers(C.DO_STAGES, 1), None)
    rings = Rings(own, vs, q_ring, stats, do_ring, w_ring)
    fence_async_shared()
    follow()
    gl.warp_specialize(
        [
            (consumer, (C, False, rings, mail, t, n)),
            (consumer, (C, True, rings, mail, t, n)),
            (producer, (C, descs, rings, mail, t, n)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )
