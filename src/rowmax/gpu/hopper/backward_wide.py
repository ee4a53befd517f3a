"""dq, dk or dv of heads wider than 256: a launch for each; both warpgroups have the same rows.

The sum of one gradient of 64 rows and 512 columns takes the registers of two warpgroups: each has
half of the columns. Both compute the scores of all rows, so that neither waits for the other; they
share only buffers. That is eight products where five would do, and thirteen as they are issued.

    gradient   resident, 64 rows   streamed, 32 rows   sum
    dq         Q, dO               K, V                dQ += dS K
    dk         K, V                Q, dO               dK += dS^T Q
    dv         K                   Q, dO               dV += P^T dO

A step computes S of the first streamed tile, dP of the second, and the product with its half of the
columns. While one warpgroup computes exponentials, the other uses the tensor core. Barriers of a
block, with the arrivals that complete a phase:

    barrier          arrivals                              waited for by
    own.full         producer's expect + bytes             consumers, before a tile's first S
    own.empty        each consumer, after a tile's last    producer, before it loads another
    first.full[s]    producer's expect + bytes (and rows)  consumers, before S of the use
    first.empty[s]   each consumer, the product is done    producer, before it fills s again
    second.full[s]   producer's expect + bytes             consumers, before dP, or P^T dO
    second.empty[s]  each consumer, that is done           producer, before it fills s again
    mail             as in ``backward_fused.py``           consumers; producer
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import (
    Heads,
    LineBias,
    ScoreArgs,
    first_tile,
    follow,
    issue_product,
    next_tile,
    own_rows,
    peek_message,
    read_message,
    release_message,
    resident_numbers,
    row_numbers,
    store_rows,
    tile_buffer,
    weights,
)
from .backward_order import (
    Sequences,
    Sizes,
    full_range,
    gradient_row,
    plane_of,
    rows_left,
)
from .gluon_compat import fence_async_shared, mbarrier, tma_load, warpgroup_mma_wait
from .lib.order import Order
from .lib.parts import Parts, issue_with_columns, wait_parts, zeros
from .lib.ring import (
    Ring,
    barriers,
    cleared,
    full_barriers,
    landing,
    mailbox,
    release,
    slot,
    tile_buffers,
    wait_empty,
    wait_full,
)
from .lib.rules import score_gradient
from .lib.softmax import rounded


class Copies(NamedTuple):
    """The descriptors of copies; rows are lse and delta of streamed queries."""

    own: Any
    other: Any  # the second resident tensor
    first: Any
    second: Any
    rows: Any


class Rings(NamedTuple):
    """The rings of a block."""

    own: Any
    other: Any  # buffers with the barriers of ``own``
    first: Any
    second: Any
    rows: Any  # buffers of lse and delta, filled with ``first``


class Own(NamedTuple):
    """The numbers of resident queries ``[64]``, and the end of the uses of their tile."""

    lse: Any
    delta: Any
    end: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    x: Any  # the warpgroup's half of the sum [64, HALF]


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_step(C: gl.constexpr, copies, rings, tile, heads, i, use, cut):
    """Load both streamed tensors of step i of a tile, and lse and delta of queries.

    Return the number of tiles so far that end after their sequence; ``cut`` were before this step.
    """
    steps = tile.hi - tile.lo
    g = i // steps
    begin = (tile.lo + i - g * steps) * C.BLOCK_STREAMED
    part = 0 if C.VARLEN else tile.b
    if C.QUERIES_RESIDENT:
        row, head, rest = tile.k_row + begin, tile.head // heads.ratio, tile.used - begin
    else:
        row, head, rest = tile.q_row + begin, tile.head * heads.group + g, tile.nq - begin
    short = rest < C.BLOCK_STREAMED
    s = slot(use, C.FIRST_STAGES)
    bar = landing(rings.first.full, s, C.FIRST_STAGES, C.VARLEN, short)
    wait_empty(rings.first, use, C.FIRST_STAGES)
    if C.QUERIES_RESIDENT:
        mbarrier.expect(bar, copies.first.block_type.nbytes)
    else:
        mbarrier.expect(bar, copies.first.block_type.nbytes + copies.rows.block_type.nbytes)
        plane, at = plane_of(C, tile.b, head, tile.q_row, heads.query)
        tma_load(copies.rows, [plane, 0, at + begin], bar, rings.rows.index(s))
    first = rings.first.buffers.index(s)
    tma_load(copies.first, [part, row, head, 0], bar, first)
    if C.VARLEN:  # before the wait for a buffer of the second
        cleared(rings.first.full, s, C.FIRST_STAGES, first, C.BLOCK_STREAMED, C.D, rest, cut)
    u = slot(use, C.SECOND_STAGES)
    bar = landing(rings.second.full, u, C.SECOND_STAGES, C.VARLEN, short)
    wait_empty(rings.second, use, C.SECOND_STAGES)
    mbarrier.expect(bar, copies.second.block_type.nbytes)
    second = rings.second.buffers.index(u)
    tma_load(copies.second, [part, row, head, 0], bar, second)
    if C.VARLEN:
        cleared(rings.second.full, u, C.SECOND_STAGES, second, C.BLOCK_STREAMED, C.DV, rest, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_resident(C: gl.constexpr, copies, rings, tile, nth):
    """Load the resident tensors of the nth tile that has steps."""
    part = 0 if C.VARLEN else tile.b
    row = tile.q_row if C.QUERIES_RESIDENT else tile.k_row
    corner = [part, row + tile.first, tile.head, 0]
    bar = rings.own.full.index(0)
    wait_empty(rings.own, nth, 1)
    if C.SCORES_ALONE:
        mbarrier.expect(bar, copies.own.block_type.nbytes)
    else:
        mbarrier.expect(bar, copies.own.block_type.nbytes + copies.other.block_type.nbytes)
        tma_load(copies.other, corner, bar, rings.other.index(0))
    tma_load(copies.own, corner, bar, rings.own.buffers.index(0))


@gluon.jit
def producer(C: gl.constexpr, copies, rings, mail, order, sizes, seqs, heads):
    """Load all tiles of this block into shared memory, in one warp."""
    message = 0
    use = 0
    nth = 0
    cut = 0
    n, end, tile = first_tile(C, mail, order, sizes, seqs)
    while n < end:
        if tile.lo < tile.hi:
            load_resident(C, copies, rings, tile, nth)
            nth += 1
            cut = load_step(C, copies, rings, tile, heads, 0, use, cut)
        n, following = next_tile(C, n, end, message + 1, mail, order, sizes, seqs)
        steps = (tile.hi - tile.lo) * heads.group
        for i in range(1, steps):
            cut = load_step(C, copies, rings, tile, heads, i, use + i, cut)
        use += steps
        message += 1
        tile = following


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def numbers(C: gl.constexpr, own, rings, s):
    """Return (lse, delta) of the queries, as they lie in scores: ``[64, 1]`` or across."""
    if C.QUERIES_RESIDENT:
        lse, delta = own.lse[:, None], own.delta[:, None]
    else:
        lse = row_numbers(C, rings.rows, s, 0)[None, :]
        delta = row_numbers(C, rings.rows, s, 1)[None, :]
    return lse, delta


@gluon.jit
def issue_half(C: gl.constexpr, c: gl.constexpr, p, buffers, s, x):
    """Issue ``x + p b``, b being the warpgroup's half of the columns of buffer s."""
    b = tile_buffer(buffers, s, C.BLOCK_STREAMED, C.WIDTH).slice(c * C.HALF, C.HALF, dim=1)
    return issue_with_columns(p, Parts(b, b), x, C.HALF, 0)


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, t, head, state, own, rings, tile,
    sizes, args,
):  # fmt: skip
    """Return the State after streamed tile t; ``head`` is the query head."""
    use = state.use
    after = use + 1
    dtype: gl.constexpr = rings.first.buffers.dtype
    s = slot(use, C.FIRST_STAGES)
    u = slot(use, C.SECOND_STAGES)
    # use >> 30 is 0, which the compiler cannot derive
    a = own_rows(C, 0, rings.own.buffers, use >> 30, C.D)
    S = issue_product(C, a, tile_buffer(rings.first.buffers, s, C.BLOCK_STREAMED, C.D))
    lse, delta = numbers(C, own, rings, s)
    if C.SCORES_ALONE:
        S = warpgroup_mma_wait(0, deps=[S])
        p, w = weights(C, MASKED, 0, S, lse, 0, t, head, tile, sizes, args, dtype)
        wait_full(rings.second, use, C.SECOND_STAGES)
        x = issue_half(C, c, rounded(p, dtype), rings.second.buffers, u, state.x)
        wait_full(rings.first, after, C.FIRST_STAGES, pred=after < own.end)
        x = wait_parts(0, x, 0)
    else:
        wait_full(rings.second, use, C.SECOND_STAGES)
        b = own_rows(C, 0, rings.other, use >> 30, C.DV)
        dp = issue_product(C, b, tile_buffer(rings.second.buffers, u, C.BLOCK_STREAMED, C.DV))
        S = warpgroup_mma_wait(1, deps=[S])
        p, w = weights(C, MASKED, 0, S, lse, 0, t, head, tile, sizes, args, dtype)
        # begins a basic block, so that the exponentials overlap with the product
        wait_full(rings.first, after, C.FIRST_STAGES, pred=after < own.end)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = rounded(score_gradient(w, dp, delta), dtype)
        x = wait_parts(0, issue_half(C, c, ds, rings.first.buffers, s, state.x), 0)
    release(rings.second, use, C.SECOND_STAGES)
    release(rings.first, use, C.FIRST_STAGES)
    return State(after, x)


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, t, n, rings, mail, sizes, args, heads):
    """Compute half c of the columns of every tile of this block."""
    message = 0
    use = 0
    nth = 0
    tile, live = read_message(mail, 0)
    while live:
        full = full_range(C, tile.first, tile, sizes)
        some = tile.lo < tile.hi
        end = use + (tile.hi - tile.lo) * heads.group
        wait_full(rings.own, nth, 1, pred=some)
        wait_full(rings.first, use, C.FIRST_STAGES, pred=some)
        own = Own(0, 0, end)
        if C.QUERIES_RESIDENT:
            lse, delta = resident_numbers(C, 0, t.rows, n.rows, tile, heads)
            own = Own(lse, delta, end)
        x = State(use, zeros(C.TOKENS, C.HALF, 0))
        for g in range(heads.group):
            head = tile.head * heads.group + g
            if C.LOW_MASKED:
                for i in range(tile.lo, full.begin):
                    x = step(C, True, c, i, head, x, own, rings, tile, sizes, args)
            for i in range(full.begin, full.end):
                x = step(C, False, c, i, head, x, own, rings, tile, sizes, args)
            if C.HIGH_MASKED:
                for i in range(full.end, tile.hi):
                    x = step(C, True, c, i, head, x, own, rings, tile, sizes, args)
        use = x.use
        release(rings.own, nth, 1, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = peek_message(mail, message)
        store_half(C, c, x.x.low, t.out, n.out_scale, tile, heads)
        release_message(mail, message, following, live)
        tile = following


@gluon.jit
def store_half(C: gl.constexpr, c: gl.constexpr, x, out, scale, tile, heads):
    """Store the columns of the gradient that the warpgroup has."""
    if not C.SCORES_ALONE:
        x = x * scale
    OUT: gl.constexpr = min(C.OUT - c * C.HALF, C.HALF)
    if OUT > 0:
        row = gradient_row(C, 0, tile)
        to = out + (row.to(gl.int64) * heads.resident + tile.head) * C.OUT + c * C.HALF
        store_rows(x, to, heads.resident * C.OUT, rows_left(C, 0, tile), OUT)


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def backward_wide(own, other, first, second, rows, t, n, C: gl.constexpr):
    """Run the partitions of a block.

    The arguments are descriptors of copies, ``backward_args.Pointers`` and ``Numbers``.
    """
    copies = Copies(own, other, first, second, rows)
    owns = tile_buffers(own, 1)
    others = owns
    if not C.SCORES_ALONE:
        others = tile_buffers(other, 1)
    firsts = tile_buffers(first, C.FIRST_STAGES)
    seconds = tile_buffers(second, C.SECOND_STAGES)
    stats = firsts
    if not C.QUERIES_RESIDENT:
        stats = tile_buffers(rows, C.FIRST_STAGES)
    mail = mailbox(C.WARPGROUPS)
    of_own = Ring(owns, barriers(1, 1), barriers(1, C.WARPGROUPS))
    first_full = full_barriers(C.FIRST_STAGES, C.VARLEN)
    of_first = Ring(firsts, first_full, barriers(C.FIRST_STAGES, C.WARPGROUPS))
    second_full = full_barriers(C.SECOND_STAGES, C.VARLEN)
    of_second = Ring(seconds, second_full, barriers(C.SECOND_STAGES, C.WARPGROUPS))
    fence_async_shared()
    rings = Rings(of_own, others, of_first, of_second, stats)
    sizes = Sizes(n.nq, n.nk, n.left if C.LEFT else None, n.right if C.RIGHT else None, t.spans)
    kv_heads = n.heads // n.ratio if C.QUERIES_RESIDENT else n.heads
    order = Order(t.table, t.ends, t.counter, n.heads, kv_heads, n.streamed)
    if C.QUERIES_RESIDENT:
        seqs = Sequences(t.cu_q, t.cu_k, n.batch, t.lengths)
    else:
        seqs = Sequences(t.cu_k, t.cu_q, n.batch, t.lengths)
    line = LineBias(t.bias, n.each_b, n.each_h, 0, 0)
    args = ScoreArgs(n.inner, n.scale, t.alibi, n.shift, t.q_ids, t.k_ids, n.ids_q, n.ids_k, line)
    heads = Heads(n.heads, n.group, n.ratio, n.hq, n.each_b, n.each_h)
    follow()
    gl.warp_specialize(
        [
            (consumer, (C, 0, t, n, rings, mail, sizes, args, heads)),
            (consumer, (C, 1, t, n, rings, mail, sizes, args, heads)),
            (producer, (C, copies, rings, mail, order, sizes, seqs, heads)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )
