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

from .backward_complete import is_rounding, round_sums
from .backward_lib import (
    Descriptors,
    follow,
    place_of,
    score_layout,
    store,
    store_sums,
    sums_by_lane,
    wait_done,
)
from .backward_order import full_range, gradient_row, place_of_share, rows_left
from .backward_producer import producer
from .backward_steps import (
    Resident,
    State,
    all_steps,
    held,
    issue_scores,
    make_dq,
    turn_of,
)
from .backward_writer import writer
from .gluon_compat import fence_async_shared, tma_store_wait, warpgroup_mma_wait
from .lib.parts import Parts, part_buffers, zeros
from .lib.ring import (
    Ring,
    barriers,
    full_barriers,
    mailbox,
    read_message,
    release,
    release_message,
    slot,
    take_message,
    tile_buffers,
    wait_full,
)


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


# --- the consumers ---------------------------------------------------------------------------


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, rings, mail, dbias, t, n):
    """Compute dK and dV of keys ``64 c`` to ``64 c + 63`` of every tile of this block."""
    message = 0
    use = 0
    nth = 0
    tile, live = take_message(mail, 0)
    full = full_range(C, tile.first + c * C.TOKENS, tile, t, n)
    while live:
        if not C.SPANS:
            full = full_range(C, tile.first + c * C.TOKENS, tile, t, n)
        some = tile.lo < tile.hi
        end = use + (tile.hi - tile.lo) * n.group
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
        state = all_steps(C, c, state, resident, rings, tile, full, dbias, t, n)
        use = state.use
        if C.DQ:
            last = gl.maximum(end - 1, 0)
            wait_done(C, rings, last, some)
            if some & (turn_of(C, last) == c):
                make_dq(C, resident, rings, last)
        release(rings.k, nth, C.KV_STAGES, pred=some)
        nth += some.to(gl.int32)
        message += 1
        following, live = read_message(mail, message)
        if C.SPANS:  # it reads a table, under the stores of this tile
            full = full_range(C, following.first + c * C.TOKENS, following, t, n)
        if C.COMPLETE:
            if is_rounding(tile, n):
                round_sums(C, c, tile, t, n)
            else:
                store_tile(C, c, state, tile, t, n)
        else:
            store_tile(C, c, state, tile, t, n)
        release_message(mail, message, following, live)
        tile = following
    if C.DBIAS:
        tma_store_wait(0)


@gluon.jit
def store_tile(C: gl.constexpr, c: gl.constexpr, state, tile, t, n):
    """Store dK, dV and sums of dbias of the warpgroup's keys of a tile."""
    row, head, heads = place_of_share(gradient_row(C, c, tile), tile, n)
    rows = rows_left(C, c, tile)
    to, alone = t.out, t.dk_alone
    to = place_of(to, row, head, heads, C.D_OUT, t.dk_rows)
    if alone is not None:
        alone = alone + head * C.D_OUT
    stride = heads * C.D_OUT
    x = state.dk.low * n.out_scale
    store(C, x, to, stride, rows, C.D0, 0, C.D_OUT, t.dk_rows, row, alone)
    if C.D_OUT > C.D0:
        x = state.dk.high * n.out_scale
        store(C, x, to, stride, rows, C.D1, C.D0, C.D_OUT, t.dk_rows, row, alone)
    if C.DROW:
        plane = (tile.b * heads + head).to(gl.int64)
        to = t.dbias + plane * n.nk + tile.first + c * C.TOKENS
        store_sums(state.drow, to, rows)
    to, alone = t.dv, t.dv_alone
    to = place_of(to, row, head, heads, C.DV_OUT, t.dv_rows)
    if alone is not None:
        alone = alone + head * C.DV_OUT
    stride = heads * C.DV_OUT
    low, high = state.dv.low, state.dv.high
    if C.DROPOUT:
        low = low * n.keep_scale
        high = high * n.keep_scale
    store(C, low, to, stride, rows, C.DV0, 0, C.DV_OUT, t.dv_rows, row, alone)
    if C.DV_OUT > C.DV0:
        x = high
        store(C, x, to, stride, rows, C.DV1, C.DV0, C.DV_OUT, t.dv_rows, row, alone)


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
    follow()
    tiles = (n.nk + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
    if C.ORDERED and C.VARLEN:
        tiles = gl.load(t.cu_k + n.batch) // C.BLOCK_RESIDENT + n.batch
    few: gl.constexpr = C.PRODUCER_REGISTERS
    many: gl.constexpr = C.CONSUMER_REGISTERS
    if C.WARPGROUPS == 4:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, dbias, t, n)),
                (consumer, (C, 1, rings, mail, dbias, t, n)),
                (consumer, (C, 2, rings, mail, dbias, t, n)),
                (consumer, (C, 3, rings, mail, dbias, t, n)),
                (producer, (C, descs, rings, mail, t, n)),
                (writer, (C, dq, rings.dq, mail, tiles, t, n)),
            ],
            [4, 4, 4, 1, 1],
            [many, many, many, few, few],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, dbias, t, n)),
                (consumer, (C, 1, rings, mail, dbias, t, n)),
                (producer, (C, descs, rings, mail, t, n)),
                (writer, (C, dq, rings.dq, mail, tiles, t, n)),
            ],
            [4, 1, 1],
            [many, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, rings, mail, dbias, t, n)),
                (consumer, (C, 1, rings, mail, dbias, t, n)),
                (consumer, (C, 2, rings, mail, dbias, t, n)),
                (producer, (C, descs, rings, mail, t, n)),
                (writer, (C, dq, rings.dq, mail, tiles, t, n)),
            ],
            [4, 4, 1, 1],
            [many, many, few, few],
        )
