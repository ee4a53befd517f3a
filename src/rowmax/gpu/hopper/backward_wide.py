"""dq, dk or dv of heads wider than 256: a launch for each; both warpgroups have the same rows.

The sum of one gradient of 64 rows and 512 columns takes the registers of two warpgroups: each has
half of the columns. Each also makes one of the products of scores, for both:

    gradient   resident, 64 rows   streamed, 32 rows   sum
    dq         Q, dO               K, V                dQ += dS K
    dk         K, V                Q, dO               dK += dS^T Q
    dv         K                   Q, dO               dV += P^T dO

    warpgroup      products     then
    of weights     S            w (``weights``) to the other; of dv: P for both
    of gradients   dP           dS = w (dP - delta) for both; of dv: nothing

w passes through shared memory as float32: it is no operand of a product, and rounding it would
double the rounding error of dS. It is ordered by thread: loads and stores of 16 bytes have no bank
conflict. The operand of the sum, dS or P, passes as it is: the warpgroup that made it has it in
registers, the other multiplies from shared memory (``operand``).

S of the next tile is issued after the product with dS, whose buffer is then free early; for dv it
is issued first and runs under the exponentials. HELD columns of the first resident tensor are only
in registers, since all of it would not fit: they arrive in a buffer of the first streamed one. The
second streamed tensor comes in halves of the columns: one loads while the other is in use.

Barriers of a block, with the arrivals that complete a phase:

    barrier          arrivals                              waited for by
    own.full         producer's expect + bytes             consumers, before a tile's first product
    own.empty        each consumer, after a tile's last    producer, before it loads another
    first.full[s]    producer's expect + bytes (and rows)  consumers, before a product with it
    first.empty[s]   each consumer that reads it           producer, before it fills s again
    second.full[h]   producer's expect + bytes of a half   consumers, before a product with it
    second.empty[h]  the consumer that reads the half      producer, before it fills h again
    w.full           weights, w is stored                  gradients, before dS of the use
    operand.full[s]  the warpgroup that stored it          the other, before its product
    operand.empty[s] the other, its product is done        the one that stores, before the next
    mail             as in ``backward_fused.py``           consumers; producer

No barrier signals that w has been read: dS of the use, for which the warpgroup of weights waits,
comes after it. The ring of the first streamed tensor has one more use for each tile that has steps,
before its steps: the columns in registers have arrived at first.full, and are there at first.empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import (
    follow,
    held_layout,
    no_scores,
    produce,
    resident_numbers,
    row_numbers,
    score_layout,
    store_rows,
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
from .lib.parts import Parts, issue_with_columns, zeros
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
from .lib.scores import settled
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

    own: Any  # the columns of the first resident tensor that are not held, HELD to a buffer
    other: Any  # buffers with the barriers of ``own``
    first: Any
    second: Any  # halves of the columns
    rows: Any  # buffers of lse and delta, filled with ``first``
    w: Any  # it has no empty barriers
    operand: Any  # dS or P


class Own(NamedTuple):
    """The operands that a warpgroup keeps for a resident tile, and the uses of its steps."""

    held: Any  # the first HELD columns as a left operand [64, HELD]
    lse: Any  # numbers of resident queries [64]
    delta: Any
    shift: Any  # uses of the first ring so far that were no steps
    end: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    x: Any  # the warpgroup's half of the sum [64, HALF]
    product: Any  # S or dP of the next step


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_step(C: gl.constexpr, copies, rings, tile, i, use, nth, cut, n):
    """Load both streamed tensors of step i of the nth tile, and lse and delta of queries.

    ``use`` is the tile's first; the first ring has ``nth`` more. Return the number of tiles so far
    that end after their sequence; ``cut`` were before this step.
    """
    use = use + i
    steps = tile.hi - tile.lo
    g = i // steps
    begin = (tile.lo + i - g * steps) * C.BLOCK_STREAMED
    part = 0 if C.VARLEN else tile.b
    if C.QUERIES_RESIDENT:
        row, head, rest = tile.k_row + begin, tile.head // n.ratio, tile.used - begin
    else:
        row, head, rest = tile.q_row + begin, tile.head * n.group + g, tile.nq - begin
    short = rest < C.BLOCK_STREAMED
    first_use = use + nth
    s = slot(first_use, C.FIRST_STAGES)
    bar = landing(rings.first.full, s, C.FIRST_STAGES, C.VARLEN, short)
    wait_empty(rings.first, first_use, C.FIRST_STAGES)
    if C.QUERIES_RESIDENT:
        mbarrier.expect(bar, copies.first.block_type.nbytes)
    else:
        mbarrier.expect(bar, copies.first.block_type.nbytes + copies.rows.block_type.nbytes)
        plane, at = plane_of(C, tile.b, head, tile.q_row, n.hq)
        tma_load(copies.rows, [plane, 0, at + begin], bar, rings.rows.index(s))
    first = rings.first.buffers.index(s)
    tma_load(copies.first, [part, row, head, 0], bar, first)
    if C.VARLEN:  # before the wait for a buffer of the second
        cleared(rings.first.full, s, C.FIRST_STAGES, first, C.BLOCK_STREAMED, C.D, rest, cut)
    for h in gl.static_range(2):
        u = slot(2 * use + h, C.SECOND_STAGES)
        bar = landing(rings.second.full, u, C.SECOND_STAGES, C.VARLEN, short)
        wait_empty(rings.second, 2 * use + h, C.SECOND_STAGES)
        mbarrier.expect(bar, copies.second.block_type.nbytes)
        second = rings.second.buffers.index(u)
        tma_load(copies.second, [part, row, head, h * C.HALF_V], bar, second)
        if C.VARLEN:
            cleared(
                rings.second.full, u, C.SECOND_STAGES, second, C.BLOCK_STREAMED, C.HALF_V, rest,
                2 * cut + h,
            )  # fmt: skip
    if C.VARLEN:
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def load_resident(C: gl.constexpr, copies, rings, tile, head, use, nth, cut):
    """Load the resident tensors of the nth tile that has steps.

    The columns that are held arrive as use ``use`` of the first ring.
    """
    part = 0 if C.VARLEN else tile.b
    row = (tile.q_row if C.QUERIES_RESIDENT else tile.k_row) + tile.first
    each: gl.constexpr = copies.own.block_type.nbytes
    rest: gl.constexpr = C.D // C.HELD - 1
    s = slot(use, C.FIRST_STAGES)
    wait_empty(rings.first, use, C.FIRST_STAGES)
    bar = rings.first.full.index(s)
    mbarrier.expect(bar, each)
    tma_load(copies.own, [part, row, head, 0], bar, held_buffer(C, copies, rings, s))
    bar = rings.own.full.index(0)
    wait_empty(rings.own, nth, 1)
    if C.SCORES_ALONE:
        mbarrier.expect(bar, rest * each)
    else:
        mbarrier.expect(bar, rest * each + copies.other.block_type.nbytes)
        tma_load(copies.other, [part, row, head, 0], bar, rings.other.index(0))
    for i in gl.static_range(rest):
        corner = [part, row, head, (i + 1) * C.HELD]
        tma_load(copies.own, corner, bar, rings.own.buffers.index(i))
    return cut


@gluon.jit
def held_buffer(C: gl.constexpr, copies, rings, s):
    """Return the part of buffer s of the first ring where the held columns arrive."""
    buffers = rings.first.buffers
    shape: gl.constexpr = [C.PLACES] + copies.own.block_type.shape
    return reinterpret(buffers.index(s), buffers.dtype, shape, copies.own.layout).index(0)


@gluon.jit
def producer(C: gl.constexpr, copies, rings, mail, kv_heads, t, n):
    """Load all tiles of this block into shared memory, in one warp."""
    produce(
        C, load_resident, load_step, C.FIRST_STAGES, copies, rings, mail, n.group, kv_heads, t, n
    )


# --- the operand of the sum --------------------------------------------------------------------


@gluon.jit
def issue_sum(C: gl.constexpr, c: gl.constexpr, a, rings, use, shift, x):
    """Issue ``x + a b``, b being half c of the columns of the streamed tile of a step.

    The left operand is in registers of the warpgroup that made it, or in shared memory.
    """
    if C.SCORES_ALONE:
        u = slot(2 * use + c, C.SECOND_STAGES)
        b = tile_at(rings.second.buffers, u, C.BLOCK_STREAMED, C.HALF)
    else:
        s = slot(use + shift, C.FIRST_STAGES)
        b = tile_at(rings.first.buffers, s, C.BLOCK_STREAMED, C.WIDTH)
        b = b.slice(c * C.HALF, C.HALF, dim=1)
    if c == (0 if C.SCORES_ALONE else 1):
        low = issue_with_columns(a, Parts(b, b), Parts(x, 0), C.HALF, 0).low
    else:
        low = warpgroup_mma(a, b, x, is_async=True)
    return low


@gluon.jit
def pass_operand(C: gl.constexpr, x, rings, use):
    """Store dS or P of a step for the other warpgroup."""
    wait_empty(rings.operand, use, C.OPERAND_STAGES)
    s = slot(use, C.OPERAND_STAGES)
    rings.operand.buffers.index(s).store(x)
    fence_async_shared()
    mbarrier.arrive(rings.operand.full.index(s), count=1)


@gluon.jit
def passed_operand(C: gl.constexpr, rings, use):
    """Return the buffer of dS or P of a step, when the other warpgroup has stored it."""
    wait_full(rings.operand, use, C.OPERAND_STAGES)
    return rings.operand.buffers.index(slot(use, C.OPERAND_STAGES))


# --- the warpgroup of weights ------------------------------------------------------------------


@gluon.jit
def held_columns(C: gl.constexpr, rings, use, some):
    """Return the first HELD columns of the first resident tensor, a left operand in registers."""
    wait_full(rings.first, use, C.FIRST_STAGES, pred=some)
    buffers = rings.first.buffers
    layout: gl.constexpr = matrix(C.TOKENS, C.HELD, buffers.dtype)
    s = slot(use, C.FIRST_STAGES)
    both = reinterpret(buffers.index(s), buffers.dtype, [C.PLACES, C.TOKENS, C.HELD], layout)
    x = settled(both.index(0).load(held_layout(C)))
    release(rings.first, use, C.FIRST_STAGES, pred=some)
    return x


@gluon.jit
def issue_scores(C: gl.constexpr, own, rings, use):
    """Issue S of a step; of a tile that is not there for no one."""
    s = slot(use + own.shift, C.FIRST_STAGES)
    streamed = tile_at(rings.first.buffers, s, C.BLOCK_STREAMED, C.D)
    S = no_scores(C)
    for i in gl.static_range(C.D // C.HELD):
        b = streamed.slice(i * C.HELD, C.HELD, dim=1).permute((1, 0))
        if i == 0:
            S = warpgroup_mma(own.held, b, S, use_acc=False, is_async=True)
        else:  # use >> 30 is 0, which the compiler cannot derive: it would keep the operand
            a = tile_at(rings.own.buffers, (use >> 30) + i - 1, C.TOKENS, C.HELD)
            S = warpgroup_mma(a, b, S, use_acc=True, is_async=True)
    return S


@gluon.jit
def step_of_weights(
    C: gl.constexpr, MASKED: gl.constexpr, m, head, state, own, rings, tile, t, n
):  # fmt: skip
    """Return the State after streamed tile m; ``head`` is the query head."""
    use = state.use
    after = use + 1
    first_use = use + own.shift
    dtype: gl.constexpr = rings.first.buffers.dtype
    if C.QUERIES_RESIDENT:
        lse = own.lse[:, None]
    else:
        lse = settled(row_numbers(C, rings.rows, slot(first_use, C.FIRST_STAGES), 0))[None, :]
    if C.SCORES_ALONE:
        release(rings.first, first_use, C.FIRST_STAGES)
        wait_full(rings.first, first_use + 1, C.FIRST_STAGES, pred=after < own.end)
        S = issue_scores(C, own, rings, after)
        p, _ = weights(C, MASKED, 0, state.product, lse, 0, m, head, tile, t, n, dtype)
        p = rounded(p, dtype)
        pass_operand(C, p, rings, use)
        wait_full(rings.second, 2 * use, C.SECOND_STAGES)
        x = issue_sum(C, 0, p, rings, use, own.shift, state.x)
        x, S = warpgroup_mma_wait(0, deps=[x, S])
        release(rings.second, 2 * use, C.SECOND_STAGES)
    else:
        _, w = weights(C, MASKED, 0, state.product, lse, 0, m, head, tile, t, n, dtype)
        rings.w.buffers.index(0).store(w)
        mbarrier.arrive(rings.w.full.index(0), count=1)
        ds = passed_operand(C, rings, use)
        x = issue_sum(C, 0, ds, rings, use, own.shift, state.x)
        wait_full(rings.first, first_use + 1, C.FIRST_STAGES, pred=after < own.end)
        S = issue_scores(C, own, rings, after)
        x = warpgroup_mma_wait(C.D // C.HELD, deps=[x])
        release(rings.operand, use, C.OPERAND_STAGES)
        release(rings.first, first_use, C.FIRST_STAGES)
        S = warpgroup_mma_wait(0, deps=[S])
    return State(after, x, S)


@gluon.jit
def steps_of_weights(C: gl.constexpr, use, own, rings, tile, t, n):
    """Return the State of the warpgroup of weights after all steps of a tile."""
    wait_full(rings.first, use + own.shift, C.FIRST_STAGES, pred=use < own.end)
    S = warpgroup_mma_wait(0, deps=[issue_scores(C, own, rings, use)])
    full = full_range(C, tile.first, tile, t, n)
    x = State(use, zeros(C.TOKENS, C.HALF, 0).low, S)
    for g in range(n.group):
        head = tile.head * n.group + g
        if C.LOW_MASKED:
            for i in range(tile.lo, full.begin):
                x = step_of_weights(C, True, i, head, x, own, rings, tile, t, n)
        for i in range(full.begin, full.end):
            x = step_of_weights(C, False, i, head, x, own, rings, tile, t, n)
        if C.HIGH_MASKED:
            for i in range(full.end, tile.hi):
                x = step_of_weights(C, True, i, head, x, own, rings, tile, t, n)
    return x


# --- the warpgroup of gradients ----------------------------------------------------------------


@gluon.jit
def issue_gradients(C: gl.constexpr, own, rings, use):
    """Issue dP of a step, half of the columns after the other; after the last step for no one."""
    some = use < own.end
    dp = no_scores(C)
    # use >> 30 is 0, which the compiler cannot derive
    resident = tile_at(rings.other, use >> 30, C.TOKENS, C.DV)
    for h in gl.static_range(2):
        wait_full(rings.second, 2 * use + h, C.SECOND_STAGES, pred=some)
        u = slot(2 * use + h, C.SECOND_STAGES)
        a = resident.slice(h * C.HALF_V, C.HALF_V, dim=1)
        b = tile_at(rings.second.buffers, u, C.BLOCK_STREAMED, C.HALF_V).permute((1, 0))
        dp = warpgroup_mma(a, b, dp, use_acc=h > 0, is_async=True)
    return dp


@gluon.jit
def finished_gradients(C: gl.constexpr, dp, x, own, rings, use):
    """Wait for dP of a step, and release its halves; return (dP, x). x was issued before."""
    x = warpgroup_mma_wait(1, deps=[x])
    release(rings.second, 2 * use, C.SECOND_STAGES, pred=use < own.end)
    dp = warpgroup_mma_wait(0, deps=[dp])
    release(rings.second, 2 * use + 1, C.SECOND_STAGES, pred=use < own.end)
    return dp, x


@gluon.jit
def step_of_gradients(C: gl.constexpr, state, own, rings):
    """Return the State after one streamed tile."""
    use = state.use
    after = use + 1
    if C.SCORES_ALONE:
        p = passed_operand(C, rings, use)
        wait_full(rings.second, 2 * use + 1, C.SECOND_STAGES)
        x = issue_sum(C, 1, p, rings, use, own.shift, state.x)
        x = warpgroup_mma_wait(0, deps=[x])
        release(rings.operand, use, C.OPERAND_STAGES)
        release(rings.second, 2 * use + 1, C.SECOND_STAGES)
        dp = state.product
    else:
        first_use = use + own.shift
        wait_full(rings.first, first_use, C.FIRST_STAGES)
        if C.QUERIES_RESIDENT:
            delta = own.delta[:, None]
        else:
            delta = settled(row_numbers(C, rings.rows, slot(first_use, C.FIRST_STAGES), 1))[None, :]
        wait_full(rings.w, use, 1)
        w = rings.w.buffers.index(0).load(score_layout(C))
        ds = rounded(score_gradient(w, state.product, delta), rings.first.buffers.dtype)
        pass_operand(C, ds, rings, use)
        x = issue_sum(C, 1, ds, rings, use, own.shift, state.x)
        dp = issue_gradients(C, own, rings, after)
        x = warpgroup_mma_wait(2, deps=[x])
        release(rings.first, first_use, C.FIRST_STAGES)
        dp, x = finished_gradients(C, dp, x, own, rings, after)
    return State(after, x, dp)


@gluon.jit
def steps_of_gradients(C: gl.constexpr, use, own, rings):
    """Return the State of the warpgroup of gradients after all steps of a tile."""
    dp = 0
    x = zeros(C.TOKENS, C.HALF, 0).low
    if not C.SCORES_ALONE:
        dp = issue_gradients(C, own, rings, use)
        dp, x = finished_gradients(C, dp, x, own, rings, use)
    state = State(use, x, dp)
    for _ in range(use, own.end):
        state = step_of_gradients(C, state, own, rings)
    return state


# --- both --------------------------------------------------------------------------------------


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, rings, mail, t, n):
    """Compute half c of the columns of every tile; 0 is of weights, 1 of gradients."""
    message = 0
    use = 0
    nth = 0
    tile, live = take_message(mail, 0)
    while live:
        some = tile.lo < tile.hi
        end = use + (tile.hi - tile.lo) * n.group
        held = 0
        if c == 0:
            held = held_columns(C, rings, use + nth, some)
        elif not C.SCORES_ALONE:  # the same use of the ring
            wait_full(rings.first, use + nth, C.FIRST_STAGES, pred=some)
            release(rings.first, use + nth, C.FIRST_STAGES, pred=some)
        wait_full(rings.own, nth, 1, pred=some)
        own = Own(held, 0, 0, nth + 1, end)
        if C.QUERIES_RESIDENT:
            lse, delta = resident_numbers(C, 0, tile, t, n)
            own = Own(held, lse, delta, nth + 1, end)
        if c == 0:
            x = steps_of_weights(C, use, own, rings, tile, t, n)
        else:
            x = steps_of_gradients(C, use, own, rings)
        use = end
        release(rings.own, nth, 1, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = read_message(mail, message)
        store_half(C, c, x.x, tile, t, n)
        release_message(mail, message, following, live)
        tile = following


@gluon.jit
def store_half(C: gl.constexpr, c: gl.constexpr, x, tile, t, n):
    """Store the columns of the gradient that the warpgroup has."""
    if not C.SCORES_ALONE:
        x = x * n.out_scale
    OUT: gl.constexpr = min(C.OUT - c * C.HALF, C.HALF)
    if OUT > 0:
        row, head, heads = place_of_share(gradient_row(C, 0, tile), tile, n)
        to = t.out + (row.to(gl.int64) * heads + head) * C.OUT + c * C.HALF
        store_rows(x, to, heads * C.OUT, rows_left(C, 0, tile), OUT)


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def backward_wide(own, other, first, second, rows, t, n, C: gl.constexpr):
    """Run the partitions of a block.

    The arguments are descriptors of copies, ``backward_args.Pointers`` and ``Numbers``.
    """
    copies = Copies(own, other, first, second, rows)
    owns = tile_buffers(own, C.D // C.HELD - 1)
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
    of_first = Ring(firsts, first_full, barriers(C.FIRST_STAGES, C.FIRST_READERS))
    second_full = full_barriers(C.SECOND_STAGES, C.VARLEN)
    of_second = Ring(seconds, second_full, barriers(C.SECOND_STAGES, 1))
    w = firsts
    if not C.SCORES_ALONE:
        shape: gl.constexpr = [1, C.TOKENS, C.BLOCK_STREAMED]
        w = gl.allocate_shared_memory(gl.float32, shape, thread_layout(C))
    of_w = Ring(w, barriers(1, 1), 0)
    operands = gl.allocate_shared_memory(
        own.dtype,
        [C.OPERAND_STAGES, C.TOKENS, C.BLOCK_STREAMED],
        matrix(C.TOKENS, C.BLOCK_STREAMED, own.dtype),
    )
    stages: gl.constexpr = C.OPERAND_STAGES
    of_operand = Ring(operands, barriers(stages, 1), barriers(stages, 1))
    fence_async_shared()
    rings = Rings(of_own, others, of_first, of_second, stats, of_w, of_operand)
    kv_heads = n.heads // n.ratio if C.QUERIES_RESIDENT else n.heads
    follow()
    gl.warp_specialize(
        [
            (consumer, (C, 0, rings, mail, t, n)),
            (consumer, (C, 1, rings, mail, t, n)),
            (producer, (C, copies, rings, mail, kv_heads, t, n)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )
