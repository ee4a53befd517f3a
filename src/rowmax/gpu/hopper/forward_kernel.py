"""The forward kernel: one producer and one to three consumers in a persistent block.

The producer, one warp, copies tiles of queries, keys and values into shared memory. A consumer, a
warpgroup, holds 64 query rows: it makes their scores, softmax and output, tile after tile. Within a
warpgroup the product of one tile's weights and values runs under the softmax of the next. This
holds across query tiles: the last product of one runs under the first softmax of the next. Three
warpgroups issue their products in turn (ORDERED).

LAGS: full key tiles take no maximum (rules/softmax.py). A row that overflows gets NaN as its lse,
and a second launch, of a kernel with MENDS, computes the tiles of such rows by maxima.

(The file is not named ``forward``: the package has a function of this name.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_lib import Copies, Shared, full_tiles, other_strip
from .forward_producer import any_overflowed, producer
from .forward_results import store_lse, store_output
from .forward_scores import dropped, masked, masked_where_partial, scores
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .lib import ring
from .lib.assembly import SPLIT_PRODUCT, scale_constraints, scale_text, turn_text
from .lib.clocks import mark, mark_time
from .lib.layouts import product_layout, weight_layout
from .lib.order import Order
from .lib.parts import (
    Parts,
    issue_over_columns,
    issue_with_columns,
    part_buffers,
    parts_at,
    wait_parts,
)
from .lib.ring import Ring
from .lib.scores import settled, widened
from .lib.softmax import (
    FIRST,
    LOG2E,
    LOWEST,
    LOWEST_NATURAL,
    along_row,
    by_lane,
    followed,
    lagging_step,
    rounded,
    softmax_step,
)


class State(NamedTuple):
    """A warpgroup's output so far, the weights of the last key tile, and the rows' statistics."""

    o0: Any
    o1: Any
    p: Any
    m: Any
    l: Any
    s: Any  # LAGS: the sums of the last weights, which the reference m has not followed yet
    strip: Any  # number of the strip of the bias
    q: Any  # ONTO_BIAS: the queries times the scale


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def wait_turn(C: gl.constexpr, c: gl.constexpr):
    """Wait until the warpgroup before has issued its products. The first turn has none before."""
    if C.ORDERED:
        text: gl.constexpr = turn_text("sync", c)
        gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(C: gl.constexpr, c: gl.constexpr, more):
    """Let the next warpgroup issue its products. The last one has a next if there are ``more``."""
    if C.ORDERED:
        text: gl.constexpr = turn_text("arrive", (c + 1) % C.WARPGROUPS)
        if c + 1 < C.WARPGROUPS or more:
            gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def issue_scores(C: gl.constexpr, c: gl.constexpr, shared, number, use):
    """Issue S = Q K^T ``[64, BLOCK_K]`` of query tile ``number`` and use ``use`` of K.

    ``use >> 30`` is 0, which the compiler cannot derive. ptxas (12.8) may compute an address that
    two loops share only before the first loop; the second reads an undefined one when the first is
    skipped. Where K has one buffer, its addresses would stay in registers, and others spill.
    """
    i = c * C.Q_STAGES + ring.slot(number + (use >> 30), C.Q_STAGES)
    s = ring.slot(use, C.K_STAGES)
    if C.K_STAGES == 1:
        s = use >> 30
    z = gl.full([64, C.BLOCK_K], 0.0, gl.float32, product_layout(C.BLOCK_K))
    q = parts_at(shared.q.buffers, i, 64, C.D0, C.D1)
    k = parts_at(shared.k.buffers, s, C.BLOCK_K, C.D0, C.D1)
    return issue_over_columns(q, k, z, C.D1)


@gluon.jit
def scaled_queries(C: gl.constexpr, c: gl.constexpr, shared, number, n, live):
    """Return the queries of a tile times the scale, a sum of two parts; release their buffer.

    Parts are left operands in registers. The sum has twice the digits of the dtype.
    """
    Q = 0
    if C.ONTO_BIAS:
        i = c * C.Q_STAGES + ring.slot(number, C.Q_STAGES)
        x = ring.tile_at(shared.q.buffers.low, i, 64, C.D).load(weight_layout(C.BLOCK_K))
        high, low = gl.inline_asm_elementwise(
            SPLIT_PRODUCT, "=&r,=r,r,f,f", [settled(x), n.scale], dtype=(x.dtype, x.dtype),
            is_pure=True, pack=2,
        )  # fmt: skip
        Q = Parts(low, high)
        ring.release(shared.q, number, C.Q_STAGES, c, pred=live)
    return Q


@gluon.jit
def issue_onto(C: gl.constexpr, q, shared, use, bias):
    """Issue S = bias + Q K^T ``[64, BLOCK_K]``, q with the scale in registers."""
    k = ring.tile_at(shared.k.buffers.low, ring.slot(use, C.K_STAGES), C.BLOCK_K, C.D)
    k = k.permute((1, 0))
    S = warpgroup_mma(q.low, k, widened(bias), is_async=True)
    return warpgroup_mma(q.high, k, S, is_async=True)


@gluon.jit
def first_scores(C: gl.constexpr, c: gl.constexpr, q, shared, number, use, j, strip, live):
    """Issue the first scores of query tile ``number``, those of its last key tile j."""
    if C.ONTO_BIAS:
        bias = load_bias(C, c, shared.bias, use, j, strip, live)
        S = issue_onto(C, q, shared, use, bias)
    else:
        S = issue_scores(C, c, shared, number, use)
    return S


@gluon.jit
def issue_output(C: gl.constexpr, p, o0, o1, v, use):
    """Wait for use ``use`` of V, issue O += P V, and return O."""
    ring.wait_full(v, use, C.V_STAGES)
    tile = parts_at(v.buffers, ring.slot(use, C.V_STAGES), C.BLOCK_K, C.DV0, C.DV1)
    return issue_with_columns(p, tile, Parts(o0, o1), C.DV0, C.DV1)


@gluon.jit
def issue_products(C: gl.constexpr, c: gl.constexpr, shared, number, use, j, state):
    """Issue the scores of use ``use`` and the output of the use before; return (S, O).

    OVERLAP: both are in flight, and O runs under the softmax. ONTO_BIAS: under the product of O the
    bias is loaded into the registers of S, and the scores follow it at once. Otherwise O is
    finished first, so that its weights and S are never in registers at the same time.
    """
    if C.OVERLAP:
        S = issue_scores(C, c, shared, number, use)
        o0, o1 = issue_output(C, state.p, state.o0, state.o1, shared.v, use - 1)
    elif C.ONTO_BIAS:
        o0, o1 = issue_output(C, state.p, state.o0, state.o1, shared.v, use - 1)
        bias = load_bias(C, c, shared.bias, use, j, state.strip, True)
        S = issue_onto(C, state.q, shared, use, bias)
        o0, o1 = wait_parts(2, Parts(o0, o1), C.DV1)  # O was issued before two products
        ring.release(shared.v, use - 1, C.V_STAGES)
    else:
        o0, o1 = whole_output(C, shared, use - 1, state)
        S = issue_scores(C, c, shared, number, use)
    return S, o0, o1


@gluon.jit
def whole_output(C: gl.constexpr, shared, use, state):
    """Compute O of use ``use``, with no product in flight before or after."""
    o0, o1 = issue_output(C, state.p, state.o0, state.o1, shared.v, use)
    o0, o1 = wait_output(C, o0, o1)
    ring.release(shared.v, use, C.V_STAGES)
    return o0, o1


@gluon.jit
def wait_scores(C: gl.constexpr, S):
    """Wait for S, issued before the products of O."""
    return warpgroup_mma_wait(C.FLYING, deps=[S])


@gluon.jit
def wait_output(C: gl.constexpr, o0, o1):
    """Wait for the product in flight; return both parts of O."""
    return wait_parts(0, Parts(o0, o1), C.DV1)


@gluon.jit
def finish_output(C: gl.constexpr, shared, use, o0, o1):
    """Wait for the output of use ``use`` after its softmax, if it is in flight; return O."""
    if C.OVERLAP:
        o0, o1 = wait_output(C, o0, o1)
        ring.release(shared.v, use, C.V_STAGES)
    return o0, o1


@gluon.jit
def scaled_rows(o, r, SKIPS: gl.constexpr):
    """Return o ``[64, D]`` times r ``[64, 4]``, row by row.

    SKIPS: most factors are 1, and a warp whose rows have no other multiplies nothing.
    """
    o4 = by_lane(o)
    r4 = gl.convert_layout(r, gl.SliceLayout(1, gl.SliceLayout(3, o4.type.layout)))
    r4 = along_row(r4)
    if SKIPS:
        N: gl.constexpr = o.shape[1] // 2  # numbers of a thread
        o4 = gl.inline_asm_elementwise(
            scale_text(N), scale_constraints(N), [o4, r4], gl.float32, is_pure=True, pack=N
        )
    else:
        o4 = o4 * r4
    return gl.convert_layout(o4.reshape(o.shape), o.type.layout)


@gluon.jit
def load_bias(C: gl.constexpr, c: gl.constexpr, biases, use, j, strip, live):
    """Return the tile ``[64, BLOCK_K]`` of a copied bias, loaded while the product runs.

    It is that of use ``use`` of its ring, or that of key tile j of a strip.
    """
    copied = 0
    if C.STRIP:
        i = c * C.STRIP + j
        mbarrier.wait(biases.full.index(i), strip & 1, pred=live)
        copied = ring.tile_at(biases.buffers, i, 64, C.BLOCK_K).load(product_layout(C.BLOCK_K))
    elif C.BIAS == "copied":
        ring.wait_full(biases, use, C.B_STAGES, c, pred=live)
        i = c * C.B_STAGES + ring.slot(use, C.B_STAGES)
        copied = ring.tile_at(biases.buffers, i, 64, C.BLOCK_K).load(product_layout(C.BLOCK_K))
        if C.B_STAGES == 1:  # released at once: the producer waits for this buffer
            copied = settled(copied)
            ring.release(biases, use, 1, c, pred=live)
    return copied


@gluon.jit
def bias_to_add(C: gl.constexpr, c: gl.constexpr, biases, use, j, strip, live):
    """Return ``load_bias`` for ``scores``, or 0 where the product has added it."""
    copied = 0
    if not C.ONTO_BIAS:
        copied = load_bias(C, c, biases, use, j, strip, live)
    return copied


@gluon.jit
def release_bias(C: gl.constexpr, c: gl.constexpr, biases, use, live):
    """Release the bias after the softmax, which has read all of it."""
    if C.BIAS == "copied" and C.B_STAGES > 1 and not C.STRIP:
        ring.release(biases, use, C.B_STAGES, c, pred=live)


@gluon.jit
def step(
    C: gl.constexpr, EDGE: gl.constexpr, c: gl.constexpr, j, use, number, state, tile, shared,
    t, n,
):  # fmt: skip
    """Compute the scores of key tile j, and the output of the one before under its softmax.

    EDGE: the side where the mask may cut the tile (``masked``), or "none".
    """
    MASKED: gl.constexpr = EDGE != "none"
    first = tile.first + c * C.TOKENS
    dtype: gl.constexpr = shared.v.buffers.low.dtype
    mark(C, t.clocks, c, use, 0)
    wait_turn(C, c)
    S, o0, o1 = issue_products(C, c, shared, number, use, j, state)
    pass_turn(C, c, True)
    mark(C, t.clocks, c, use, 1)
    copied = bias_to_add(C, c, shared.bias, use, j, state.strip, True)
    m, l, s = state.m, state.l, gl.full([64, 4], 0.0, gl.float32, state.l.type.layout)
    if C.LAGS and not MASKED and not C.FOLLOWS_LATE:
        m, l, alpha = followed(m, l, state.s)
    S = wait_scores(C, S)
    mark(C, t.clocks, c, use, 2)
    ring.release(shared.k, use, C.K_STAGES)
    if C.Q_STAGES == 1 and not C.ONTO_BIAS:
        ring.release(shared.q, number, 1, c, pred=j == tile.lo)
    S = scores(C, S, copied, j, first, tile, t, n, dtype)
    if MASKED:
        S = masked_where_partial(C, S, j, first, tile, t, n, EDGE)
    scale = LOG2E if C.ADDED else n.scale
    SKIPS: gl.constexpr = C.SKIPS and not MASKED
    if C.LAGS and not MASKED:
        p, l, s = lagging_step(S, m, l, scale, C.UNROUNDED, dtype)
    else:
        p, m, l, alpha = softmax_step(S, m, l, scale, C.NATURAL, C.UNROUNDED, dtype)
    if C.DROPOUT:
        p = rounded(dropped(C, p, j, first, tile, t, n), dtype)
    if SKIPS and C.OVERLAP and (C.ROUND_LATE or C.ADDED):
        # l needs all weights: ptxas would move some below the wait, to where they are rounded
        l = settled(l, 2)
    # A wait begins a new basic block. Without one here ptxas moves the softmax below the wait for
    # the product that it overlaps with.
    ring.wait_full(shared.k, use + 1, C.K_STAGES, pred=j > tile.lo)
    mark(C, t.clocks, c, use, 3)
    o0, o1 = finish_output(C, shared, use - 1, o0, o1)
    mark(C, t.clocks, c, use, 4)
    release_bias(C, c, shared.bias, use, True)
    if C.FOLLOWS_LATE and not MASKED:  # weights are float32 still, and follow as well
        m, l, alpha = followed(m, l, s)
        s = gl.full([64, 4], 0.0, gl.float32, s.type.layout)
        p = scaled_rows(p, alpha, True)
    if not SKIPS:
        p = p.to(dtype)
    o0 = scaled_rows(o0, alpha, SKIPS)
    if C.DV1:
        o1 = scaled_rows(o1, alpha, SKIPS)
    if SKIPS and C.ROUND_LATE:  # behind the branch: before it, ptxas would copy half of p
        p = rounded(p, dtype)
    return use + 1, State(o0, o1, p, m, l, s, state.strip, state.q)


@gluon.jit
def steps(
    C: gl.constexpr, EDGE: gl.constexpr, c: gl.constexpr, begin, end, use, number, state, tile,
    shared, t, n,
):  # fmt: skip
    """Compute key tiles end - 1 to ``begin``, and return (use, state) after them."""
    for i in range(begin, end):
        j = end - 1 - i + begin
        use, state = step(C, EDGE, c, j, use, number, state, tile, shared, t, n)
    return use, state


@gluon.jit
def first_weights(C: gl.constexpr, c: gl.constexpr, S, copied, tile, t, n, dtype: gl.constexpr):
    """Return (p, m, l, s) of a query tile's first step: its last key tile, with every limit."""
    first = tile.first + c * C.TOKENS
    j = tile.hi - 1
    S = scores(C, S, copied, j, first, tile, t, n, dtype)
    if C.RIGHT or C.LEFT or C.DOCUMENTS or not C.EVEN_K:
        # the last key tile of a part may be cut by the left limit
        S = masked(C, S, j, first, tile, t, n, "right" if n.parts is None else "both")
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, S.type.layout))
    lowest: gl.constexpr = LOWEST_NATURAL if C.NATURAL else LOWEST
    m = gl.full([64, 4], FIRST if C.ONTO_BIAS else lowest, gl.float32, rows)
    l = gl.full([64, 4], 0.0, gl.float32, rows)
    scale = LOG2E if C.ADDED else n.scale
    s = gl.full([64, 4], 0.0, gl.float32, rows)
    if C.FIRST_LAGS:
        p, l, s = lagging_step(S, m, l, scale, C.DROPOUT, dtype)
    else:
        p, m, l, alpha = softmax_step(S, m, l, scale, C.NATURAL, C.DROPOUT, dtype)
    if C.DROPOUT:
        p = rounded(dropped(C, p, j, first, tile, t, n), dtype)
    return p, m, l, s


@gluon.jit
def first_state(C: gl.constexpr, p, m, l, s, strip, q):
    """Return the State after the first step of a query tile."""
    W1: gl.constexpr = C.DV1 if C.DV1 else 16
    o0 = gl.full([64, C.DV0], 0.0, gl.float32, product_layout(C.DV0))
    o1 = gl.full([64, W1], 0.0, gl.float32, product_layout(W1))
    return State(o0, o1, p, m, l, s, strip, q)


@gluon.jit
def rest_of_tile(C: gl.constexpr, c: gl.constexpr, use, number, state, tile, shared, t, n):
    """Compute all key tiles of a query tile after its first step, and return (use, state)."""
    first = tile.first + c * C.TOKENS
    lo = tile.lo
    end = tile.hi - 1
    ring.wait_full(shared.k, use, C.K_STAGES, pred=lo < end)
    if C.DOCUMENTS:  # any tile may be partial, so each is tested
        use, state = steps(C, "both", c, lo, end, use, number, state, tile, shared, t, n)
    else:
        full, full_end = full_tiles(C, first, tile, n)
        if C.RIGHT:
            use, state = steps(C, "right", c, full_end, end, use, number, state, tile, shared, t, n)
        use, state = steps(C, "none", c, full, full_end, use, number, state, tile, shared, t, n)
        if C.LEFT:
            use, state = steps(C, "left", c, lo, full, use, number, state, tile, shared, t, n)
    return use, state


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, copies, shared, t, n):
    """Compute rows ``64 c`` to ``64 c + 63`` of every tile of this block, in warpgroup c."""
    tile, live = ring.take_message(shared.mail, 0)
    if live:
        compute_tiles(C, c, tile, copies, shared, t, n)


@gluon.jit
def compute_tiles(C: gl.constexpr, c: gl.constexpr, tile, copies, shared, t, n):
    """Compute ``tile`` and all following tiles."""
    dtype: gl.constexpr = shared.v.buffers.low.dtype
    number = 0
    use = 0
    ring.wait_full(shared.q, 0, C.Q_STAGES, c)
    ring.wait_full(shared.k, 0, C.K_STAGES)
    mark_time(C, t.clocks, c, 0)
    if c:
        wait_turn(C, c)
    strip = 0
    q = scaled_queries(C, c, shared, 0, n, True)
    S = first_scores(C, c, q, shared, 0, 0, tile.hi - 1, strip, True)
    pass_turn(C, c, True)
    S = warpgroup_mma_wait(0, deps=[S])
    ring.release(shared.k, 0, C.K_STAGES)
    if C.Q_STAGES == 1 and not C.ONTO_BIAS:
        ring.release(shared.q, 0, 1, c, pred=tile.lo + 1 == tile.hi)
    copied = bias_to_add(C, c, shared.bias, use, tile.hi - 1, strip, True)
    p, m, l, s = first_weights(C, c, S, copied, tile, t, n, dtype)
    if C.BIAS == "copied":
        # begins a basic block, as in step; these values are kept until their product
        ring.wait_full(shared.v, 0, C.V_STAGES)
        release_bias(C, c, shared.bias, use, True)
    use += 1

    live = True
    while live:
        state = first_state(C, p, m, l, s, strip, q)
        use, state = rest_of_tile(C, c, use, number, state, tile, shared, t, n)

        number += 1
        if not C.OVERLAP:  # stored before the next scores take registers
            o0, o1 = whole_output(C, shared, use - 1, state)
            inverse = store_lse(C, c, state.m, state.l, tile, t, n)
            store_output(C, c, o0, o1, inverse, tile, copies, shared, t, n)
        # OVERLAP: the last product of this tile, under the first scores and softmax of the next.
        # When there is no next, the scores are stale and unused.
        after, more = ring.read_message(shared.mail, number)
        ring.wait_full(shared.k, use, C.K_STAGES, pred=more)
        ring.wait_full(shared.q, number, C.Q_STAGES, c, pred=more)
        wait_turn(C, c)
        q = scaled_queries(C, c, shared, number, n, more)
        if C.STRIP and C.ONTO_BIAS:  # its last reads were before the scores that a product added
            strip = next_strip(C, c, shared, strip, tile, after, more, n)
        S = first_scores(C, c, q, shared, number, use, after.hi - 1, strip, more)
        if C.OVERLAP:
            o0, o1 = issue_output(C, state.p, state.o0, state.o1, shared.v, use - 1)
        pass_turn(C, c, more)
        # released late, because each release waits for the four warps
        ring.release_message(shared.mail, number, after, more)
        if C.Q_STAGES > 1 and not C.ONTO_BIAS:
            ring.release(shared.q, number - 1, C.Q_STAGES, c)
        if C.STRIP and not C.ONTO_BIAS:  # its last reads are in the weights of the product above
            strip = next_strip(C, c, shared, strip, tile, after, more, n)
        copied = bias_to_add(C, c, shared.bias, use, after.hi - 1, strip, more)
        S = wait_scores(C, S)
        ring.release(shared.k, use, C.K_STAGES, pred=more)
        if C.Q_STAGES == 1 and not C.ONTO_BIAS:
            ring.release(shared.q, number, 1, c, pred=more & (after.lo + 1 == after.hi))
        p, m, l, s = first_weights(C, c, S, copied, after, t, n, dtype)
        if C.OVERLAP:
            if C.WARPGROUPS < 3:
                inverse = store_lse(C, c, state.m, state.l, tile, t, n)
            # begins a basic block, as in step
            ring.wait_full(shared.v, use - 1, C.V_STAGES)
            o0, o1 = finish_output(C, shared, use - 1, o0, o1)
            release_bias(C, c, shared.bias, use, more)
            if C.WARPGROUPS == 3:
                inverse = store_lse(C, c, state.m, state.l, tile, t, n)
            store_output(C, c, o0, o1, inverse, tile, copies, shared, t, n)
        elif C.BIAS == "copied" and not C.STRIP:
            ring.wait_full(shared.v, use, C.V_STAGES, pred=more)  # as before the loop
            release_bias(C, c, shared.bias, use, more)
        use += 1
        tile = after
        live = more
    mark_time(C, t.clocks, c, 2)
    if C.STAGED:
        tma_store_wait(0)


@gluon.jit
def next_strip(C: gl.constexpr, c: gl.constexpr, shared, strip, tile, after, more, n):
    """Release strip ``strip`` of the bias, if tile ``after`` reads another; return its number."""
    fresh = more & other_strip(tile, after, n)
    ring.release(shared.bias, strip, 1, c, pred=fresh)
    strip += fresh.to(gl.int32)
    return strip


# --- the entry ---------------------------------------------------------------------------------


@gluon.jit
def shared_of(C: gl.constexpr, copies, biases):
    """Return the Shared of a side of a block; all sides share the ring of the bias."""
    each: gl.constexpr = C.ROW_GROUPS * C.Q_STAGES
    qs = part_buffers(copies.q, each, C.D1)
    ks = part_buffers(copies.k, C.K_STAGES, C.D1)
    vs = part_buffers(copies.v, C.V_STAGES, C.DV1)
    mail = ring.mailbox(C.WARPGROUPS)
    q_ring = Ring(qs, ring.barriers(each, 1), ring.barriers(each, 1))
    k_ring = Ring(ks, ring.barriers(C.K_STAGES, 1), ring.barriers(C.K_STAGES, C.ROW_GROUPS))
    v_full = ring.full_barriers(C.V_STAGES, C.PADDED)
    v_ring = Ring(vs, v_full, ring.barriers(C.V_STAGES, C.WARPGROUPS))
    outs = qs.low
    if C.STAGED:
        outs = ring.tile_buffers(copies.out, C.WARPGROUPS)
    return Shared(q_ring, k_ring, v_ring, biases, outs, mail)


@gluon.jit
def forward(q0, q1, k0, k1, v0, v1, bias, out, t, n, C: gl.constexpr):
    """Compute out and lse.

    The first arguments are descriptors: of q, k and v in two parts, of a copied bias and of the
    output. Absent ones are None.
    """
    copies = Copies(Parts(q0, q1), Parts(k0, k1), Parts(v0, v1), bias, out)
    # an unused barrier would share memory with another buffer
    biases = 0
    if C.BIAS == "copied":
        tiles: gl.constexpr = C.WARPGROUPS * C.B_STAGES
        free: gl.constexpr = C.WARPGROUPS if C.STRIP else tiles
        biases = Ring(
            ring.tile_buffers(bias, tiles), ring.barriers(tiles, 1), ring.barriers(free, C.SIDES)
        )
    some = n.batch
    if C.MENDS:
        order = Order(t.table, t.ends, t.counter, n.heads, n.kv_heads, n.keys)
        some = gl.load(t.overflow) != 0
        if some:
            some = any_overflowed(C, order, t, n)
    R0: gl.constexpr = C.CONSUMER_REGISTERS
    R1: gl.constexpr = C.PRODUCER_REGISTERS
    a = shared_of(C, copies, biases)
    if C.SIDES == 4:
        b = shared_of(C, copies, biases)
        c = shared_of(C, copies, biases)
        d = shared_of(C, copies, biases)
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (consumer, (C, 0, copies, b, t, n)),
             (consumer, (C, 0, copies, c, t, n)), (consumer, (C, 0, copies, d, t, n)),
             (producer, (C, 0, copies, a, t, n, some)), (producer, (C, 1, copies, b, t, n, some)),
             (producer, (C, 2, copies, c, t, n, some)), (producer, (C, 3, copies, d, t, n, some))],
            [4, 4, 4, 1, 1, 1, 1], [R0, R0, R0, R1, R1, R1, R1],
        )  # fmt: skip
    elif C.SIDES == 2:
        b = shared_of(C, copies, biases)
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (consumer, (C, 1, copies, a, t, n)),
             (consumer, (C, 0, copies, b, t, n)), (consumer, (C, 1, copies, b, t, n)),
             (producer, (C, 0, copies, a, t, n, some)), (producer, (C, 1, copies, b, t, n, some))],
            [4, 4, 4, 1, 1], [R0, R0, R0, R1, R1],
        )  # fmt: skip
    elif C.WARPGROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (producer, (C, 0, copies, a, t, n, some))],
            [1], [R1],
        )  # fmt: skip
    elif C.WARPGROUPS == 2:
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (consumer, (C, 1, copies, a, t, n)),
             (producer, (C, 0, copies, a, t, n, some))],
            [4, 1], [R0, R1],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (consumer, (C, 1, copies, a, t, n)),
             (consumer, (C, 2, copies, a, t, n)), (producer, (C, 0, copies, a, t, n, some))],
            [4, 4, 1], [R0, R0, R1],
        )  # fmt: skip
