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

from ...rules.score import ScoreTerms
from .forward_results import place_of_lse, store_lse, store_output
from .gluon_compat import (
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .lib import ring, rules
from .lib.assembly import SPLIT_PRODUCT, scale_constraints, scale_text, turn_text
from .lib.clocks import mark, mark_time
from .lib.layouts import product_layout, weight_layout
from .lib.order import Order, Row, Sequences, Tile, first_place, next_place, row_ahead, row_at
from .lib.parts import (
    Parts,
    cleared_parts,
    issue_over_columns,
    issue_with_columns,
    load_parts,
    part_buffers,
    parts_at,
    wait_parts,
)
from .lib.ring import Mailbox, Ring
from .lib.scores import columns, lanes, rows_of, settled, widened
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


class Pointers(NamedTuple):
    """``t``: the tensors that the kernel reads and writes without TMA.

    None is a constant: the kernel has no code for absent features.
    """

    out: Any
    lse: Any
    table: Any  # the order of the tiles (lib/order.py), each block's end, and the counter
    ends: Any
    counter: Any = None
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # documents.Spans, with the ranges
    q_range: Any = None
    k_range: Any = None
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None  # [Hq]
    sink: Any = None
    bias: Any = None  # unless TMA copies it
    overflow: Any = None  # LAGS, MENDS: not 0 since some row of this plan overflowed
    clocks: Any = None  # lib/clocks.py


class Numbers(NamedTuple):
    """``n``: numbers at run time."""

    heads: Any  # query heads, or kv heads where a tile holds all query heads of one
    kv_heads: Any
    keys: Any  # keys and values of a head that fill their share of the L2 cache
    nq: Any
    nk: Any
    left: Any  # None: no limit
    right: Any
    batch: Any
    scale: Any  # the factor of a score in the exponential, or before other terms
    inner: Any  # the factor inside a softcap
    bias_b: Any
    bias_h: Any
    bias_q: Any
    bias_k: Any
    ids_q: Any  # number of ids of a sequence, 0 where all sequences share them
    ids_k: Any
    each_b: Any  # 0 where all sequences (each_h: all heads) share the copied bias, else 1
    each_h: Any
    hq: Any
    ratio: Any  # heads of a tile that share a kv head
    total_q: Any
    shift: Any  # for ALiBi's distances in a block of a longer call; None: 0


class Copies(NamedTuple):
    """The descriptors of TMA copies, or None."""

    q: Parts
    k: Parts
    v: Parts
    bias: Any
    out: Any


class Shared(NamedTuple):
    """The shared memory of a block. Each warpgroup has its own rings of q and of the bias."""

    q: Ring
    k: Ring
    v: Ring
    bias: Ring
    out: Any
    mail: Mailbox


class Source(NamedTuple):
    """The place of a tile's keys and values: sequence, first row, kv head, and number."""

    part: Any
    row: Any
    head: Any
    nk: Any


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


# --- tiles -------------------------------------------------------------------------------------


@gluon.jit
def tile_of(C: gl.constexpr, row, t, n):
    """Return the tile of a row."""
    token, head, b = row
    nq = n.nq
    nk = n.nk
    q_row, k_row = 0, 0
    if C.VARLEN:
        q_row = gl.load(t.cu_q + b)
        k_row = gl.load(t.cu_k + b)
        nq = gl.load(t.cu_q + b + 1) - q_row
        nk = gl.load(t.cu_k + b + 1) - k_row
    offset = nk - nq
    if C.PREFIX:
        nk = gl.minimum(nk, gl.load(t.lengths + b))
    last = gl.minimum(token + C.TILE, nq) - 1
    low, high = rules.any_range(token, last, offset, n.left, n.right, nk)
    if C.DOCUMENTS:
        tiles = (n.nq + C.TILE - 1) // C.TILE
        at = t.spans + 2 * (b * tiles + token // C.TILE)
        low = gl.maximum(low, gl.load(at))
        high = gl.minimum(high, gl.load(at + 1))
    lo, hi = rules.key_tiles(low, high, C.BLOCK_K)
    return Tile(token, head, b, q_row, k_row, nq, nk, offset, lo, hi)


@gluon.jit
def full_range(C: gl.constexpr, first, tile, n):
    """Return (low, high): the keys that all queries of a warpgroup, from ``first`` on, see."""
    last = first + C.TOKENS - 1
    return rules.all_range(first, last, tile.offset, n.left, n.right, tile.nk)


# --- tiles to mend -----------------------------------------------------------------------------


@gluon.jit
def overflowed(C: gl.constexpr, COUNT: gl.constexpr, place, end, order, sequences, t, n):
    """Return True if a row of COUNT tiles, a stride apart from ``place`` on, has NaN as its lse."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    places = place + gl.arange(0, COUNT, gl.SliceLayout(1, L)) * gl.num_programs(0)
    there = places < end
    token, head, b = row_at(C, gl.where(there, places, place), order, sequences)
    q_row, nq = 0 * token, n.nq + 0 * token
    if C.VARLEN:
        q_row = gl.load(t.cu_q + b)
        nq = gl.load(t.cu_q + b + 1) - q_row
    nq = gl.where(there, nq, 0)[:, None]
    r = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    found = gl.full([COUNT, 64], 0, gl.int32, L)
    for c in gl.static_range(C.WARPGROUPS):
        first = (token + c * C.TOKENS)[:, None]
        at, row = place_of_lse(C, first, head[:, None], b[:, None], q_row[:, None], r, n)
        lse = gl.load(t.lse + at, mask=row < nq, other=0.0)
        found = found | (lse != lse).to(gl.int32)
    return gl.max(gl.max(found, 1), 0) != 0


@gluon.jit
def any_overflowed(C: gl.constexpr, order, sequences, t, n):
    """Return True if a row of this block's tiles has NaN as its lse: many tiles at a time."""
    COUNT: gl.constexpr = 16
    place, end = first_place(C, order)
    found = place < 0
    while place < end:
        found = found | overflowed(C, COUNT, place, end, order, sequences, t, n)
        place += COUNT * gl.num_programs(0)
    return found


@gluon.jit
def next_overflowed(C: gl.constexpr, place, end, order, sequences, t, n):
    """Return the first place of this block from ``place`` on whose tile has such a row."""
    going = place < end
    while going:
        clean = overflowed(C, 1, place, end, order, sequences, t, n) == 0
        place += gl.where(clean, gl.num_programs(0), 0)
        going = clean & (place < end)
    return place


# --- the producer ------------------------------------------------------------------------------


@gluon.jit
def load_queries(C: gl.constexpr, copies, shared, tile, number):
    """Copy 64 rows of queries to each warpgroup: TOKENS positions of each of the GROUP heads."""
    for c in gl.static_range(C.ROW_GROUPS):
        i = c * C.Q_STAGES + ring.slot(number, C.Q_STAGES)
        ring.wait_empty(shared.q, number, C.Q_STAGES, c)
        part = 0 if C.VARLEN else tile.b
        corner = (part, tile.q_row + tile.token + c * C.TOKENS, tile.head, 0)
        load_parts(copies.q, corner, C.D0, C.D1, shared.q.full.index(i), shared.q.buffers, i)


@gluon.jit
def load_keys(C: gl.constexpr, side: gl.constexpr, copies, shared, source, tile, j, use, n):
    """Copy keys of tile j, and the bias of all sides, as use ``use`` of their rings."""
    s = ring.slot(use, C.K_STAGES)
    ring.wait_empty(shared.k, use, C.K_STAGES)
    corner = (source.part, source.row + j * C.BLOCK_K, source.head)
    load_parts(copies.k, corner, C.D0, C.D1, shared.k.full.index(s), shared.k.buffers, s)
    if C.BIAS == "copied" and not C.STRIP and side == 0:
        for c in gl.static_range(C.WARPGROUPS):
            ring.wait_empty(shared.bias, use, C.B_STAGES, c)
            i = c * C.B_STAGES + ring.slot(use, C.B_STAGES)
            copy_bias(C, c, copies, shared.bias, tile, j, i, n)


@gluon.jit
def copy_bias(C: gl.constexpr, c: gl.constexpr, copies, biases, tile, j, i, n):
    """Copy the bias of a warpgroup's queries and key tile j into buffer i."""
    bar = biases.full.index(i)
    mbarrier.expect(bar, copies.bias.block_type.nbytes)
    corner = [tile.b * n.each_b, tile.head * n.each_h, tile.token + 64 * c, j * C.BLOCK_K]
    tma_load(copies.bias, corner, bar, biases.buffers.index(i))


@gluon.jit
def other_strip(a, b, n):
    """Return True if two tiles read the bias of other queries, heads or sequences."""
    other = (a.token != b.token) | (a.head * n.each_h != b.head * n.each_h)
    return other | (a.b * n.each_b != b.b * n.each_b)


@gluon.jit
def load_strip(C: gl.constexpr, copies, biases, tile, strip, n):
    """Copy the bias of a tile's queries and all keys, as strip ``strip``; the last keys first."""
    for c in gl.static_range(C.WARPGROUPS):
        ring.wait_empty(biases, strip, 1, c)
    for i in range(C.STRIP):
        j = C.STRIP - 1 - i
        for c in gl.static_range(C.WARPGROUPS):
            copy_bias(C, c, copies, biases, tile, j, c * C.STRIP + j, n)


@gluon.jit
def load_values(C: gl.constexpr, copies, shared, source, j, use, cut):
    """Copy values of tile j, as use ``use`` of their ring.

    Return the number of short tiles so far; ``cut`` were before this one.
    """
    v = shared.v
    s = ring.slot(use, C.V_STAGES)
    rows = gl.maximum(source.nk - j * C.BLOCK_K, 0)
    short = rows < C.BLOCK_K
    bar = ring.landing(v.full, s, C.V_STAGES, C.PADDED, short)
    ring.wait_empty(v, use, C.V_STAGES)
    corner = (source.part, source.row + j * C.BLOCK_K, source.head)
    load_parts(copies.v, corner, C.DV0, C.DV1, bar, v.buffers, s)
    if C.PADDED:
        cleared_parts(v.full, s, C.V_STAGES, v.buffers, C.BLOCK_K, C.DV0, C.DV1, rows, cut)
        cut += short.to(gl.int32)
    return cut


@gluon.jit
def producer(C: gl.constexpr, side: gl.constexpr, copies, shared, t, n, some):
    """Copy every tile of a side of this block, in the order in which buffers become free.

    Keys are free a softmax and a product earlier than the values of the key tile before. MENDS:
    only tiles to mend, and none unless there are ``some``.
    """
    order = Order(t.table, t.ends, t.counter, n.heads, n.kv_heads, n.keys)
    sequences = Sequences(t.cu_q, t.cu_k, n.batch)
    place, end = first_place(C, order, side)
    if C.MENDS:
        end = gl.where(some, end, 0)
        place = next_overflowed(C, place, end, order, sequences, t, n)
    number = 0  # number of the tile and of its message
    use = 0
    # in an order that the host made every block has a tile
    here = gl.where(place < end, place, 0) if C.SOUGHT else place
    tile = tile_of(C, row_at(C, here, order, sequences), t, n)
    # the next tile is loaded early, because a load from memory is slow
    coming = Row(tile.token, tile.head, tile.b)
    if not C.SOUGHT:
        coming = row_ahead(C, place, end, order, sequences)
    ring.post_message(shared.mail, 0, tile, place < end)
    cut = 0
    strip = 0
    fresh = True  # the tile begins a strip of the bias
    behind = Source(0, 0, 0, 0)  # the tile before; its values of key tile ``last`` come next
    last = 0
    while place < end:
        part = tile.b * 0 if C.VARLEN else tile.b
        source = Source(part, tile.k_row, tile.head // n.ratio, tile.nk)
        lo = tile.lo
        hi = tile.hi
        load_keys(C, side, copies, shared, source, tile, hi - 1, use, n)
        if number:
            cut = load_values(C, copies, shared, behind, last, use - 1, cut)
        load_queries(C, copies, shared, tile, number)
        if C.STRIP and side == 0:  # noqa: SIM102  (the first is a constant)
            if fresh:
                load_strip(C, copies, shared.bias, tile, strip, n)
                strip += 1
        # the message of the next tile is posted early
        this = tile
        here = place
        place = next_place(C, place, order)
        if C.MENDS:
            place = next_overflowed(C, place, end, order, sequences, t, n)
        if C.SOUGHT:
            coming = row_at(C, gl.where(place < end, place, here), order, sequences)
        tile = tile_of(C, coming, t, n)
        if C.STRIP and side == 0:
            fresh = other_strip(this, tile, n)
        ring.post_message(shared.mail, number + 1, tile, place < end)
        if not C.SOUGHT:
            coming = row_ahead(C, place, end, order, sequences)
        behind = source
        last = lo
        use += 1
        for i in range(lo + 1, hi):
            j = hi - 1 - i + lo
            mark(C, t.clocks, C.WARPGROUPS, use, 0)
            load_keys(C, side, copies, shared, source, this, j, use, n)
            mark(C, t.clocks, C.WARPGROUPS, use, 1)
            cut = load_values(C, copies, shared, behind, j + 1, use - 1, cut)
            mark(C, t.clocks, C.WARPGROUPS, use, 2)
            use += 1
        number += 1
    if number:
        load_values(C, copies, shared, behind, last, use - 1, cut)


# --- scores ------------------------------------------------------------------------------------


@gluon.jit
def scores(C: gl.constexpr, S, copied, j, first, tile, t, n, dtype: gl.constexpr):
    """Return the scores without the mask, ``[64, BLOCK_K/8, 4, 2]``, of the product S.

    ``copied`` is the tile of a bias. The exponential scales the scores, unless a term is added:
    then they are scaled here, without the log2(e) of the exponential, or in Q (ONTO_BIAS).
    """
    S = by_lane(S)
    if not C.ONTO_BIAS:
        S = with_terms(C, S, copied, j, first, tile, t, n, dtype)
    return S


@gluon.jit
def with_terms(C: gl.constexpr, S, copied, j, first, tile, t, n, dtype: gl.constexpr):
    """Return products S with the terms of ``rules/score.py``."""
    L: gl.constexpr = S.type.layout
    bias, slope, distance = None, None, None
    if C.BIAS == "copied":
        bias = by_lane(widened(copied))
    elif C.BIAS != "":
        bias = gathered(C, L, j, first, tile, t, n).to(gl.float32)
    if C.ALIBI:
        r = rows_of(L)
        slope = gl.load(t.alibi + tile.head * C.GROUP + r % C.GROUP)
        at = first + tile.offset
        if n.shift is not None:
            at += n.shift
        here = (at + r // C.GROUP - j * C.BLOCK_K - lanes(L)).to(gl.float32)
        slope = along_row(slope + 0.0 * here)
        distance = gl.abs(along_row(here) - columns(C.BLOCK_K, L).to(gl.float32))
    scale = n.scale if C.ADDED else None
    inner = n.inner if C.SOFTCAP else None
    p = ScoreTerms(scale, inner, n.scale if C.ADDED else 1.0, bias, distance, slope)
    if dtype == gl.bfloat16:
        S, y = rules.score_bfloat16(S, p)
    else:
        S, y = rules.score_float16(S, p)
    return S


@gluon.jit
def gathered(C: gl.constexpr, L: gl.constexpr, j, first, tile, t, n):
    """Return a bias from global memory.

    Each number is loaded once for all scores of a thread that share it.
    """
    row = rows_of(L)
    column = columns(C.BLOCK_K, L) + along_row(lanes(L))
    at = t.bias + tile.b.to(gl.int64) * n.bias_b + (tile.head * C.GROUP).to(gl.int64) * n.bias_h
    if C.BIAS == "row":  # all queries share it
        at = at + (j * C.BLOCK_K).to(gl.int64) * n.bias_k
        there = column < tile.nk - j * C.BLOCK_K
        x = gl.load(at + column * n.bias_k, mask=there, other=0.0)
    else:
        at = at + first.to(gl.int64) * n.bias_q
        within = row // C.GROUP * n.bias_q + (row % C.GROUP).to(gl.int64) * n.bias_h
        there = first + row // C.GROUP < tile.nq
        if C.BIAS == "column":  # all keys share it
            x = along_row(gl.load(at + within, mask=there, other=0.0))
        else:
            at = at + (j * C.BLOCK_K).to(gl.int64) * n.bias_k
            there = along_row(there) & (column < tile.nk - j * C.BLOCK_K)
            x = gl.load(at + along_row(within) + column * n.bias_k, mask=there, other=0.0)
    return x


@gluon.jit
def masked(C: gl.constexpr, S, j, first, tile, t, n):
    """Return scores S ``[64, BLOCK_K/8, 4, 2]`` of key tile j, -inf where the mask forbids a pair.

    A thread's column is a constant plus parts that depend on the lane and the tile. These parts are
    on the other side of the comparison: two limits a thread, and no register for a column.
    """
    L: gl.constexpr = S.type.layout
    col = columns(C.BLOCK_K, L)
    before = j * C.BLOCK_K + lanes(L)
    at = first + rows_of(L) // C.GROUP + tile.offset
    if C.RIGHT:
        limit = gl.minimum(at + n.right + 1, tile.nk) - before
    else:
        limit = tile.nk - before
    seen = col < along_row(limit)
    if C.LEFT:
        seen = seen & (col >= along_row(at - n.left - before))
    if C.DOCUMENTS:
        row = first + rows_of(L) // C.GROUP
        of_row = gl.load(t.q_ids + tile.b * n.ids_q + row, mask=row < tile.nq, other=0)
        key = col + along_row(before)
        of_key = gl.load(t.k_ids + tile.b * n.ids_k + key, mask=key < tile.nk, other=0)
        seen = seen & (of_key == along_row(of_row))
    return gl.where(seen, S, float("-inf"))


@gluon.jit
def partial(C: gl.constexpr, j, first, tile, t, n):
    """Return True if a mask with documents may forbid a pair of key tile j."""
    # ranges are kept for each sequence where ids are, else once for all
    b = tile.b
    tiles_q = (tile.nq + C.TOKENS - 1) // C.TOKENS
    tiles_k = (n.nk + C.BLOCK_K - 1) // C.BLOCK_K
    q_at = t.q_range + 2 * ((b if n.ids_q else 0) * tiles_q + first // C.TOKENS)
    k_at = t.k_range + 2 * ((b if n.ids_k else 0) * tiles_k + j)
    here = first < tile.nq
    id = gl.load(q_at, mask=here, other=0)
    some = id != gl.load(q_at + 1, mask=here, other=0)
    some = some | (id != gl.load(k_at)) | (id != gl.load(k_at + 1))
    low, high = full_range(C, first, tile, n)
    some = some | (j * C.BLOCK_K + C.BLOCK_K > high)
    if C.LEFT:
        some = some | (j * C.BLOCK_K < low)
    return some


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
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, j, use, number, state, tile, shared,
    t, n,
):  # fmt: skip
    """Compute the scores of key tile j, and the output of the one before under its softmax."""
    first = tile.token + c * C.TOKENS
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
        if C.DOCUMENTS:
            if partial(C, j, first, tile, t, n):
                S = masked(C, S, j, first, tile, t, n)
        else:
            S = masked(C, S, j, first, tile, t, n)
    scale = LOG2E if C.ADDED else n.scale
    SKIPS: gl.constexpr = C.SKIPS and not MASKED
    if C.LAGS and not MASKED:
        p, l, s = lagging_step(S, m, l, scale, C.ROUND_LATE, dtype)
    else:
        p, m, l, alpha = softmax_step(S, m, l, scale, C.NATURAL, C.ROUND_LATE, dtype)
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
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, begin, end, use, number, state, tile,
    shared, t, n,
):  # fmt: skip
    """Compute key tiles end - 1 to ``begin``, and return (use, state) after them."""
    for i in range(begin, end):
        j = end - 1 - i + begin
        use, state = step(C, MASKED, c, j, use, number, state, tile, shared, t, n)
    return use, state


@gluon.jit
def first_weights(C: gl.constexpr, c: gl.constexpr, S, copied, tile, t, n, dtype: gl.constexpr):
    """Return (p, m, l, s) of a query tile's first step: its last key tile, with every limit."""
    first = tile.token + c * C.TOKENS
    j = tile.hi - 1
    S = scores(C, S, copied, j, first, tile, t, n, dtype)
    if C.RIGHT or C.LEFT or C.DOCUMENTS or not C.EVEN_K:
        S = masked(C, S, j, first, tile, t, n)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, S.type.layout))
    lowest: gl.constexpr = LOWEST_NATURAL if C.NATURAL else LOWEST
    m = gl.full([64, 4], FIRST if C.ONTO_BIAS else lowest, gl.float32, rows)
    l = gl.full([64, 4], 0.0, gl.float32, rows)
    scale = LOG2E if C.ADDED else n.scale
    s = gl.full([64, 4], 0.0, gl.float32, rows)
    if C.FIRST_LAGS:
        p, l, s = lagging_step(S, m, l, scale, False, dtype)
    else:
        p, m, l, alpha = softmax_step(S, m, l, scale, C.NATURAL, False, dtype)
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
    first = tile.token + c * C.TOKENS
    lo = tile.lo
    end = tile.hi - 1
    ring.wait_full(shared.k, use, C.K_STAGES, pred=lo < end)
    if C.DOCUMENTS:  # any tile may be partial, so each is tested
        use, state = steps(C, True, c, lo, end, use, number, state, tile, shared, t, n)
    else:
        full = lo
        full_end = end
        if C.LEFT or C.RIGHT:
            # without filled_tiles, whose scalars spill at head size 256
            low, high = full_range(C, first, tile, n)
            if C.RIGHT:
                if C.LAGS:  # the tile with the last key of the first row, so that m exists
                    high -= 1
                full_end = gl.minimum(gl.maximum(high // C.BLOCK_K, lo), end)
            if C.LEFT:
                full = gl.minimum(gl.maximum((low + C.BLOCK_K - 1) // C.BLOCK_K, lo), full_end)
        if C.RIGHT:
            use, state = steps(C, True, c, full_end, end, use, number, state, tile, shared, t, n)
        use, state = steps(C, False, c, full, full_end, use, number, state, tile, shared, t, n)
        if C.LEFT:
            use, state = steps(C, True, c, lo, full, use, number, state, tile, shared, t, n)
    return use, state


@gluon.jit
def consumer(C: gl.constexpr, c: gl.constexpr, copies, shared, t, n):
    """Compute rows ``64 c`` to ``64 c + 63`` of every tile of this block, in warpgroup c."""
    tile, live = ring.read_message(shared.mail, 0)
    ring.release_message(shared.mail, 0, tile, live)
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
def shared_of(C: gl.constexpr, copies):
    """Return (q, k, v, out, mail) of a side of a block (``Shared``)."""
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
    return q_ring, k_ring, v_ring, outs, mail


@gluon.jit
def forward(q0, q1, k0, k1, v0, v1, bias, out, t, n, C: gl.constexpr):
    """Compute out and lse.

    The first arguments are descriptors: of q, k and v in two parts, of a copied bias and of the
    output. Absent ones are None.
    """
    copies = Copies(Parts(q0, q1), Parts(k0, k1), Parts(v0, v1), bias, out)
    # an unused barrier would share memory with another buffer
    biases = None
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
            some = any_overflowed(C, order, Sequences(t.cu_q, t.cu_k, n.batch), t, n)
    R0: gl.constexpr = C.CONSUMER_REGISTERS
    R1: gl.constexpr = C.PRODUCER_REGISTERS
    q, k, v, outs, mail = shared_of(C, copies)
    a = Shared(q, k, v, biases, outs, mail)
    if C.SIDES == 4:
        q, k, v, outs, mail = shared_of(C, copies)
        b = Shared(q, k, v, biases, outs, mail)
        q, k, v, outs, mail = shared_of(C, copies)
        c = Shared(q, k, v, biases, outs, mail)
        q, k, v, outs, mail = shared_of(C, copies)
        d = Shared(q, k, v, biases, outs, mail)
        fence_async_shared()
        gl.warp_specialize(
            [(consumer, (C, 0, copies, a, t, n)), (consumer, (C, 0, copies, b, t, n)),
             (consumer, (C, 0, copies, c, t, n)), (consumer, (C, 0, copies, d, t, n)),
             (producer, (C, 0, copies, a, t, n, some)), (producer, (C, 1, copies, b, t, n, some)),
             (producer, (C, 2, copies, c, t, n, some)), (producer, (C, 3, copies, d, t, n, some))],
            [4, 4, 4, 1, 1, 1, 1], [R0, R0, R0, R1, R1, R1, R1],
        )  # fmt: skip
    elif C.SIDES == 2:
        q, k, v, outs, mail = shared_of(C, copies)
        b = Shared(q, k, v, biases, outs, mail)
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
