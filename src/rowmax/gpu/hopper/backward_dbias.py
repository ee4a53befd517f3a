"""dbias of a bias that sequences or heads share, and dq as a product of dbias.

A tile of the bias is resident; the tiles of all sequences and heads that share it are streamed:
``dbias_ij = sum P_ij (dP_ij - Delta_i)`` is summed in registers in one order. S and dP are computed
again: two products, where the fused kernel has five. No float32 sum is in memory. (A sum in memory,
to which the fused kernel added, was slower.)

A block holds 128 queries by 128 keys of the bias (64 of wide heads), 64 queries a warpgroup. Four
warpgroups hold 256 queries by 64 keys. For each sequence and head that shares it, Q and K arrive in
one ring of buffers, V and dO in another. Barriers of a block, with the arrivals that complete a
phase:

    barrier        arrivals                               waited for by
    qk.full[s]     producer's expect + bytes of Q and K   consumers, before S of the use
    qk.empty[s]    each consumer, S is made               producer, before it fills s again
    vdo.full[s]    producer's expect + bytes of V, dO,    consumers, before dP of the use
                   lse and delta
    vdo.empty[s]   each consumer, dP is made              producer, before it fills s again
    bias.full[t]   producer's expect + bytes of the bias  consumers, once a tile
    bias.empty[t]  each consumer, dbias is stored         producer, before it fills t again

dbias is stored from the buffer in which its bias arrived.

lse and delta are with V and dO, whose buffer is released when both have arrived. With Q and K it
was released when their loads were issued. Stores of the other warpgroup's sums delayed the loads:
the rows of the next tile were in the buffer first (at a head size of 32 on an H200).

A bias of few tiles would leave processors idle: 36 tiles of 384 x 384 positions and 4 heads. Then
several blocks compute a tile, each for a part of the sequences and heads that share it. They store
float32 sums, which ``sum_parts`` adds in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from ..rules import any_range
from .backward_lib import (
    Descriptors,
    follow,
    from_memory_order,
    issue_product,
    kept_of_queries,
    memory_by_row,
    own_rows,
    score_layout,
    weights,
)
from .backward_order import full_range, tile_of
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from .lib.order import Row
from .lib.ring import (
    Ring,
    barriers,
    release,
    slot,
    tile_at,
    tile_buffers,
    wait_empty,
    wait_full,
)
from .lib.rules import score_gradient
from .lib.scores import settled, widened


class Rings(NamedTuple):
    """The rings of a block. Rings filled by one barrier share it."""

    qk: Any  # Q's buffers; ``k`` has the same barriers
    k: Any
    vdo: Any  # V's buffers; ``do`` and ``rows`` (lse and delta) have the same barriers
    do: Any
    rows: Any
    bias: Any  # two buffers for each tile, one for each warpgroup


class Shared(NamedTuple):
    """The sequences and heads that share a plane of the bias, in runs.

    All form one run. Where sequences may see different keys, each sequence is a run.
    """

    heads: Any  # heads of the bias
    each: Any  # heads that share one head of the bias
    planes: Any  # sequences times heads of the bias
    runs: Any
    over: Any  # number of (sequence, head) pairs of a run
    each_q: Any  # 0 where all sequences share the documents, else 1
    each_k: Any


class Grid(NamedTuple):
    """The number of tiles of the bias."""

    down: Any  # tiles of queries of a plane
    across: Any  # tiles of keys
    tiles: Any  # tiles of all planes
    all: Any  # tiles of all planes and parts


class Place(NamedTuple):
    """A tile of the bias, and a part of what shares it."""

    first: Any  # its first query
    plane: Any
    t: Any  # its tile of keys
    part: Any
    nth: Any  # number of the tile among those of this block


class Portion(NamedTuple):
    """The runs, and in each run the pairs, that a block computes of a tile."""

    run: Any
    end_run: Any
    s: Any
    end: Any


class State(NamedTuple):
    """The values that a step passes to the next."""

    use: Any
    x: Any  # the sum of dbias [64, BLOCK_STREAMED]


@gluon.jit
def grid_of(C: gl.constexpr, shared, n):
    """Return the Grid of a bias ``[planes, nq, nk]``."""
    across = (n.nk + C.BLOCK_STREAMED - 1) // C.BLOCK_STREAMED
    down = (n.nq + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
    tiles = down * across * shared.planes
    total = tiles
    if n.parts is not None:
        total = tiles * n.parts
    return Grid(down, across, tiles, total)


@gluon.jit
def place_of(C: gl.constexpr, i, grid, nth, parts):
    """Return the Place of number i, the nth of this block. Blocks side by side have one part."""
    part = 0
    if parts is not None:
        part = i // grid.tiles
        i = i % grid.tiles
    row = i // grid.across
    first = row % grid.down * C.BLOCK_RESIDENT
    return Place(first, row // grid.down, i % grid.across, part, nth)


@gluon.jit
def portion_of(C: gl.constexpr, place, shared, n):
    """Return the Portion of a place."""
    many = shared.runs if C.RUNS else shared.over
    begin = 0
    end = many
    if n.parts is not None:
        begin = many * place.part // n.parts
        end = many * (place.part + 1) // n.parts
    if C.RUNS:
        return Portion(begin, end, 0, shared.over)
    return Portion(0, 1, begin, end)


@gluon.jit
def tile_of_run(C: gl.constexpr, place, run, shared, t, n):
    """Return (Tile, seen, alike) of the tile in the sequences of a run.

    seen: its queries may see its keys; alike: all of them are of one document.
    """
    b = place.plane // shared.heads + run
    tile = tile_of(C, Row(place.first, 0, b), t, n)
    seen = (place.t >= tile.lo) & (place.t < tile.hi)
    alike = seen
    if C.DOCUMENTS:
        down = (n.nq + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
        across = (n.nk + C.BLOCK_STREAMED - 1) // C.BLOCK_STREAMED
        of_q = t.q_range + 2 * (b * shared.each_q * down + place.first // C.BLOCK_RESIDENT)
        of_k = t.k_range + 2 * (b * shared.each_k * across + place.t)
        low, high = gl.load(of_q), gl.load(of_q + 1)
        least, greatest = gl.load(of_k), gl.load(of_k + 1)
        seen = seen & (low <= greatest) & (least <= high)
        alike = (low == high) & (least == greatest)
    return tile, seen, alike


@gluon.jit
def sharer(place, run, s, shared):
    """Return the s-th (sequence, head) of a run that shares a plane."""
    b = place.plane // shared.heads + run + s // shared.each
    return b, place.plane % shared.heads + s % shared.each


@gluon.jit
def own_bias(C: gl.constexpr, c: gl.constexpr, buffers, nth):
    """Return the warpgroup's half ``[64, BLOCK_STREAMED]`` of the nth tile of the bias."""
    return buffers.index(C.WARPGROUPS * slot(nth, C.BIAS_STAGES) + c)


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_step(C: gl.constexpr, descs, rings, place, b, head, use, n):
    """Load Q, K, lse and delta, V and dO of a sequence and head."""
    col = place.t * C.BLOCK_STREAMED
    kv_head = head // n.ratio
    s = slot(use, C.QK_STAGES)
    bar = rings.qk.full.index(s)
    wait_empty(rings.qk, use, C.QK_STAGES)
    mbarrier.expect(bar, descs.q.block_type.nbytes + descs.k.block_type.nbytes)
    tma_load(descs.q, [b, place.first, head, 0], bar, rings.qk.buffers.index(s))
    tma_load(descs.k, [b, col, kv_head, 0], bar, rings.k.index(s))
    u = slot(use, C.VDO_STAGES)
    bar = rings.vdo.full.index(u)
    wait_empty(rings.vdo, use, C.VDO_STAGES)
    both: gl.constexpr = descs.v.block_type.nbytes + descs.do.block_type.nbytes
    mbarrier.expect(bar, both + descs.rows.block_type.nbytes)
    tma_load(descs.rows, [b * n.hq + head, 0, place.first], bar, rings.rows.index(u))
    tma_load(descs.v, [b, col, kv_head, 0], bar, rings.vdo.buffers.index(u))
    tma_load(descs.do, [b, place.first, head, 0], bar, rings.do.index(u))


@gluon.jit
def producer(C: gl.constexpr, descs, rings, shared, t, n):
    """Load all tiles of this block into shared memory, in one warp."""
    use = 0
    nth = 0
    grid = grid_of(C, shared, n)
    i = gl.program_id(0)
    while i < grid.all:
        place = place_of(C, i, grid, nth, n.parts)
        bar = rings.bias.full.index(slot(nth, C.BIAS_STAGES))
        wait_empty(rings.bias, nth, C.BIAS_STAGES)
        mbarrier.expect(bar, C.WARPGROUPS * descs.bias.block_type.nbytes)
        for c in gl.static_range(C.WARPGROUPS):
            to = own_bias(C, c, rings.bias.buffers, nth)
            to = reinterpret(to, descs.bias.dtype, descs.bias.block_type.shape, descs.bias.layout)
            first = place.first + c * C.TOKENS
            tma_load(descs.bias, corner(C, place, first, shared), bar, to)
        nth += 1
        some = portion_of(C, place, shared, n)
        for run in range(some.run, some.end_run):
            _, seen, _ = tile_of_run(C, place, run, shared, t, n)
            for s in range(some.s, gl.where(seen, some.end, some.s)):
                b, head = sharer(place, run, s, shared)
                load_step(C, descs, rings, place, b, head, use, n)
                use += 1
        i += gl.num_programs(0)


@gluon.jit
def corner(C: gl.constexpr, place, first, shared):
    """Return the coordinates of a half tile from query ``first`` on, in the bias and in dbias."""
    b = place.plane // shared.heads
    head = place.plane % shared.heads
    return b, head, first, place.t * C.BLOCK_STREAMED


# --- the consumers -----------------------------------------------------------------------------


@gluon.jit
def load_rows(C: gl.constexpr, c: gl.constexpr, rows, s):
    """Return lse and delta of the warpgroup's queries ``[64]``, from buffer s."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = gl.SliceLayout(1, score_layout(C))
    both = reinterpret(rows.index(s), rows.dtype, [2, C.BLOCK_RESIDENT], flat)
    lse = both.index(0).slice(c * C.TOKENS, C.TOKENS).load(memory_by_row())
    delta = both.index(1).slice(c * C.TOKENS, C.TOKENS).load(memory_by_row())
    lse = gl.convert_layout(from_memory_order(lse, C.TOKENS), L)
    return lse, gl.convert_layout(from_memory_order(delta, C.TOKENS), L)


@gluon.jit
def step(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, place, pair, s, end, state, rings,
    tile, t, n,
):  # fmt: skip
    """Return the State with pair s of a run (b, head), whose pairs end before ``end``."""
    b, head = pair
    use = state.use
    a = slot(use, C.QK_STAGES)
    u = slot(use, C.VDO_STAGES)
    # use >> 30 is 0, which the compiler cannot derive
    k = tile_at(rings.k, a, C.BLOCK_STREAMED, C.D)
    q = own_rows(C, c, rings.qk.buffers, a + (use >> 30), C.D)
    S = issue_product(C, q, k)
    wait_full(rings.vdo, use, C.VDO_STAGES)
    v = tile_at(rings.vdo.buffers, u, C.BLOCK_STREAMED, C.DV)
    do = own_rows(C, c, rings.do, u + (use >> 30), C.DV)
    dp = issue_product(C, do, v)
    S = warpgroup_mma_wait(1, deps=[S])
    release(rings.qk, use, C.QK_STAGES)
    lse, delta = load_rows(C, c, rings.rows, u)
    # the 0 again: no registers are free to keep the tile of the bias
    bias = own_bias(C, c, rings.bias.buffers, place.nth + (use >> 30)).load(score_layout(C))
    bias = widened(bias)
    dtype: gl.constexpr = rings.k.dtype
    less = lse[:, None]
    p, _ = weights(C, MASKED, c, S, less, bias, place.t, head, tile, t, n, dtype)
    after = use + 1
    # begins a basic block, so that the exponentials overlap with the product
    wait_full(rings.qk, after, C.QK_STAGES, pred=s + 1 < end)
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = settled(delta, 2)
    release(rings.vdo, use, C.VDO_STAGES)
    dp = kept_of_queries(C, dp, place.first + c * C.TOKENS, place.t, head, b, t, n)
    ds = score_gradient(p, dp, delta[:, None])
    if MASKED and C.PREFIX:  # values past a length may be NaN
        ds = gl.where(p == 0.0, 0.0, ds)
    return State(after, state.x + ds)


@gluon.jit
def add_run(
    C: gl.constexpr, c: gl.constexpr, place, first, run, some, state, rings, shared, t, n
):  # fmt: skip
    """Return the State after a run; ``first`` is the warpgroup's first query."""
    tile, seen, alike = tile_of_run(C, place, run, shared, t, n)
    seen = seen & (some.s < some.end)
    wait_full(rings.qk, state.use, C.QK_STAGES, pred=seen)
    full = full_range(C, first, tile, t, n)
    whole = (place.t >= full.begin) & (place.t < full.end) & alike
    if C.MASKS:
        for s in range(some.s, gl.where(seen & (whole == 0), some.end, some.s)):
            pair = sharer(place, run, s, shared)
            state = step(C, True, c, place, pair, s, some.end, state, rings, tile, t, n)
    for s in range(some.s, gl.where(seen & whole, some.end, some.s)):
        pair = sharer(place, run, s, shared)
        state = step(C, False, c, place, pair, s, some.end, state, rings, tile, t, n)
    return state


@gluon.jit
def store_part(C: gl.constexpr, c: gl.constexpr, x, to, place, shared, n):
    """Store the sum x ``[64, BLOCK_STREAMED]`` of a part in ``[parts, planes, nq, nk]``."""
    L: gl.constexpr = x.type.layout
    first = place.first + c * C.TOKENS
    plane = (place.part * shared.planes + place.plane).to(gl.int64)
    to += (plane * n.nq + first) * n.nk + place.t * C.BLOCK_STREAMED
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    j = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    inside = (r < n.nq - first)[:, None] & (j < n.nk - place.t * C.BLOCK_STREAMED)[None, :]
    gl.store(to + (r * n.nk)[:, None] + j[None, :], x, mask=inside)


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, dbias, rings, shared, t, n):
    """Compute dbias of queries ``64 c`` to ``64 c + 63`` of every tile of this block."""
    use = 0
    nth = 0
    grid = grid_of(C, shared, n)
    i = gl.program_id(0)
    while i < grid.all:
        place = place_of(C, i, grid, nth, n.parts)
        first = place.first + c * C.TOKENS
        wait_full(rings.bias, nth, C.BIAS_STAGES)
        x = gl.full([C.TOKENS, C.BLOCK_STREAMED], 0.0, gl.float32, score_layout(C))
        state = State(use, x)
        some = portion_of(C, place, shared, n)
        for run in range(some.run, some.end_run):
            state = add_run(C, c, place, first, run, some, state, rings, shared, t, n)
        use = state.use
        if t.parts is not None:
            store_part(C, c, state.x, t.parts, place, shared, n)
        else:
            own = own_bias(C, c, rings.bias.buffers, nth)
            own.store(state.x.to(dbias.dtype))
            fence_async_shared()
            half = reinterpret(own, dbias.dtype, dbias.block_type.shape, dbias.layout)
            tma_store(dbias, corner(C, place, first, shared), half)
            tma_store_wait(0)
        release(rings.bias, nth, C.BIAS_STAGES)
        nth += 1
        i += gl.num_programs(0)


# --- the kernel --------------------------------------------------------------------------------


@gluon.jit
def backward_dbias(q, do, k, v, rows, bias, dbias, t, n, C: gl.constexpr):
    """Run the partitions of a block.

    The arguments are descriptors of copies (rows are lse and delta), ``backward_args.Pointers`` and
    ``Numbers``.
    """
    descs = Descriptors(q, do, k, v, rows, bias)
    box: gl.constexpr = [C.TOKENS, C.BLOCK_STREAMED]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, bias.dtype)
    qs = tile_buffers(q, C.QK_STAGES)
    ks = tile_buffers(k, C.QK_STAGES)
    stats = tile_buffers(rows, C.VDO_STAGES)
    vs = tile_buffers(v, C.VDO_STAGES)
    dos = tile_buffers(do, C.VDO_STAGES)
    biases = gl.allocate_shared_memory(bias.dtype, [C.BIAS_STAGES * C.WARPGROUPS] + box, layout)
    qk = Ring(qs, barriers(C.QK_STAGES, 1), barriers(C.QK_STAGES, C.WARPGROUPS))
    vdo = Ring(vs, barriers(C.VDO_STAGES, 1), barriers(C.VDO_STAGES, C.WARPGROUPS))
    own = Ring(biases, barriers(C.BIAS_STAGES, 1), barriers(C.BIAS_STAGES, C.WARPGROUPS))
    rings = Rings(qk, ks, vdo, dos, stats, own)
    fence_async_shared()
    heads = n.each_h * (n.hq - 1) + 1
    batch = n.each_b * (n.batch - 1) + 1
    each = n.hq // heads
    many = n.batch // batch
    runs = 1
    over = each * many
    if C.RUNS:
        runs = many
        over = each
    own_q, own_k = gl.where(n.ids_q > 0, 1, 0), gl.where(n.ids_k > 0, 1, 0)
    shared = Shared(heads, each, heads * batch, runs, over, own_q, own_k)
    follow()
    R1: gl.constexpr = C.PRODUCER_REGISTERS
    R0: gl.constexpr = C.CONSUMER_REGISTERS
    if C.WARPGROUPS == 4:
        gl.warp_specialize(
            [
                (consumer, (C, 0, dbias, rings, shared, t, n)),
                (consumer, (C, 1, dbias, rings, shared, t, n)),
                (consumer, (C, 2, dbias, rings, shared, t, n)),
                (consumer, (C, 3, dbias, rings, shared, t, n)),
                (producer, (C, descs, rings, shared, t, n)),
            ],
            [4, 4, 4, 1],
            [R0, R0, R0, R1],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, dbias, rings, shared, t, n)),
                (consumer, (C, 1, dbias, rings, shared, t, n)),
                (producer, (C, descs, rings, shared, t, n)),
            ],
            [4, 1],
            [R0, R1],
        )


# --- dq, where dS is in memory because it is dbias ----------------------------------------------


@triton.jit
def keys_of(t, n, c, b, first):
    """Return (lo, end): the keys that some query of a tile sees; lo is a multiple of COLUMNS."""
    used = n.nk
    if t.lengths is not None:
        used = tl.maximum(tl.minimum(used, tl.load(t.lengths + b)), 0)
    last = tl.minimum(first + c.ROWS, n.nq) - 1
    left = n.left if c.LEFT else None
    right = n.right if c.RIGHT else None
    lo, end = any_range(first, last, n.nk - n.nq, left, right, used)
    return lo // c.COLUMNS * c.COLUMNS, end


@triton.jit
def dq_of_dbias(t, n, c):
    """Store ``dq = scale dS K`` of a tile of queries of a head.

    The tiles that were stored last are still in L2 and come first.

    Nothing is added to memory, so no block waits for another, and every run returns the same. dbias
    is rounded as dS would be.
    """
    gdc_wait()
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = i % n.tiles
    plane = i // n.tiles
    b = plane // n.hq
    head = plane % n.hq
    first = tile * c.ROWS
    lo, end = keys_of(t, n, c, b, first)
    # columns are read in eights; past the end dS is zero, but K may be NaN
    end8 = (end + 7) // 8 * 8
    row = first + tl.arange(0, c.ROWS)
    col = tl.arange(0, c.COLUMNS)
    d = tl.arange(0, c.BLOCK_D)
    at = (plane.to(tl.int64) * n.nq + tl.minimum(row, n.nq - 1)) * n.stride_q
    of_rows = t.dbias + (8 * at)[:, None] + col[None, :]
    at = b.to(tl.int64) * n.stride_b + (head // n.ratio).to(tl.int64) * n.stride_h
    of_keys = t.k + 8 * at + (8 * (col.to(tl.int64) * n.stride_n))[:, None] + d[None, :]
    x = tl.zeros([c.ROWS, c.BLOCK_D], tl.float32)
    for j in range(lo, end, c.COLUMNS):
        ds = tl.load(of_rows + j, mask=(j + col < end8)[None, :], other=0.0)
        there = (j + col < end)[:, None] & (d < c.D)[None, :]
        k = tl.load(of_keys + (8 * (j * n.stride_n.to(tl.int64))), mask=there, other=0.0)
        x = tl.dot(ds, k, x)
    at = ((b.to(tl.int64) * n.nq + row) * n.hq + head) * c.D
    there = (row < n.nq)[:, None] & (d < c.D)[None, :]
    tl.store(t.dq + at[:, None] + d[None, :], (x * n.scale).to(t.dq.dtype.element_ty), mask=there)
