"""dk, dv and the sums of dq in one kernel: keys are resident, queries streamed.

A block has two to four consumers of 64 keys each, a producer warp, and a writer warp that adds dQ
to memory. Consumers may also round dq (``backward_complete.py``). Barriers of a block, with the
arrivals that complete a phase:

    barrier       arrivals                               waited for by
    q.full[s]     producer's expect + bytes of Q, rows   consumers, before S of the use
    do.full[s]    producer's expect + bytes of dO        consumers, before dP of the use
    done[s]       each consumer, dS of the use is        consumers, before dQ of the use;
                  stored, dK and dV of it and dQ of      producer, before it fills s again
                  the use before are finished
    k.full[s]     producer's expect + bytes of K         consumers, before a tile's first S
    v.full[s]     producer's expect + bytes of V         consumers, before a tile's first dP
    kv_empty[s]   each consumer, after a tile's last     producer, before K of a later tile
    ds.full[t]    producer's expect + bytes of the bias  consumers, before P of the use
    bias.full[t]  the same of a float32 bias             the same
    dq.full[s]    the consumer that makes dQ of the use  writer, once a use
    dq.empty[s]   writer, its copy has been read         the consumer that fills s next
    mail.full[t]  producer, a tile is announced          consumers and writer, once a message
    mail.empty[t] each consumer and the writer           producer, two messages later

``done`` is the empty barrier of Q, dO and dS, ``kv_empty`` that of K and V. Where dQ is a product
of dbias, afterwards, there is no writer, and no ring of dQ. The copy of a short tile completes a
barrier of its own; the full barrier follows when its rows are cleared (``lib/ring.py``).

A use is a step: one tile of queries of one head of the group. A tile of keys that no query sees has
no use: it has a message and no other barrier, in any partition. All partitions read lo, hi and the
size of the group from the same message, so they count the same uses.

Consumers hold scores with keys down and queries across, ``S^T = K Q^T`` and ``dP^T = V dO^T``, so
that P^T and dS^T in registers are left operands of dV and dK. Only dQ needs the dS of the other
warpgroup: dS passes through shared memory, and the warpgroups alternate in computing dQ of a whole
step. (Computing half of dQ each reads dS twice, and products of fewer columns read more for their
size. Shared memory bandwidth, and its power, limit a step.)

Three consumers have 160 registers a thread. At head size 64 these hold dK, dV, K and the scores of
half a step (``halved_step``). A step then reads and adds as much of Q, dO and dQ for 192 keys as
for 128. Four consumers have 112 registers, enough for head size 32 with a bias (DP_HALVED).

dQ of a step is computed in the next step, when the other warpgroup has long stored its dS. So
neither waits for the other, and the products of one overlap with the exponentials of the other.

One step, tensor core above, threads below:

    dP          | dV, then dK | dQ of the last, every other step | S of the next
    P = exp2(S) | dS, stored  | dQ stored

At the end of a step no product is in flight: the assembler would make products in flight wait for
one another. The scores that the last step computes for a next one are not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_complete import (
    Completion,
    begin_head,
    end_tile,
    is_rounding,
    round_sums,
)
from .backward_lib import (
    Descriptors,
    Heads,
    LineBias,
    Outputs,
    ScoreArgs,
    first_tile,
    follow,
    held_layout,
    next_tile,
    no_scores,
    peek_message,
    publish,
    read_done,
    read_message,
    release_message,
    row_numbers,
    score_layout,
    steps_before_draw,
    store,
    store_sums,
    sums_by_lane,
    tile_buffer,
    weights,
)
from .backward_order import (
    Sequences,
    Sizes,
    abreast,
    full_range,
    gradient_row,
    neighbour_range,
    plane_of,
    rows_left,
    step_of,
    steps_before,
)
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .lib.assembly import STORE
from .lib.order import Order
from .lib.parts import (
    Parts,
    cleared_parts,
    copy_parts,
    count,
    expect_parts,
    issue_over_columns,
    issue_with_columns,
    load_parts,
    part_buffers,
    parts_at,
    rows_of_parts,
    wait_parts,
    wait_two,
    zeros,
)
from .lib.ring import (
    Ring,
    barriers,
    full_barriers,
    landing,
    mailbox,
    phase,
    release,
    slot,
    tile_buffers,
    wait_empty,
    wait_full,
)
from .lib.rules import score_gradient
from .lib.scores import widened
from .lib.softmax import rounded


class Rings(NamedTuple):
    """The rings of a block."""

    q: Any
    rows: Any  # buffers of lse and delta, filled with Q
    do: Any
    k: Any
    v: Any
    ds: Any  # a tile of a bias arrives in the buffer of dS of its step
    bias: Any  # halves of a float32 bias, 64 keys for each warpgroup; else unused
    dq: Any


class Resident(NamedTuple):
    """K and V of a tile: in registers where HELD, and in buffer ``slot``."""

    k: Any
    v: Any
    slot: Any
    begin: Any  # the tile's first use, and the end of its uses
    end: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    s: Any  # S^T of the use [64, BLOCK_STREAMED], unless it has halves
    dk: Any  # Parts of [64, D]
    dv: Any  # Parts of [64, DV]
    drow: Any  # parts of dbias of a row [64, 4]


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def wait_done(C: gl.constexpr, rings, use, pred):
    """Wait until the consumers are done with a use, one of the last Q_STAGES."""
    mbarrier.wait(rings.q.empty.index(slot(use, C.Q_STAGES)), phase(use, C.Q_STAGES), pred=pred)


@gluon.jit
def wait_free(C: gl.constexpr, rings, use):
    """Wait until the buffers of an earlier use are free; below 0 there is none."""
    wait_done(C, rings, gl.maximum(use, 0), use >= 0)


@gluon.jit
def load_step(C: gl.constexpr, descs, rings, tile, heads, i, use, cut):
    """Load Q, lse and delta, dO and the bias of step i of a tile of keys.

    Return the number of tiles so far that end after their sequence; ``cut`` were before this step.
    """
    m, g = step_of(C, i, tile, heads.group)
    part = 0 if C.VARLEN else tile.b
    head = tile.head * heads.group + g
    plane, row = plane_of(C, tile.b, head, tile.q_row, heads.query)
    first = m * C.BLOCK_STREAMED
    rest = tile.nq - first
    short = rest < C.BLOCK_STREAMED
    s = slot(use, C.Q_STAGES)
    bar = landing(rings.q.full, s, C.Q_STAGES, C.VARLEN, short)
    wait_free(C, rings, use - C.Q_STAGES)
    expect_parts(bar, descs.q, C.D1, descs.rows.block_type.nbytes)
    corner = (part, tile.q_row + first, head)
    q = rings.q.buffers
    copy_parts(descs.q, corner, C.D0, C.D1, bar, q, s)
    tma_load(descs.rows, [plane, 0, row + first], bar, rings.rows.index(s))
    if C.VARLEN:  # before the wait for a buffer of dO
        cleared_parts(rings.q.full, s, C.Q_STAGES, q, C.BLOCK_STREAMED, C.D0, C.D1, rest, cut)
    u = slot(use, C.DO_STAGES)
    bar = landing(rings.do.full, u, C.DO_STAGES, C.VARLEN, short)
    wait_free(C, rings, use - C.DO_STAGES)
    do = rings.do.buffers
    load_parts(descs.do, corner, C.DV0, C.DV1, bar, do, u)
    if C.BIAS_FLOAT32:
        of_bias = [tile.b * heads.each_b, head * heads.each_h, first, tile.first]
        load_float32(C, descs.bias, rings.bias, rings, of_bias, use)
    elif C.BIAS:
        t = slot(use, C.DS_STAGES)
        bar = rings.ds.full.index(t)
        wait_free(C, rings, use - C.DS_STAGES + 1)  # released with dQ of the use before
        mbarrier.expect(bar, descs.bias.block_type.nbytes)
        ds = rings.ds.buffers
        box: gl.constexpr = [1, 1, C.BLOCK_STREAMED, C.BLOCK_RESIDENT]
        to = reinterpret(ds.index(t), ds.dtype, box, descs.bias.layout)
        at = [tile.b * heads.each_b, head * heads.each_h, first, tile.first]
        tma_load(descs.bias, at, bar, to)
    if C.VARLEN:
        cleared_parts(rings.do.full, u, C.DO_STAGES, do, C.BLOCK_STREAMED, C.DV0, C.DV1, rest, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_float32(C: gl.constexpr, desc, ring, rings, corner, use):
    """Load a float32 bias of a use, half of the keys for each warpgroup."""
    t = slot(use, C.BIAS_STAGES)
    wait_free(C, rings, use - C.BIAS_STAGES)
    bar = ring.full.index(t)
    mbarrier.expect(bar, C.WARPGROUPS * desc.block_type.nbytes)
    for c in gl.static_range(C.WARPGROUPS):
        at = [corner[0], corner[1], corner[2], corner[3] + c * C.TOKENS]
        tma_load(desc, at, bar, ring.buffers.index(C.WARPGROUPS * t + c))


@gluon.jit
def load_keys(C: gl.constexpr, copy, corner, W0: gl.constexpr, W1: gl.constexpr, bar, buffers, s):
    """Load K or V of a tile of keys into buffer s of a ring."""
    if C.KEY_TILES == 1:
        load_parts(copy, corner, W0, W1, bar, buffers, s)
    else:
        expect_parts(bar, copy, W1, (C.KEY_TILES - 1) * copy.low.block_type.nbytes)
        for i in gl.static_range(C.KEY_TILES):
            at = (corner[0], corner[1] + i * C.TOKENS, corner[2])
            copy_parts(copy, at, W0, W1, bar, buffers, C.KEY_TILES * s + i)


@gluon.jit
def load_resident(C: gl.constexpr, descs, rings, tile, nth, cut):
    """Load K and V of the nth tile that has steps; ``cut`` as of ``load_step``."""
    part = 0 if C.VARLEN else tile.b
    corner = (part, tile.k_row + tile.first, tile.head)
    rest = tile.used - tile.first
    short = rest < C.BLOCK_RESIDENT
    s = slot(nth, C.KV_STAGES)
    wait_empty(rings.k, nth, C.KV_STAGES)
    k = rings.k.buffers
    bar = landing(rings.k.full, s, C.KV_STAGES, C.PADDED, short)
    load_keys(C, descs.k, corner, C.D0, C.D1, bar, k, s)
    v = rings.v.buffers
    bar = landing(rings.v.full, s, C.KV_STAGES, C.PADDED, short)
    load_keys(C, descs.v, corner, C.DV0, C.DV1, bar, v, s)
    if C.PADDED:
        rows: gl.constexpr = C.BLOCK_RESIDENT
        n: gl.constexpr = C.KEY_TILES
        cleared_parts(rings.k.full, s, C.KV_STAGES, k, rows, C.D0, C.D1, rest, cut, n)
        cleared_parts(rings.v.full, s, C.KV_STAGES, v, rows, C.DV0, C.DV1, rest, cut, n)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def producer(C: gl.constexpr, descs, rings, mail, order, sizes, seqs, heads):
    """Load all tiles of this block into shared memory, in one warp."""
    message = 0
    use = 0
    nth = 0
    cut_q = 0
    cut_k = 0
    n, end, tile = first_tile(C, mail, order, sizes, seqs)
    while n < end:
        if tile.lo < tile.hi:
            # the rings have room for the first step while K and V of the last tile are in use
            cut_q = load_step(C, descs, rings, tile, heads, 0, use, cut_q)
            cut_k = load_resident(C, descs, rings, tile, nth, cut_k)
            nth += 1
        steps = (tile.hi - tile.lo) * heads.group
        # as many steps as there is room for, since looking up the next tile is slow
        some = gl.minimum(steps, C.DO_STAGES)
        if C.DRAWN:
            some = gl.maximum(some, steps_before_draw(steps, C.DO_STAGES))
        for i in range(1, some):
            cut_q = load_step(C, descs, rings, tile, heads, i, use + i, cut_q)
        following = tile
        if not C.ORDERED:
            n, following = next_tile(C, n, end, message + 1, mail, order, sizes, seqs)
        for i in range(gl.maximum(some, 1), steps):
            cut_q = load_step(C, descs, rings, tile, heads, i, use + i, cut_q)
        use += steps
        if C.ORDERED:  # late, because other blocks wait for every tile that a block has taken
            n, following = next_tile(C, n, end, message + 1, mail, order, sizes, seqs)
        message += 1
        tile = following


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def own_parts(C: gl.constexpr, c: gl.constexpr, buffers, at, W0: gl.constexpr, W1: gl.constexpr):
    """Return the warpgroup's rows of K or V ``[64, W0 + W1]`` in buffer ``at``.

    ``at`` is as for ``backward_lib.own_rows``.
    """
    if C.KEY_TILES == 1:
        both = parts_at(buffers, at, C.BLOCK_RESIDENT, W0, W1)
        own = rows_of_parts(both, c * C.TOKENS, C.TOKENS, W1)
    else:
        own = parts_at(buffers, C.KEY_TILES * at + c, C.TOKENS, W0, W1)
    return own


@gluon.jit
def held(
    C: gl.constexpr, c: gl.constexpr, buffers, at, W0: gl.constexpr, W1: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """Return the warpgroup's rows of K or V ``[64, W0 + W1]`` as left operands.

    Where HELD they are in registers: S or dP then reads half as much of shared memory.
    """
    x = Parts(0, 0)
    if HELD:
        own = own_parts(C, c, buffers, at, W0, W1)
        low = own.low.load(held_layout(C))
        high = 0
        if W1:
            high = own.high.load(held_layout(C))
        x = Parts(low, high)
    return x


@gluon.jit
def own_ds(C: gl.constexpr, c: gl.constexpr, ds, use):
    """Return the warpgroup's part ``[64, BLOCK_STREAMED]`` of the buffer of dS of a use.

    In memory queries are down, as in a bias: loads and stores transpose matrices of 8 by 8.
    """
    if C.KEY_TILES == 1:
        both = ds.buffers.index(slot(use, C.DS_STAGES)).permute((1, 0))
        own = both.slice(c * C.TOKENS, C.TOKENS, dim=0)
    else:
        own = ds.buffers.index(C.KEY_TILES * slot(use, C.DS_STAGES) + c).permute((1, 0))
    return own


@gluon.jit
def own_bias(C: gl.constexpr, c: gl.constexpr, rings, use):
    """Return the warpgroup's part ``[64, BLOCK_STREAMED]`` of the bias of a use."""
    if C.BIAS_FLOAT32:
        wait_full(rings.bias, use, C.BIAS_STAGES)
        i = C.WARPGROUPS * slot(use, C.BIAS_STAGES) + c
        half = tile_buffer(rings.bias.buffers, i, C.BLOCK_STREAMED, C.TOKENS)
        x = half.permute((1, 0)).load(score_layout(C))
    else:
        wait_full(rings.ds, use, C.DS_STAGES)
        x = widened(own_ds(C, c, rings.ds, use).load(score_layout(C)))
    return x


@gluon.jit
def issue_scores(C: gl.constexpr, c: gl.constexpr, resident, rings, use):
    """Issue S^T = K Q^T of a use."""
    q = parts_at(rings.q.buffers, slot(use, C.Q_STAGES), C.BLOCK_STREAMED, C.D0, C.D1)
    k = resident.k
    if not C.HELD:
        k = own_parts(C, c, rings.k.buffers, resident.slot + (use >> 30), C.D0, C.D1)
    return issue_over_columns(k, q, no_scores(C), C.D1)


@gluon.jit
def issue_dp(C: gl.constexpr, c: gl.constexpr, resident, rings, use):
    """Wait for dO of a use, issue dP^T = V dO^T, and return (dO, dP^T)."""
    wait_full(rings.do, use, C.DO_STAGES)
    do = parts_at(rings.do.buffers, slot(use, C.DO_STAGES), C.BLOCK_STREAMED, C.DV0, C.DV1)
    v = resident.v
    if not C.HELD:
        v = own_parts(C, c, rings.v.buffers, resident.slot + (use >> 30), C.DV0, C.DV1)
    return do, issue_over_columns(v, do, no_scores(C), C.DV1)


@gluon.jit
def turn_of(C: gl.constexpr, use):
    """Return the warpgroup that makes dQ of a use."""
    return slot(use, C.WARPGROUPS)


@gluon.jit
def make_dq(C: gl.constexpr, resident, rings, use):
    """Compute dQ = dS K of a use ``[BLOCK_STREAMED, D]``, and pass it to the writer.

    Waits for all products in flight. Each part of dQ is stored as ``[2 W, 32]`` (``thread_order``).
    """
    z = zeros(C.BLOCK_STREAMED, C.D0, C.D1)
    low = z.low
    high = z.high
    KEYS: gl.constexpr = C.BLOCK_RESIDENT // C.KEY_TILES
    for i in gl.static_range(C.KEY_TILES):
        at = C.KEY_TILES * (resident.slot + (use >> 30)) + i
        k = parts_at(rings.k.buffers, at, KEYS, C.D0, C.D1)
        ds = rings.ds.buffers.index(C.KEY_TILES * slot(use, C.DS_STAGES) + i)
        low = warpgroup_mma(ds, k.low, low, use_acc=i > 0, is_async=True)
        if C.D1:
            high = warpgroup_mma(ds, k.high, high, use_acc=i > 0, is_async=True)
    dq = wait_parts(0, Parts(low, high), C.D1)
    s = slot(use, C.DQ_STAGES)
    wait_empty(rings.dq, use, C.DQ_STAGES)
    to = rings.dq.buffers
    tile_buffer(to.low, s, 2 * C.D0, 32).store(thread_order(dq.low, C.D0))
    if C.D1:
        tile_buffer(to.high, s, 2 * C.D1, 32).store(thread_order(dq.high, C.D1))
    fence_async_shared()
    mbarrier.arrive(rings.dq.full.index(s), count=1)


@gluon.jit
def thread_order(x, WIDTH: gl.constexpr):
    """Return a product's result x ``[64, WIDTH]`` in the order of threads, ``[2 WIDTH, 32]``.

    Four numbers of each thread are adjacent, so stores of 16 bytes have no bank conflict.

    Rows are 16 w + 8 i + r and columns 8 n + 2 c + j, in the order of (w, n, r, c, i, j). The warp
    is w, the thread (r, c). ``row_stats.finish`` reads that order.
    """
    x = x.reshape([4, 2, 8, WIDTH // 8, 4, 2])
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([2 * WIDTH, 32])


@gluon.jit
def store_dbias(C: gl.constexpr, c: gl.constexpr, dbias, ds, use, m, head, tile):
    """Store the warpgroup's half of dS of a use in dbias, once its buffer is free."""
    tma_store_wait(0)
    half = ds.buffers.index(slot(use, C.DS_STAGES)).slice(c * C.TOKENS, C.TOKENS, dim=1)
    corner = [tile.b, head, m * C.BLOCK_STREAMED, tile.first + c * C.TOKENS]
    tma_store(dbias, corner, half)


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, resident, rings,
    tile, sizes, args, dbias,
):  # fmt: skip
    """Return the State after tile m of the queries of a head."""
    if C.HALVED:
        after = halved_step(C, MASKED, c, m, head, state, resident, rings, tile, sizes, args)
    else:
        after = whole_step(C, MASKED, c, m, head, state, resident, rings, tile, sizes, args, dbias)
    return after


@gluon.jit
def whole_step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, resident, rings,
    tile, sizes, args, dbias,
):  # fmt: skip
    """Return the State after tile m of the queries of a head.

    AHEAD, where registers suffice: S of the next step starts before dQ.
    """
    use = state.use
    before = gl.maximum(use - 1, 0)
    after = use + 1
    was = use > resident.begin
    dtype: gl.constexpr = rings.ds.buffers.dtype
    do, dp = issue_dp(C, c, resident, rings, use)
    s = slot(use, C.Q_STAGES)
    lse = row_numbers(C, rings.rows, s, 0)[None, :]
    bias = 0
    if C.BIAS:
        bias = own_bias(C, c, rings, use)
    p, w = weights(C, MASKED, c, state.s, lse, bias, m, head, tile, sizes, args, dtype)
    P = rounded(p, dtype)
    # A wait begins a new basic block. Without one here ptxas moves the exponentials below the wait
    # for the products that they overlap with.
    wait_full(rings.q, after, C.Q_STAGES, pred=after < resident.end)
    dp = warpgroup_mma_wait(0, deps=[dp])

    dv = issue_with_columns(P, do, state.dv, C.DV0, C.DV1)
    if C.DQ:
        wait_done(C, rings, before, was)
    delta = row_numbers(C, rings.rows, s, 1)[None, :]
    ds = rounded(score_gradient(w, dp, delta), dtype)
    drow = state.drow
    if C.DROW:
        drow = drow + sums_by_lane(score_gradient(p, dp, delta))
    own_ds(C, c, rings.ds, use).store(ds)
    fence_async_shared()
    if C.DBIAS:
        store_dbias(C, c, dbias, rings.ds, use, m, head, tile)
    q = parts_at(rings.q.buffers, s, C.BLOCK_STREAMED, C.D0, C.D1)
    dk = issue_with_columns(ds, q, state.dk, C.D0, C.D1)
    if C.AHEAD:
        S = issue_scores(C, c, resident, rings, after)
    if C.DQ:
        if not C.AHEAD:  # dQ reuses the registers of P
            dv = wait_parts(count(C.D1), dv, C.DV1)
        if was & (turn_of(C, before) == c):
            make_dq(C, resident, rings, before)
    if not C.AHEAD:
        S = issue_scores(C, c, resident, rings, after)
    dv, dk = wait_two(count(C.D1), dv, dk, C.D1)
    release(rings.q, use, C.Q_STAGES)
    return State(after, warpgroup_mma_wait(0, deps=[S]), dk, dv, drow)


@gluon.jit
def halved_step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, resident, rings,
    tile, sizes, args,
):  # fmt: skip
    """Return the State after tile m of the queries of a head, half of them at a time.

    S has a product for each half, dP one for both, whose V is read once; with DP_HALVED one for
    each. The products of the other warpgroups overlap with the exponentials of this one.
    """
    use = state.use
    before = gl.maximum(use - 1, 0)
    was = use > resident.begin
    s = slot(use, C.Q_STAGES)
    dtype: gl.constexpr = rings.ds.buffers.dtype
    wait_full(rings.q, use, C.Q_STAGES)
    S = issue_half(C, c, 0, resident, rings, use)
    if C.DP_HALVED:
        do, dp0 = issue_half_dp(C, c, 0, resident, rings, use)
    else:
        do, dp0 = issue_dp(C, c, resident, rings, use)
    b0, b1 = halves_of_bias(C, c, rings, use)
    S = warpgroup_mma_wait(count(C.DV1), deps=[S])
    lse = row_numbers(C.HALF, rings.rows, s, 0, 0)[None, :]
    w, P = half_weights(C, MASKED, c, S, lse, b0, 2 * m, head, tile, sizes, args, dtype)
    if C.DQ:
        wait_done(C, rings, before, was)
    dp0 = warpgroup_mma_wait(0, deps=[dp0])
    dp1 = 0
    if not C.DP_HALVED:
        dp0, dp1 = halves_of(C, dp0)
    dk, dv = add_half(C, c, 0, state.dk, state.dv, P, w, dp0, do, rings, use)
    S = issue_half(C, c, 1, resident, rings, use)
    if C.DP_HALVED:
        do, dp1 = issue_half_dp(C, c, 1, resident, rings, use)
        S = warpgroup_mma_wait(count(C.DV1), deps=[S])
    else:
        S = warpgroup_mma_wait(0, deps=[S])
    lse = row_numbers(C.HALF, rings.rows, s, 0, 1)[None, :]
    w, P = half_weights(C, MASKED, c, S, lse, b1, 2 * m + 1, head, tile, sizes, args, dtype)
    if C.DP_HALVED:
        wait_full(rings.q, use, C.Q_STAGES)  # begins a basic block, as in whole_step
        dp1 = warpgroup_mma_wait(0, deps=[dp1])
    dk, dv = add_half(C, c, 1, dk, dv, P, w, dp1, do, rings, use)
    fence_async_shared()
    if C.DQ:
        mine = was & (turn_of(C, before) == c)
        if mine:
            make_dq(C, resident, rings, before)
    dv, dk = wait_two(0, dv, dk, C.D1)
    release(rings.q, use, C.Q_STAGES)
    return State(use + 1, state.s, dk, dv, state.drow)


@gluon.jit
def issue_half(C: gl.constexpr, c: gl.constexpr, h: gl.constexpr, resident, rings, use):
    """Issue S^T = K Q^T of half h of a use ``[64, BLOCK_STREAMED / 2]``."""
    N: gl.constexpr = C.HALF.BLOCK_STREAMED
    q = parts_at(rings.q.buffers, slot(use, C.Q_STAGES), C.BLOCK_STREAMED, C.D0, C.D1)
    q = rows_of_parts(q, h * N, N, C.D1)
    k = resident.k
    if not C.HELD_K:
        k = own_parts(C, c, rings.k.buffers, resident.slot + (use >> 30), C.D0, C.D1)
    return issue_over_columns(k, q, no_scores(C.HALF), C.D1)


@gluon.jit
def issue_half_dp(C: gl.constexpr, c: gl.constexpr, h: gl.constexpr, resident, rings, use):
    """Wait for dO of a use, issue dP^T = V dO^T of half h of it, and return (dO, dP^T)."""
    N: gl.constexpr = C.HALF.BLOCK_STREAMED
    wait_full(rings.do, use, C.DO_STAGES, pred=h == 0)
    do = parts_at(rings.do.buffers, slot(use, C.DO_STAGES), C.BLOCK_STREAMED, C.DV0, C.DV1)
    v = resident.v
    if not C.HELD:
        v = own_parts(C, c, rings.v.buffers, resident.slot + (use >> 30), C.DV0, C.DV1)
    half = rows_of_parts(do, h * N, N, C.DV1)
    return do, issue_over_columns(v, half, no_scores(C.HALF), C.DV1)


@gluon.jit
def halves_of_bias(C: gl.constexpr, c: gl.constexpr, rings, use):
    """Return both halves of the bias of a use, not widened: they are loaded before dS is stored."""
    low = 0
    high = 0
    if C.BIAS:
        wait_full(rings.ds, use, C.DS_STAGES)
        low, high = halves_of(C, own_ds(C, c, rings.ds, use).load(score_layout(C)))
    return low, high


@gluon.jit
def half_weights(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, S, lse, bias, m, head, tile, sizes,
    args, dtype: gl.constexpr,
):  # fmt: skip
    """Return (w, P) of a half, number m of all: ``backward_lib.weights``, P rounded."""
    if C.BIAS:
        bias = widened(bias)
    p, w = weights(C.HALF, MASKED, c, S, lse, bias, m, head, tile, sizes, args, dtype)
    return w, rounded(p, dtype)


@gluon.jit
def add_half(
    C: gl.constexpr, c: gl.constexpr, h: gl.constexpr, dk, dv, P, w, dp, do, rings, use
):  # fmt: skip
    """Issue dV and dK of half h of a use, and store its dS; return (dK, dV)."""
    N: gl.constexpr = C.HALF.BLOCK_STREAMED
    s = slot(use, C.Q_STAGES)
    dv = issue_with_columns(P, rows_of_parts(do, h * N, N, C.DV1), dv, C.DV0, C.DV1)
    delta = row_numbers(C.HALF, rings.rows, s, 1, h)[None, :]
    ds = rounded(score_gradient(w, dp, delta), rings.ds.buffers.dtype)
    own_ds(C, c, rings.ds, use).slice(h * N, N, dim=1).store(ds)
    q = parts_at(rings.q.buffers, s, C.BLOCK_STREAMED, C.D0, C.D1)
    dk = issue_with_columns(ds, rows_of_parts(q, h * N, N, C.D1), dk, C.D0, C.D1)
    return dk, dv


@gluon.jit
def halves_of(C: gl.constexpr, x):
    """Return both halves of the columns of x ``[64, BLOCK_STREAMED]``, as their scores lie."""
    N: gl.constexpr = C.HALF.BLOCK_STREAMED
    L: gl.constexpr = score_layout(C.HALF)
    low, high = x.reshape([C.TOKENS, 2, N]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, L), gl.convert_layout(high, L)


@gluon.jit
def all_steps(
    C: gl.constexpr, c: gl.constexpr, state, resident, rings, tile, full, sizes, args, group, dbias
):
    """Return the State after all steps of a tile of keys, in the order of ``step_of``."""
    rounds, side = group, 1
    if C.ABREAST:
        rounds, side = 1, group
    for g in range(rounds):
        head = tile.head * group + g
        if C.UP:
            for i in range(tile.lo, full.begin):
                state = step(C, True, c, i, head, state, resident, rings, tile, sizes, args, dbias)
        if C.LEFT:
            for i in range(full.end, tile.hi):
                m = tile.hi - 1 - i + full.end
                state = step(C, True, c, m, head, state, resident, rings, tile, sizes, args, dbias)
        if not C.DOCUMENTS:
            for n in range(full.begin * side, full.end * side):
                i, head = abreast(C, n, g, group)
                head += tile.head * group
                m = full.end - 1 - i + full.begin
                if C.UP:
                    m = i
                state = step(C, False, c, m, head, state, resident, rings, tile, sizes, args, dbias)
        if C.MASKS and not C.UP:
            for n in range(tile.lo * side, full.begin * side):
                i, head = abreast(C, n, g, group)
                head += tile.head * group
                m = full.begin - 1 - i + tile.lo
                state = step(C, True, c, m, head, state, resident, rings, tile, sizes, args, dbias)
    return state


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, rings, mail, sizes, args, heads, out):
    """Compute dK and dV of keys ``64 c`` to ``64 c + 63`` of every tile of this block."""
    message = 0
    use = 0
    nth = 0
    tile, live = read_message(mail, 0)
    while live:
        full = full_range(C, tile.first + c * C.TOKENS, tile, sizes)
        some = tile.lo < tile.hi
        end = use + (tile.hi - tile.lo) * heads.group
        at = slot(nth, C.KV_STAGES)
        wait_full(rings.k, nth, C.KV_STAGES, pred=some)
        wait_full(rings.q, use, C.Q_STAGES, pred=some)
        k = held(C, c, rings.k.buffers, at, C.D0, C.D1, C.HELD_K)
        S = 0
        if not C.HALVED:
            S = issue_scores(C, c, Resident(k, 0, at, use, end), rings, use)
            S = warpgroup_mma_wait(0, deps=[S])
        wait_full(rings.v, nth, C.KV_STAGES, pred=some)
        v = held(C, c, rings.v.buffers, at, C.DV0, C.DV1, C.HELD)
        resident = Resident(k, v, at, use, end)
        dk = zeros(C.TOKENS, C.D0, C.D1)
        dv = zeros(C.TOKENS, C.DV0, C.DV1)
        drow = 0
        if C.DROW:
            none = gl.full([C.TOKENS, C.BLOCK_STREAMED], 0.0, gl.float32, score_layout(C))
            drow = sums_by_lane(none)
        state = State(use, S, dk, dv, drow)
        state = all_steps(
            C, c, state, resident, rings, tile, full, sizes, args, heads.group, out.dbias
        )
        use = state.use
        if C.DQ:
            last = gl.maximum(end - 1, 0)
            wait_done(C, rings, last, some)
            if some & (turn_of(C, last) == c):
                make_dq(C, resident, rings, last)
        release(rings.k, nth, C.KV_STAGES, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = peek_message(mail, message)
        if C.COMPLETE:
            if is_rounding(tile, sizes):
                round_sums(C, c, out, tile, sizes, heads)
            else:
                store_tile(C, c, out, state, tile, sizes, heads)
        else:
            store_tile(C, c, out, state, tile, sizes, heads)
        release_message(mail, message, following, live)
        tile = following
    if C.DBIAS:
        tma_store_wait(0)


@gluon.jit
def store_tile(C: gl.constexpr, c: gl.constexpr, out, state, tile, sizes, heads):
    """Store dK, dV and sums of dbias of the warpgroup's keys of a tile."""
    row = gradient_row(C, c, tile)
    rows = rows_left(C, c, tile)
    place = row.to(gl.int64) * heads.resident + tile.head
    to = out.dk + place * C.D_OUT
    stride = heads.resident * C.D_OUT
    store(C, state.dk.low * out.scale, to, stride, rows, C.D0, 0, C.D_OUT)
    if C.D_OUT > C.D0:
        store(C, state.dk.high * out.scale, to, stride, rows, C.D1, C.D0, C.D_OUT)
    if C.DROW:
        plane = (tile.b * heads.resident + tile.head).to(gl.int64)
        to = out.dbias + plane * sizes.nk + tile.first + c * C.TOKENS
        store_sums(state.drow, to, rows)
    to = out.dv + place * C.DV_OUT
    stride = heads.resident * C.DV_OUT
    store(C, state.dv.low, to, stride, rows, C.DV0, 0, C.DV_OUT)
    if C.DV_OUT > C.DV0:
        store(C, state.dv.high, to, stride, rows, C.DV1, C.DV0, C.DV_OUT)


# --- the writer of dQ --------------------------------------------------------------------------


@gluon.jit
def done_place(C: gl.constexpr, tile, done, tiles, heads):
    """Return a pointer to a tile's count of done steps, one of the ``tiles`` of a plane."""
    at = tile.first // C.BLOCK_RESIDENT
    if C.VARLEN:
        plane = tile.head
        at += tile.k_row // C.BLOCK_RESIDENT + tile.b
    else:
        plane = tile.b * heads.resident + tile.head
    return done + (plane * tiles + at)


@gluon.jit
def wait_for_neighbour(C: gl.constexpr, place, seen, ours, i):
    """Wait until the neighbour has done ``ours`` steps or more; return their number.

    Before a wait, publish that i steps of this tile are done, for the tile that follows it.
    """
    if seen < ours:
        seen = read_done(place + C.NEIGHBOUR)
        if seen < ours:
            publish(place, i, STORE)
            while seen < ours:
                seen = read_done(place + C.NEIGHBOUR)
    return seen


@gluon.jit
def add_parts(C: gl.constexpr, desc, plane, row, buffers, s):
    """Add both parts of dQ in buffer s to memory, one behind the other."""
    tma_add(desc.low, [plane, row, 0], buffers.low.index(s))
    if C.D1:
        tma_add(desc.high, [plane, row + 2 * C.D0, 0], buffers.high.index(s))


@gluon.jit
def add_dq(C: gl.constexpr, desc, ring, mail, done, tiles, sizes, heads, completion):
    """Add dQ of every step to memory, in one warp.

    ORDERED: the tiles of keys add to a tile of dQ in the order of ``backward_order.py``. Each
    publishes its number of done steps, and reads that of the tile that it follows: once for many
    steps where that tile is well ahead. A step is done once its sum is in memory. Publishing takes
    half as long as a step: it happens every few steps, and before a wait.
    """
    message = 0
    use = 0
    tile, live = read_message(mail, 0)
    while live:
        end = (tile.hi - tile.lo) * heads.group
        seen = 0
        if C.ORDERED:
            place = done_place(C, tile, done, tiles, heads)
            lo, hi = neighbour_range(C, tile, sizes)
        if C.COMPLETE:
            of_head, writes = begin_head(C, tile, completion, sizes, heads)
        for i in range(end):
            m, g = step_of(C, i, tile, heads.group)
            head = tile.head * heads.group + g
            plane, row = plane_of(C, tile.b, head, tile.q_row, heads.query)
            row = (row // C.ROW_TILE + m) * (2 * C.D)  # in units of 32 numbers (thread_order)
            if C.ORDERED:
                ours = steps_before(C, g, m, lo, hi, heads.group)
                seen = wait_for_neighbour(C, place, seen, ours, i)
            s = slot(use, C.DQ_STAGES)
            wait_full(ring, use, C.DQ_STAGES)
            if C.FRESH or C.COMPLETE:
                if C.ORDERED:
                    writes = ours == 0
                if writes:
                    tma_store(desc.low, [plane, row, 0], ring.buffers.low.index(s))
                    if C.D1:
                        tma_store(desc.high, [plane, row + 2 * C.D0, 0], ring.buffers.high.index(s))
                else:
                    add_parts(C, desc, plane, row, ring.buffers, s)
            else:
                add_parts(C, desc, plane, row, ring.buffers, s)
            tma_store_wait(0)
            release(ring, use, C.DQ_STAGES)
            if C.ORDERED:
                due = (i + 1) % C.EVERY == 0
                if due:
                    publish(place, i + 1, STORE)
            use += 1
        if C.ORDERED:
            publish(place, end, STORE)
        if C.COMPLETE:
            end_tile(of_head, writes, tile, sizes)
        message += 1
        tile, live = read_message(mail, message)


@gluon.jit
def writer(C: gl.constexpr, desc, ring, mail, done, tiles, sizes, heads, completion):
    """Add dQ to memory, if this kernel makes it."""
    if C.DQ:
        add_dq(C, desc, ring, mail, done, tiles, sizes, heads, completion)


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def all_rings(C: gl.constexpr, descs, dq):
    """Return (Rings, Mailbox).

    Unused barriers are not allocated: they would share memory with others. The barriers of Q are
    returned instead, since a function cannot return None (triton 3.6).
    """
    q = part_buffers(descs.q, C.Q_STAGES, C.D1)
    do = part_buffers(descs.do, C.DO_STAGES, C.DV1)
    rows = tile_buffers(descs.rows, C.Q_STAGES)
    k = part_buffers(descs.k, C.KEY_TILES * C.KV_STAGES, C.D1)
    v = part_buffers(descs.v, C.KEY_TILES * C.KV_STAGES, C.DV1)
    box: gl.constexpr = [C.BLOCK_STREAMED, C.BLOCK_RESIDENT // C.KEY_TILES]
    dtype: gl.constexpr = descs.q.low.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    ds = gl.allocate_shared_memory(dtype, [C.KEY_TILES * C.DS_STAGES] + box, layout)
    dqs = Parts(ds, ds)
    if C.DQ:
        dqs = part_buffers(dq, C.DQ_STAGES, C.D1)
    mail = mailbox(C.READERS)
    q_full = full_barriers(C.Q_STAGES, C.VARLEN)
    b_full = q_full
    biases = ds
    if C.BIAS_FLOAT32:
        biases = tile_buffers(descs.bias, C.WARPGROUPS * C.BIAS_STAGES)
        b_full = barriers(C.BIAS_STAGES, 1)
    elif C.BIAS:
        b_full = barriers(C.DS_STAGES, 1)
    do_full = full_barriers(C.DO_STAGES, C.VARLEN)
    done = barriers(C.Q_STAGES, C.WARPGROUPS)
    k_full = full_barriers(C.KV_STAGES, C.PADDED)
    v_full = full_barriers(C.KV_STAGES, C.PADDED)
    kv_empty = barriers(C.KV_STAGES, C.WARPGROUPS)
    of_dq = Ring(dqs, q_full, q_full)
    if C.DQ:
        of_dq = Ring(dqs, barriers(C.DQ_STAGES, 1), barriers(C.DQ_STAGES, 1))
    fence_async_shared()
    rings = Rings(
        q=Ring(q, q_full, done),
        rows=rows,
        do=Ring(do, do_full, done),
        k=Ring(k, k_full, kv_empty),
        v=Ring(v, v_full, kv_empty),
        ds=Ring(ds, b_full, done),
        bias=Ring(biases, b_full, done),
        dq=of_dq,
    )
    return rings, mail


@gluon.jit
def backward(  # noqa: PLR0913, PLR0917  (Triton takes no record of descriptors)
    q0, q1, do0, do1, rows, k0, k1, v0, v1, dq0, dq1, bias, dbias, t, n, C: gl.constexpr
):  # fmt: skip
    """Run the partitions of a block.

    The arguments are descriptors of copies (rows are lse and delta), of columns in two parts, then
    ``backward_args.Pointers`` and ``Numbers``.
    """
    descs = Descriptors(Parts(q0, q1), Parts(do0, do1), Parts(k0, k1), Parts(v0, v1), rows, bias)
    dq = Parts(dq0, dq1)
    rings, mail = all_rings(C, descs, dq)
    sizes = Sizes(n.nq, n.nk, n.left if C.LEFT else None, n.right if C.RIGHT else None, t.spans)
    order = Order(t.table, t.ends, t.counter, n.heads, n.heads, n.streamed)
    seqs = Sequences(t.cu_k, t.cu_q, n.batch, t.lengths)
    length = n.nq if C.COLUMN else n.nk
    line = LineBias(t.bias, n.each_b, n.each_h, n.each_h * (n.hq - 1) + 1, length)
    args = ScoreArgs(n.inner, n.scale, t.alibi, n.shift, t.q_ids, t.k_ids, n.ids_q, n.ids_k, line)
    heads = Heads(n.heads, n.group, n.ratio, n.hq, n.each_b, n.each_h)
    completion = Completion(t.done, t.sums, t.dq, n.rows, n.zeroed)
    out = Outputs(t.out, t.dv, t.dbias if C.DROW else dbias, n.out_scale, completion)
    follow()
    tiles = (n.nk + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
    if C.ORDERED and C.VARLEN:
        tiles = gl.load(t.cu_k + n.batch) // C.BLOCK_RESIDENT + n.batch
    few: gl.constexpr = C.PRODUCER_REGISTERS
    many: gl.constexpr = C.CONSUMER_REGISTERS
    if C.WARPGROUPS == 4:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 1, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 2, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 3, rings, mail, sizes, args, heads, out)),
                (producer, (C, descs, rings, mail, order, sizes, seqs, heads)),
                (writer, (C, dq, rings.dq, mail, t.done, tiles, sizes, heads, completion)),
            ],
            [4, 4, 4, 1, 1],
            [many, many, many, few, few],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 1, rings, mail, sizes, args, heads, out)),
                (producer, (C, descs, rings, mail, order, sizes, seqs, heads)),
                (writer, (C, dq, rings.dq, mail, t.done, tiles, sizes, heads, completion)),
            ],
            [4, 1, 1],
            [many, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 1, rings, mail, sizes, args, heads, out)),
                (consumer, (C, 2, rings, mail, sizes, args, heads, out)),
                (producer, (C, descs, rings, mail, order, sizes, seqs, heads)),
                (writer, (C, dq, rings.dq, mail, t.done, tiles, sizes, heads, completion)),
            ],
            [4, 4, 1, 1],
            [many, many, few, few],
        )
