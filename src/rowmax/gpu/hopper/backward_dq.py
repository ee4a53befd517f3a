"""dq of wide heads: queries and dO are resident, keys and values streamed.

The sums of two gradients of 256 columns do not fit in registers with the scores, and float32 sums
of dQ exceed the bandwidth of memory. So heads of 256 have a launch for dQ, and one for dK and dV
(``backward_dkdv.py``); each keeps its sums in registers. That is seven products where the fused
kernel has five. Nothing is added to memory, so every run returns the same.

A step computes S, dP and dS of a streamed tile, then ``dQ += dS K``. The two warpgroups, of 64
queries each, share only the streamed buffers: while one computes exponentials, the other uses the
tensor core. Barriers of a block, with the arrivals that complete a phase:

    barrier        arrivals                            waited for by
    own.full       producer's expect + bytes of Q, dO  consumers, before a tile's first S
    own.empty      each consumer, after a tile's last  producer, before it loads another
    k.full[s]      producer's expect + bytes of K      consumers, before S of the use
    k.empty[s]     each consumer, dQ of the use is     producer, before it fills s again
                   finished
    v.full[s]      producer's expect + bytes of V      consumers, before dP of the use
    v.empty[s]     each consumer, dP is finished       producer, before it fills s again
    mail           as in ``backward_fused.py``         consumers; producer
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import (
    Descriptors,
    follow,
    issue_product,
    kept_of_queries,
    masked_steps,
    no_scores,
    own_rows,
    produce,
    resident_numbers,
    score_layout,
    store_parts,
    weights,
)
from .backward_order import full_range, gradient_row, rows_left
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    tma_load,
    warpgroup_mma_wait,
)
from .lib.parts import (
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
from .lib.softmax import rounded


class Rings(NamedTuple):
    """The rings of a block. Rings filled by one barrier share it."""

    own: Any  # Q's buffer; dO's, ``do``, has the same barriers
    do: Any
    k: Any
    v: Any


class Rows(NamedTuple):
    """The numbers of the warpgroup's 64 queries, and the end of the uses of their tile."""

    lse: Any
    delta: Any
    bias: Any
    dbias: Any
    end: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    dq: Any  # Parts of [64, D]


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_step(C: gl.constexpr, descs, rings, tile, i, use, nth, cut, n):
    """Load K and V of step i of the nth tile, whose first use is ``use``.

    Return the number of tiles so far that end after their sequence; ``cut`` were before this step.
    """
    part = 0 if C.VARLEN else tile.b
    use = use + i
    first = (tile.lo + i) * C.BLOCK_STREAMED
    rest = tile.used - first
    short = rest < C.BLOCK_STREAMED
    s = slot(use, C.K_STAGES)
    bar = landing(rings.k.full, s, C.K_STAGES, C.PADDED, short)
    wait_empty(rings.k, use, C.K_STAGES)
    row = tile.k_row + first
    head = tile.head // n.ratio
    mbarrier.expect(bar, descs.k.block_type.nbytes)
    k = rings.k.buffers.index(s)
    tma_load(descs.k, [part, row, head, 0], bar, k)
    if C.PADDED:  # before the wait for a buffer of V
        cleared(rings.k.full, s, C.K_STAGES, k, C.BLOCK_STREAMED, C.BUFFER_D, rest, cut)
    u = slot(use, C.V_STAGES)
    bar = landing(rings.v.full, u, C.V_STAGES, C.PADDED, short)
    wait_empty(rings.v, use, C.V_STAGES)
    mbarrier.expect(bar, descs.v.block_type.nbytes)
    v = rings.v.buffers.index(u)
    tma_load(descs.v, [part, row, head, 0], bar, v)
    if C.PADDED:
        cleared(rings.v.full, u, C.V_STAGES, v, C.BLOCK_STREAMED, C.DV, rest, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_resident(C: gl.constexpr, descs, rings, tile, head, use, nth, cut):
    """Load Q and dO of the nth tile that has steps."""
    part = 0 if C.VARLEN else tile.b
    row = tile.q_row + tile.first
    bar = rings.own.full.index(0)
    wait_empty(rings.own, nth, 1)
    mbarrier.expect(bar, descs.q.block_type.nbytes + descs.do.block_type.nbytes)
    tma_load(descs.do, [part, row, head, 0], bar, rings.do.index(0))
    tma_load(descs.q, [part, row, head, 0], bar, rings.own.buffers.index(0))
    return cut


@gluon.jit
def producer(C: gl.constexpr, descs, rings, mail, t, n):
    """Load all tiles of this block into shared memory, in one warp."""
    kv_heads = n.heads // n.ratio
    produce(C, load_resident, load_step, C.K_STAGES, descs, rings, mail, 1, kv_heads, t, n)


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def bias_rows(C: gl.constexpr, c: gl.constexpr, tile, stride_b, stride_h, stride_q):
    """Return the starts of the bias rows of the warpgroup's queries ``[64]``.

    Queries past the last have the last row. Strides are in units of 8.
    """
    L: gl.constexpr = gl.SliceLayout(1, score_layout(C))
    r = tile.first + c * C.TOKENS + gl.arange(0, C.TOKENS, L)
    r = gl.minimum(r, tile.nq - 1).to(gl.int64)
    plane = tile.b.to(gl.int64) * stride_b + tile.head.to(gl.int64) * stride_h
    return 8 * (plane + r * stride_q)


@gluon.jit
def bias_tile(C: gl.constexpr, m, bias, rows, tile):
    """Return (places, mask) of the pairs of a streamed tile in a bias.

    The number of keys is a multiple of 8. The kernel reads the bias and writes its gradient in
    global memory: shared memory has no room for a tile.
    """
    col = gl.arange(0, C.BLOCK_STREAMED, gl.SliceLayout(0, score_layout(C)))
    end = (tile.nq + tile.offset) // 8 * 8 - m * C.BLOCK_STREAMED
    return bias + (rows[:, None] + (m * C.BLOCK_STREAMED + col)[None, :]), (col < end)[None, :]


@gluon.jit
def load_rows(C: gl.constexpr, c: gl.constexpr, tile, end, t, n):
    """Return the Rows of the warpgroup."""
    lse, delta = resident_numbers(C, c, tile, t, n)
    bias = 0
    dbias = 0
    if C.BIAS:
        bias = bias_rows(C, c, tile, n.bias_b, n.bias_h, n.bias_q)
        if C.DBIAS:  # dbias is contiguous
            keys = (tile.nq + tile.offset) // 8
            each = tile.nq.to(gl.int64) * keys
            dbias = bias_rows(C, c, tile, n.hq * each, each, keys)
    return Rows(lse, delta, bias, dbias, end)


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, own, rings, tile, t, n
):  # fmt: skip
    """Return the State after streamed tile m. ``own`` are the Rows of the queries."""
    use = state.use
    dtype: gl.constexpr = rings.do.dtype
    s = slot(use, C.K_STAGES)
    u = slot(use, C.V_STAGES)
    # use >> 30 is 0, which the compiler cannot derive
    q = columns_of(own_rows(C, c, rings.own.buffers, use >> 30, C.BUFFER_D), C.D0, C.D1)
    k = columns_of(tile_at(rings.k.buffers, s, C.BLOCK_STREAMED, C.BUFFER_D), C.D0, C.D1)
    S = issue_over_columns(q, k, no_scores(C), C.D1)
    wait_full(rings.v, use, C.V_STAGES)
    do = own_rows(C, c, rings.do, use >> 30, C.DV)
    v = tile_at(rings.v.buffers, u, C.BLOCK_STREAMED, C.DV)
    dp = issue_product(C, do, v)
    bias = 0
    if C.BIAS:
        at, there = bias_tile(C, m, t.bias, own.bias, tile)
        if MASKED:
            bias = gl.load(at, mask=there, other=0.0)
        else:
            bias = gl.load(at)
    S = warpgroup_mma_wait(1, deps=[S])
    lse = own.lse[:, None]
    p, w = weights(C, MASKED, c, S, lse, bias, m, head, tile, t, n, dtype)
    after = use + 1
    # begins a basic block, so that the exponentials overlap with the product
    wait_full(rings.k, after, C.K_STAGES, pred=after < own.end)
    dp = warpgroup_mma_wait(0, deps=[dp])
    release(rings.v, use, C.V_STAGES)
    dp = kept_of_queries(C, dp, tile.first + c * C.TOKENS, m, head, tile.b, t, n)
    ds = rounded(score_gradient(w, dp, own.delta[:, None]), dtype)
    if C.DBIAS:
        at, there = bias_tile(C, m, t.dbias, own.dbias, tile)
        r = gl.arange(0, C.TOKENS, gl.SliceLayout(1, score_layout(C)))
        ok = (r < tile.nq - tile.first - c * C.TOKENS)[:, None]
        if MASKED:
            ok = ok & there
        gl.store(at, ds, mask=ok)
    dq = wait_parts(0, issue_with_columns(ds, k, state.dq, C.D0, C.D1), C.D1)
    release(rings.k, use, C.K_STAGES)
    return State(after, dq)


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, rings, mail, t, n):
    """Compute dQ of queries ``64 c`` to ``64 c + 63`` of every tile of this block."""
    message = 0
    use = 0
    nth = 0
    tile, live = take_message(mail, 0)
    while live:
        full = full_range(C, tile.first + c * C.TOKENS, tile, t, n)
        some = tile.lo < tile.hi
        end = use + (tile.hi - tile.lo) * n.group
        wait_full(rings.own, nth, 1, pred=some)
        wait_full(rings.k, use, C.K_STAGES, pred=some)
        own = load_rows(C, c, tile, end, t, n)
        x = State(use, zeros(C.TOKENS, C.D0, C.D1))
        x = masked_steps(C, step, c, x, own, rings, tile, full, t, n)
        use = x.use
        release(rings.own, nth, 1, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = read_message(mail, message)
        row = gradient_row(C, c, tile)
        to = t.out + (row.to(gl.int64) * n.heads + tile.head) * C.D_OUT
        dq = scaled_parts(x.dq, n.out_scale, C.D1)
        store_parts(dq, to, n.heads * C.D_OUT, rows_left(C, c, tile), C.D0, C.D_OUT)
        release_message(mail, message, following, live)
        tile = following


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def backward_dq(q, do, k, v, t, n, C: gl.constexpr):
    """Run the partitions of a block.

    The arguments are descriptors of copies, ``backward_args.Pointers`` and ``Numbers``.
    """
    descs = Descriptors(q, do, k, v)
    qs = tile_buffers(q, 1)
    dos = tile_buffers(do, 1)
    ks = tile_buffers(k, C.K_STAGES)
    vs = tile_buffers(v, C.V_STAGES)
    mail = mailbox(C.WARPGROUPS)
    own = Ring(qs, barriers(1, 1), barriers(1, C.WARPGROUPS))
    k_full = full_barriers(C.K_STAGES, C.PADDED)
    k_ring = Ring(ks, k_full, barriers(C.K_STAGES, C.WARPGROUPS))
    v_full = full_barriers(C.V_STAGES, C.PADDED)
    v_ring = Ring(vs, v_full, barriers(C.V_STAGES, C.WARPGROUPS))
    fence_async_shared()
    rings = Rings(own, dos, k_ring, v_ring)
    follow()
    gl.warp_specialize(
        [
            (consumer, (C, 0, rings, mail, t, n)),
            (consumer, (C, 1, rings, mail, t, n)),
            (producer, (C, descs, rings, mail, t, n)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )
