"""The steps of a consumer of the fused backward, whole or half a tile of queries at a time.

``backward_fused.py`` says what a step does, and which barriers it waits for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_lib import (
    bits_of_keys,
    held_layout,
    kept_of_keys,
    no_scores,
    row_numbers,
    score_layout,
    sums_by_lane,
    wait_done,
    weights,
)
from .backward_order import abreast, steps_of_pass
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .lib.parts import (
    Parts,
    count,
    issue_over_columns,
    issue_with_columns,
    parts_at,
    rows_of_parts,
    wait_parts,
    wait_two,
    zeros,
)
from .lib.ring import release, slot, tile_at, wait_empty, wait_full
from .lib.rules import score_gradient
from .lib.scores import widened
from .lib.softmax import rounded


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
        half = tile_at(rings.bias.buffers, i, C.BLOCK_STREAMED, C.TOKENS)
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
    tile_at(to.low, s, 2 * C.D0, 32).store(thread_order(dq.low, C.D0))
    if C.D1:
        tile_at(to.high, s, 2 * C.D1, 32).store(thread_order(dq.high, C.D1))
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
    tile, dbias, t, n,
):  # fmt: skip
    """Return the State after tile m of the queries of a head."""
    if C.HALVED:
        after = halved_step(C, MASKED, c, m, head, state, resident, rings, tile, t, n)
    else:
        after = whole_step(C, MASKED, c, m, head, state, resident, rings, tile, dbias, t, n)
    return after


@gluon.jit
def whole_step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, m, head, state, resident, rings,
    tile, dbias, t, n,
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
    bits = bits_of_keys(C, tile.first + c * C.TOKENS, m, head, tile, t, n)
    s = slot(use, C.Q_STAGES)
    lse = row_numbers(C, rings.rows, s, 0)[None, :]
    bias = 0
    if C.BIAS:
        bias = own_bias(C, c, rings, use)
    p, w = weights(C, MASKED, c, state.s, lse, bias, m, head, tile, t, n, dtype)
    P = rounded(kept_of_keys(C, p, bits), dtype)
    # A wait begins a new basic block. Without one here ptxas moves the exponentials below the wait
    # for the products that they overlap with.
    wait_full(rings.q, after, C.Q_STAGES, pred=after < resident.end)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if C.DROPOUT:
        dp = kept_of_keys(C, dp, bits) * n.keep_scale

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
    tile, t, n,
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
    w, P = half_weights(C, MASKED, c, S, lse, b0, 2 * m, head, tile, t, n, dtype)
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
    w, P = half_weights(C, MASKED, c, S, lse, b1, 2 * m + 1, head, tile, t, n, dtype)
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
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, S, lse, bias, m, head, tile, t, n,
    dtype: gl.constexpr,
):  # fmt: skip
    """Return (w, P) of a half, number m of all: ``backward_lib.weights``, P rounded."""
    if C.BIAS:
        bias = widened(bias)
    p, w = weights(C.HALF, MASKED, c, S, lse, bias, m, head, tile, t, n, dtype)
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
    C: gl.constexpr, c: gl.constexpr, state, resident, rings, tile, full, dbias, t, n
):  # fmt: skip
    """Return the State after all steps of a tile of keys, in the order of ``step_of``."""
    FIRST: gl.constexpr = C.LOW_MASKED if C.UP else C.HIGH_MASKED
    LAST: gl.constexpr = C.HIGH_MASKED if C.UP else C.LOW_MASKED
    heads = n.group
    if C.ABREAST:
        heads = 1
    for r in range(heads * C.PASSES):
        of = steps_of_pass(C, C.UP, r, tile, full)
        g = of.g
        if FIRST:
            state = some_steps(C, True, c, g, of.first, state, resident, rings, tile, dbias, t, n)
        state = some_steps(C, False, c, g, of.full, state, resident, rings, tile, dbias, t, n)
        if LAST and not FIRST:
            state = some_steps(C, True, c, g, of.last, state, resident, rings, tile, dbias, t, n)
    return state


@gluon.jit
def some_steps(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, g, some, state, resident, rings, tile,
    dbias, t, n,
):  # fmt: skip
    """Return the State after the steps of tiles from ``some.begin`` to before ``some.end``."""
    side = 1
    if C.ABREAST:
        side = n.group
    for i in range(some.begin * side, some.end * side):
        m, head = abreast(C, i, g, n.group)
        head += tile.head * n.group
        if not C.UP:
            m = some.end - 1 - m + some.begin
        state = step(C, MASKED, c, m, head, state, resident, rings, tile, dbias, t, n)
    return state
