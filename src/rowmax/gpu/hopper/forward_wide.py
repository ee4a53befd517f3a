"""The forward of keys and values wider than 256: both warpgroups of a block have the same 64 rows.

The output of 64 rows and 512 columns takes the registers of two warpgroups: each has half of the
columns. One of them computes the scores and the softmax for both:

    warpgroup      computes                           output
    of weights     S = Q K^T, P, the statistics       O += P V of the left half of the columns
    of values      nothing else                       O += P V of the right half

P passes through shared memory, with the factor of O of each row (``Passed``); the last factor of a
tile is 1 / l. S of the next key tile is under way while the softmax of this one is computed.

The producer is that of ``forward_producer.py``: V is a tile in two parts. Barriers of a block, with
the arrivals that complete a phase, besides those of the producer's rings:

    barrier          arrivals                           waited for by
    passed.full[s]   weights, P and factors are stored  values, before it reads them
    passed.empty[s]  values, its product is done        weights, before it stores others
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_kernel import issue_scores, scaled_rows, shared_of
from .forward_lib import Copies, full_tiles
from .forward_producer import producer
from .forward_results import output_place, store_lse, store_rows
from .forward_scores import masked_where_partial, scores
from .gluon_compat import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .lib import ring
from .lib.layouts import matrix, product_layout
from .lib.parts import Parts, issue_with_columns, parts_at
from .lib.scores import settled
from .lib.softmax import LOG2E, LOWEST, LOWEST_NATURAL, by_lane, softmax_step


class Passed(NamedTuple):
    """The rings of what the warpgroup of weights passes: two buffers of P and of factors."""

    p: Any
    factors: Any  # [64, 4], as in lib/softmax.py
    full: Any
    empty: Any


class State(NamedTuple):
    """The output so far, the rows' statistics, and the scores of the next key tile."""

    use: Any
    o: Any  # [64, DV / 2]
    m: Any
    l: Any
    S: Any


# --- the warpgroup of weights ------------------------------------------------------------------


@gluon.jit
def next_scores(C: gl.constexpr, shared, number, use, some):
    """Return S of a use of K, and release it; of no use if there are not ``some``."""
    ring.wait_full(shared.q, number, C.Q_STAGES, pred=some)
    ring.wait_full(shared.k, use, C.K_STAGES, pred=some)
    S = warpgroup_mma_wait(0, deps=[issue_scores(C, 0, shared, number, use)])
    ring.release(shared.k, use, C.K_STAGES, pred=some)
    return S


@gluon.jit
def pass_weights(C: gl.constexpr, p, factor, passed, nth):
    """Store P and the factors of O for the other warpgroup."""
    ring.wait_empty(passed, nth, 2)
    s = ring.slot(nth, 2)
    passed.p.index(s).store(p)
    passed.factors.index(s).store(factor)
    fence_async_shared()
    mbarrier.arrive(passed.full.index(s), count=1)


@gluon.jit
def pass_inverse(C: gl.constexpr, inverse, like, passed, nth):
    """Store the last factors of a tile, ``[64]``; they have the layout of ``like`` ``[64, 4]``."""
    ring.wait_empty(passed, nth, 2)
    s = ring.slot(nth, 2)
    zeros = gl.full([64, 4], 0.0, gl.float32, like.type.layout)
    passed.factors.index(s).store(zeros + inverse[:, None])
    mbarrier.arrive(passed.full.index(s), count=1)


@gluon.jit
def step(C: gl.constexpr, MASKED: gl.constexpr, j, number, state, tile, shared, passed, t, n):
    """Return the State after key tile j."""
    use = state.use
    dtype: gl.constexpr = shared.v.buffers.low.dtype
    more = j > tile.lo
    ring.wait_full(shared.k, use + 1, C.K_STAGES, pred=more)
    S = issue_scores(C, 0, shared, number, use + 1)  # for no one after the last tile
    x = scores(C, state.S, 0, j, tile.first, tile, t, n, dtype)
    if MASKED:
        x = masked_where_partial(C, x, j, tile.first, tile, t, n, "both")
    scale = LOG2E if C.ADDED else n.scale
    p, m, l, alpha = softmax_step(x, state.m, state.l, scale, C.NATURAL, False, dtype)
    # each tile before has passed its last factor as well
    pass_weights(C, p, alpha, passed, use + number)
    o = scaled_rows(state.o, alpha, False)
    ring.wait_full(shared.v, use, C.V_STAGES)
    v = parts_at(shared.v.buffers, ring.slot(use, C.V_STAGES), C.BLOCK_K, C.DV0, C.DV1)
    o = issue_with_columns(p, Parts(v.low, v.low), Parts(o, 0), C.DV0, 0).low
    o, S = warpgroup_mma_wait(0, deps=[o, S])
    ring.release(shared.v, use, C.V_STAGES)
    ring.release(shared.k, use + 1, C.K_STAGES, pred=more)
    return State(use + 1, o, m, l, S)


@gluon.jit
def steps(
    C: gl.constexpr, MASKED: gl.constexpr, begin, end, number, state, tile, shared, passed, t, n
):
    """Return the State after key tiles end - 1 to ``begin``."""
    for i in range(begin, end):
        j = end - 1 - i + begin
        state = step(C, MASKED, j, number, state, tile, shared, passed, t, n)
    return state


@gluon.jit
def all_steps(C: gl.constexpr, number, state, tile, shared, passed, t, n):
    """Return the State after all key tiles; the last has every limit, as in forward_kernel.py."""
    if C.DOCUMENTS:  # any tile may be partial, so each is tested
        state = steps(C, True, tile.lo, tile.hi, number, state, tile, shared, passed, t, n)
    else:
        full, end = full_tiles(C, tile.first, tile, n)
        if C.RIGHT or C.LEFT or not C.EVEN_K:
            state = steps(C, True, end, tile.hi, number, state, tile, shared, passed, t, n)
        else:
            end = tile.hi
        state = steps(C, False, full, end, number, state, tile, shared, passed, t, n)
        if C.LEFT:
            state = steps(C, True, tile.lo, full, number, state, tile, shared, passed, t, n)
    return state


@gluon.jit
def compute_weights(C: gl.constexpr, tile, shared, passed, t, n):
    """Compute the left half of the output, and lse, of ``tile`` and all following tiles."""
    number = 0
    use = 0
    live = True
    S = next_scores(C, shared, 0, 0, True)
    while live:
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_lane(S).type.layout))
        m = gl.full([64, 4], LOWEST_NATURAL if C.NATURAL else LOWEST, gl.float32, rows)
        l = gl.full([64, 4], 0.0, gl.float32, rows)
        o = gl.full([64, C.DV0], 0.0, gl.float32, product_layout(C.DV0))
        state = State(use, o, m, l, S)
        state = all_steps(C, number, state, tile, shared, passed, t, n)
        use = state.use
        inverse = store_lse(C, 0, state.m, state.l, tile, t, n)
        pass_inverse(C, inverse, state.l, passed, use + number)
        ring.release(shared.q, number, C.Q_STAGES)
        number += 1
        after, more = ring.read_message(shared.mail, number)
        base, rest = output_place(C, tile.first, tile, t, n)
        store_rows(C, state.o, inverse, base, 0, rest, n)
        ring.release_message(shared.mail, number, after, more)
        S = next_scores(C, shared, number, use, more)
        tile = after
        live = more


# --- the warpgroup of values -------------------------------------------------------------------


@gluon.jit
def passed_factors(passed, nth, o):
    """Wait for what was passed, and return the factors of the rows of o."""
    ring.wait_full(passed, nth, 2)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_lane(o).type.layout))
    return settled(passed.factors.index(ring.slot(nth, 2)).load(rows), 2)


@gluon.jit
def compute_values(C: gl.constexpr, tile, shared, passed, t, n):
    """Compute the right half of the output of ``tile`` and all following tiles."""
    number = 0
    use = 0
    live = True
    while live:
        o = gl.full([64, C.DV1], 0.0, gl.float32, product_layout(C.DV1))
        end = use + tile.hi - tile.lo
        for i in range(use, end):
            o = scaled_rows(o, passed_factors(passed, i + number, o), False)
            ring.wait_full(shared.v, i, C.V_STAGES)
            s = ring.slot(i, C.V_STAGES)
            v = parts_at(shared.v.buffers, s, C.BLOCK_K, C.DV0, C.DV1)
            p = passed.p.index(ring.slot(i + number, 2))
            o = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v.high, o, is_async=True)])
            ring.release(passed, i + number, 2)
            ring.release(shared.v, i, C.V_STAGES)
        use = end
        inverse = gl.max(passed_factors(passed, use + number, o), 1)
        ring.release(passed, use + number, 2)
        number += 1
        after, more = ring.read_message(shared.mail, number)
        base, rest = output_place(C, tile.first, tile, t, n)
        store_rows(C, o, inverse, base, C.DV0, rest, n)
        ring.release_message(shared.mail, number, after, more)
        tile = after
        live = more


# --- the entry ---------------------------------------------------------------------------------


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, shared, passed, t, n):
    """Compute half c of the columns of every tile of this block; 0 is of weights, 1 of values."""
    tile, live = ring.take_message(shared.mail, 0)
    if live:
        if c == 0:
            compute_weights(C, tile, shared, passed, t, n)
        else:
            compute_values(C, tile, shared, passed, t, n)


@gluon.jit
def forward_wide(q0, q1, k0, k1, v0, v1, bias, out, t, n, C: gl.constexpr):
    """Compute out and lse. The arguments are those of ``forward_kernel.forward``."""
    copies = Copies(Parts(q0, q1), Parts(k0, k1), Parts(v0, v1), bias, out)
    shared = shared_of(C, copies, 0)
    weights = gl.allocate_shared_memory(
        v0.dtype, [2, 64, C.BLOCK_K], matrix(64, C.BLOCK_K, v0.dtype)
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    factors = gl.allocate_shared_memory(gl.float32, [2, 64, 4], flat)
    passed = Passed(weights, factors, ring.barriers(2, 1), ring.barriers(2, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (C, 0, shared, passed, t, n)),
            (consumer, (C, 1, shared, passed, t, n)),
            (producer, (C, 0, copies, shared, t, n, n.batch)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )
