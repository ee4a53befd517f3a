"""The parts that several backward kernels share: records, layouts, weights, stores.

A warpgroup holds scores with its 64 resident rows down and the streamed rows across.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...rules.score import ScoreTerms
from .backward_order import (
    first_place,
    next_place,
    place_tile,
    plane_of,
    resident_head,
    steps_of_pass,
)
from .gluon_compat import mbarrier, reinterpret, warpgroup_mma
from .lib import ring
from .lib.assembly import publish_text
from .lib.dropout import drawn_bits, first_draw, kept_columns, kept_rows, rows_of_draws
from .lib.layouts import output_layout
from .lib.rules import product_gradient, score_bfloat16, score_float16
from .lib.scores import columns, lanes, rows_of
from .lib.softmax import LOG2E, along_row, by_lane


class Descriptors(NamedTuple):
    """The descriptors of a kernel's copies; rows are lse and delta."""

    q: Any
    do: Any
    k: Any
    v: Any
    rows: Any = None
    bias: Any = None


@gluon.jit
def first_tile(C: gl.constexpr, mail, kv_heads, t, n):
    """Post the first tile to all partitions; return (its place, end of places, Tile)."""
    place, end = first_place(C, t, n)
    here = gl.where(place < end, place, 0) if C.DRAWN else place
    tile = place_tile(C, here, kv_heads, t, n)
    ring.post_message(mail, 0, tile, place < end)
    return place, end, tile


@gluon.jit
def next_tile(C: gl.constexpr, here, end, message, mail, kv_heads, t, n):
    """Post the tile after place ``here`` to all partitions; return (its place, Tile)."""
    place = next_place(C, here, t)
    tile = place_tile(C, gl.where(place < end, place, here), kv_heads, t, n)
    ring.post_message(mail, message, tile, place < end)
    return place, tile


@gluon.jit
def steps_before_draw(steps, stages):
    """Return the steps of a tile that are loaded before the block draws its next tile.

    A tile that is drawn early begins late. Then it reads other rows than its neighbours, which the
    cache has no more. The last steps hide the draw.
    """
    return gl.maximum(steps - stages, 1)


@gluon.jit
def produce(
    C: gl.constexpr, LOAD_RESIDENT: gl.constexpr, LOAD_STEP: gl.constexpr, STAGES: gl.constexpr,
    copies, rings, mail, group, kv_heads, t, n,
):  # fmt: skip
    """Load all tiles of this block into shared memory, in one warp, by functions of the kernel.

    LOAD_RESIDENT loads the nth tile that has steps, LOAD_STEP a step of it, one of STAGES in
    flight. A resident row has steps for ``group`` heads. Both return the number of tiles so far
    that end after their sequence.
    """
    message = 0
    use = 0
    nth = 0
    cut_step = 0
    cut_resident = 0
    place, end, tile = first_tile(C, mail, kv_heads, t, n)
    while place < end:
        if tile.lo < tile.hi:
            head = resident_head(tile, n)
            first_use = use + nth
            cut_resident = LOAD_RESIDENT(C, copies, rings, tile, head, first_use, nth, cut_resident)
            nth += 1
            cut_step = LOAD_STEP(C, copies, rings, tile, 0, use, nth, cut_step, n)
        steps = (tile.hi - tile.lo) * group
        some = 1
        if C.DRAWN:
            some = steps_before_draw(steps, STAGES)
            for i in range(1, some):
                cut_step = LOAD_STEP(C, copies, rings, tile, i, use, nth, cut_step, n)
        place, following = next_tile(C, place, end, message + 1, mail, kv_heads, t, n)
        for i in range(some, steps):
            cut_step = LOAD_STEP(C, copies, rings, tile, i, use, nth, cut_step, n)
        use += steps
        message += 1
        tile = following


@gluon.jit
def masked_steps(
    C: gl.constexpr, STEP: gl.constexpr, c: gl.constexpr, state, own, rings, tile, full, t, n
):  # fmt: skip
    """Return the State after all streamed tiles of all heads, by the STEP of a warpgroup.

    ``own`` are its operands; tiles outside ``full`` need a mask.
    """
    # one head for dq; without the loop too much is kept in registers
    for r in range(n.group * C.PASSES):
        of = steps_of_pass(C, True, r, tile, full)
        head = tile.head * n.group + of.g
        if C.LOW_MASKED:
            for m in range(of.first.begin, of.first.end):
                state = STEP(C, True, c, m, head, state, own, rings, tile, t, n)
        for m in range(of.full.begin, of.full.end):
            state = STEP(C, False, c, m, head, state, own, rings, tile, t, n)
        if C.HIGH_MASKED and not C.LOW_MASKED:
            for m in range(of.last.begin, of.last.end):
                state = STEP(C, True, c, m, head, state, own, rings, tile, t, n)
    return state


@gluon.jit
def follow():
    """Wait until the previous launch is done and its results are in memory.

    Code before this call overlaps with the end of that launch. The next launch may overlap with
    this one.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def read_done(place):
    """Return the number, of steps or tiles, that ``publish`` has stored.

    Copies after this call follow the sums of those steps. (A proxy fence without an address space
    covers all memory of the device and takes as long as a copy.)
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; "
        "fence.proxy.async.global;",
        "=r,l",
        [place],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def publish(place, number, VERB: gl.constexpr):
    """Store or add a number of done steps or tiles, once all their copies are in memory."""
    gl.inline_asm_elementwise(
        publish_text(VERB),
        "=r,l,r",
        [place, number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_done(C: gl.constexpr, rings, use, pred):
    """Wait until the consumers are done with a use, one of the last Q_STAGES."""
    s = ring.slot(use, C.Q_STAGES)
    mbarrier.wait(rings.q.empty.index(s), ring.phase(use, C.Q_STAGES), pred=pred)


# --- layouts -----------------------------------------------------------------------------------


@gluon.constexpr_function
def score_layout(C):
    """Return the layout of scores ``[64, BLOCK_STREAMED]`` after the product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_STREAMED, 16])


@gluon.constexpr_function
def held_layout(C):
    """Return the layout of a resident operand ``[64, D]`` that a product reads from registers."""
    return gl.DotOperandLayout(operand_index=0, parent=score_layout(C), k_width=2)


@gluon.constexpr_function
def thread_layout(C):
    """Return the layout of w ``[64, BLOCK_STREAMED]`` in shared memory.

    The first four numbers of each thread come first, then the next four of each. Tiles of a bias
    arrive there as well.
    """
    near = [[0, 1], [8, 0]]
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    far = [[0, n] for n in (8, 16, 32, 64) if n < C.BLOCK_STREAMED]
    alignment = 1024 if C.BIAS else 16
    return gl.SharedLinearLayout(offset_bases=near + threads + far, alignment=alignment)


@gluon.constexpr_function
def memory_by_column(C):
    """Return the layout of the columns' numbers in the order of memory: four a thread at a time."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *([n] for n in (16, 32, 64) if n < C.BLOCK_STREAMED)],
        lane_bases=[[4], [8], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[C.BLOCK_STREAMED],
    )


@gluon.constexpr_function
def memory_by_row():
    """Return the layout of the rows' numbers in the order of memory, in the threads of the rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[2]],
        lane_bases=[[0], [0], [1], [4], [8]],
        warp_bases=[[16], [32]],
        block_bases=[],
        shape=[64],
    )


@gluon.jit
def from_memory_order(x, N: gl.constexpr):
    """Return N numbers in order from the order of memory.

    Number 16 n + 8 i + 2 c + j is stored at (n, c, i, j), where c is the thread.
    """
    return x.reshape([N // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([N])


@gluon.jit
def memory_place(r):
    """Return the place of number r in the order of ``from_memory_order``."""
    return (r & -16) | ((r & 6) << 1) | ((r & 8) >> 2) | (r & 1)


@gluon.jit
def row_numbers(C: gl.constexpr, rows, s, i: gl.constexpr, part: gl.constexpr = 0):
    """Return lse (i = 0) or delta (1) of the streamed queries in buffer s, one for each column.

    The buffer may have several parts of as many queries as C has; return those of one.
    """
    N: gl.constexpr = C.BLOCK_STREAMED
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    both = reinterpret(rows.index(s), rows.dtype, [2, rows.shape[3]], flat)
    of_part = both.index(i)
    if rows.shape[3] != N:
        of_part = of_part.slice(part * N, N)
    x = from_memory_order(of_part.load(memory_by_column(C)), N)
    return gl.convert_layout(x, gl.SliceLayout(0, score_layout(C)))


@gluon.jit
def resident_numbers(C: gl.constexpr, c: gl.constexpr, tile, t, n):
    """Return (lse, delta) of the warpgroup's queries ``[64]``: +inf and 0 past the last query."""
    plane, row = plane_of(C, tile.b, tile.head, tile.q_row, n.hq)
    L: gl.constexpr = gl.SliceLayout(1, score_layout(C))
    r = tile.first + c * C.TOKENS + gl.arange(0, C.TOKENS, L)
    at = t.rows + (plane.to(gl.int64) * 2 * n.rows + row) + memory_place(r)
    lse = gl.load(at, mask=r < tile.nq, other=float("inf"))
    delta = gl.load(at + n.rows, mask=r < tile.nq, other=0.0)
    return lse, delta


# --- products ----------------------------------------------------------------------------------


@gluon.jit
def own_rows(C: gl.constexpr, c: gl.constexpr, buffers, at, WIDTH: gl.constexpr):
    """Return the 64 rows of warpgroup c of the resident tile in buffer ``at``.

    ``at`` includes a 0 that the compiler cannot derive, such as ``use >> 30``. Otherwise it keeps
    operands that are the same in every step in registers, of which there are too few.
    """
    return ring.tile_at(buffers, at, C.BLOCK_RESIDENT, WIDTH).slice(c * C.TOKENS, C.TOKENS, dim=0)


@gluon.jit
def no_scores(C: gl.constexpr):
    """Return an accumulator ``[64, BLOCK_STREAMED]`` of a product."""
    return gl.full([C.TOKENS, C.BLOCK_STREAMED], 0.0, gl.float32, score_layout(C))


@gluon.jit
def issue_product(C: gl.constexpr, resident, streamed):
    """Issue resident ``[64, WIDTH]`` times streamed ``[BLOCK_STREAMED, WIDTH]``.

    Return the accumulator ``[64, BLOCK_STREAMED]``.
    """
    x = no_scores(C)
    return warpgroup_mma(resident, streamed.permute((1, 0)), x, use_acc=False, is_async=True)


# --- weights -----------------------------------------------------------------------------------


@gluon.jit
def load_ids(ids, b, each, at, length):
    """Return the document ids of positions ``at`` of sequence b, ``each`` ids after the last's."""
    return gl.load(ids + b * each + at, mask=at < length, other=0)


@gluon.jit
def visible(C: gl.constexpr, p, first, m, tile, t, n):
    """Return True for the pairs that may attend, of streamed tile m and 64 rows from ``first`` on.

    The layout is that of p ``[64, BLOCK_STREAMED / 8, 4, 2]``.
    """
    L: gl.constexpr = p.type.layout
    # limits of a column less the lane's part of it: the rest of the column is a constant
    at = first + rows_of(L)
    before = m * C.BLOCK_STREAMED + lanes(L)
    col = columns(C.BLOCK_STREAMED, L)
    if C.QUERIES_RESIDENT:
        at = at + tile.offset - before
        end = tile.used - before + 0 * at
        if C.RIGHT:
            end = gl.minimum(at + n.right + 1, end)
        ok = col < along_row(end)
        if C.LEFT:
            ok = ok & (col >= along_row(at - n.left))
    else:
        here = at - tile.offset - before
        low = 0 * here
        if C.RIGHT:
            low = here - n.right
        if C.RAGGED:
            low = gl.where(at < tile.used, low, C.BLOCK_STREAMED)
        ok = col >= along_row(low)
        if C.LEFT:
            ok = ok & (col <= along_row(here + n.left))
    if C.DOCUMENTS:
        row = first + rows_of(L)
        other = col + along_row(before)
        if C.QUERIES_RESIDENT:
            of_row = load_ids(t.q_ids, tile.b, n.ids_q, row, n.nq)
            of_other = load_ids(t.k_ids, tile.b, n.ids_k, other, n.nk)
        else:
            of_row = load_ids(t.k_ids, tile.b, n.ids_k, row, n.nk)
            of_other = load_ids(t.q_ids, tile.b, n.ids_q, other, n.nq)
        ok = ok & (of_other == along_row(of_row))
    return ok


@gluon.jit
def distance(C: gl.constexpr, S, first, m, tile, shift):
    """Return ``|i + offset + shift - j|`` of every pair, as S ``[64, BLOCK_STREAMED]`` lies."""
    S4 = by_lane(S)
    L: gl.constexpr = S4.type.layout
    at = first + rows_of(L) - m * C.BLOCK_STREAMED - lanes(L)
    offset = tile.offset
    if shift is not None:
        offset += shift
    at = at + offset if C.QUERIES_RESIDENT else at - offset
    far = gl.abs(columns(C.BLOCK_STREAMED, L).to(gl.float32) - along_row(at.to(gl.float32)))
    return gl.convert_layout(far.reshape(S.shape), S.type.layout)


@gluon.jit
def line_bias(C: gl.constexpr, S, first, m, head, tile, t, n):
    """Return a bias of one number a key, or a query, ``[1, BLOCK_STREAMED]`` or ``[64, 1]``."""
    L: gl.constexpr = S.type.layout
    heads = n.each_h * (n.hq - 1) + 1
    length = n.nq if C.COLUMN else n.nk
    plane = tile.b * n.each_b * heads + head * n.each_h
    start = t.bias + plane.to(gl.int64) * length
    if C.QUERIES_RESIDENT == C.ROW:  # one number for each streamed row
        j = m * C.BLOCK_STREAMED + gl.arange(0, C.BLOCK_STREAMED, gl.SliceLayout(0, L))
        x = gl.load(start + j, mask=j < length, other=0.0)[None, :]
    else:
        j = first + gl.arange(0, C.TOKENS, gl.SliceLayout(1, L))
        x = gl.load(start + j, mask=j < length, other=0.0)[:, None]
    return x


@gluon.jit
def weights(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, S, lse, bias, m, head, tile, t, n,
    dtype: gl.constexpr,
):  # fmt: skip
    """Return (P, w) of the products S: the weights, and w with ``dX = w (dP - Delta)``.

    All are ``[64, BLOCK_STREAMED]``. ``head`` is the query head, lse ``[64, 1]`` or
    ``[1, BLOCK_STREAMED]``. w is P except under a softcap. Natural scores are multiplied by log2(e)
    only as a difference from lse (``Problem.natural``).
    """
    first = tile.first + c * C.TOKENS
    if C.ROW or C.COLUMN:
        bias = line_bias(C, S, first, m, head, tile, t, n)
    inner = n.inner if C.SOFTCAP else None
    terms = ScoreTerms(scale=n.scale, inner=inner, cap=n.scale)
    if C.ALIBI:
        far = distance(C, S, first, m, tile, n.shift)
        slope = gl.load(t.alibi + head)
        if not C.NATURAL:  # added to lse, so that an exponent is one FMA
            lse = lse + far * (slope * LOG2E)
    if C.NATURAL:
        terms = ScoreTerms(scale=n.scale, inner=inner, cap=n.scale, bias=bias)
        if C.ALIBI:
            terms = ScoreTerms(n.scale, inner, n.scale, bias, far, slope)
    if dtype == gl.bfloat16:
        s, y = score_bfloat16(S, terms)
    else:
        s, y = score_float16(S, terms)
    if C.NATURAL:
        p = gl.exp2((s - lse) * LOG2E)
    else:
        p = gl.exp2(s - lse)
    if MASKED:
        p4 = by_lane(p)
        ok = visible(C, p4, first, m, tile, t, n)
        p = gl.convert_layout(gl.where(ok, p4, 0.0).reshape(p.shape), p.type.layout)
    w = p
    if C.SOFTCAP:
        w = product_gradient(p, y, terms)
    return p, w


# --- dropout -----------------------------------------------------------------------------------


@gluon.jit
def kept_of_queries(C: gl.constexpr, dp, first, m, head, b, t, n):
    """Return dP ``[64, BLOCK_STREAMED]`` of queries from ``first`` on and keys of streamed tile m.

    Where dropout drops a pair it is 0, else it has the factor of kept weights.
    """
    if C.DROPOUT:
        row = first + rows_of_draws(dp)
        place = first_draw(m * (C.BLOCK_STREAMED // 64), row, head, b, n)
        dp = kept_columns(dp, place, t.seed, n.threshold) * n.keep_scale
    return dp


@gluon.jit
def bits_of_keys(C: gl.constexpr, first, m, head, tile, t, n):
    """Return ``drawn_bits`` of 64 keys from ``first`` on and the queries of streamed tile m."""
    bits = 0
    if C.DROPOUT:
        place = first_draw(first // 64, m * C.BLOCK_STREAMED, head, tile.b, n)
        bits = drawn_bits(place, t.seed, n.threshold)
    return bits


@gluon.jit
def kept_of_keys(C: gl.constexpr, x, bits):
    """Return x ``[64, BLOCK_STREAMED]`` with 0 for the pairs that dropout drops."""
    if C.DROPOUT:
        x = kept_rows(x, bits)
    return x


# --- results -----------------------------------------------------------------------------------


@gluon.jit
def sums_by_lane(x):
    """Return each thread's part of the sums of the rows of x ``[64, N]``: ``[64, 4]``."""
    return gl.sum(gl.sum(by_lane(x), 3), 1)


@gluon.jit
def store_sums(x, to, rows):
    """Store the first ``rows`` sums of rows, of which x ``[64, 4]`` holds the parts."""
    x = gl.sum(x, 1)
    r = gl.arange(0, x.shape[0], x.type.layout)
    gl.store(to + r, x, mask=r < rows)


@gluon.jit
def place_of(to, row, head, heads, OUT: gl.constexpr, table):
    """Return where a head of a row is; with a table, where it would be in a row at place 0."""
    place = head
    if table is None:
        place = row.to(gl.int64) * heads + head
    return to + place * OUT


@gluon.jit
def store_rows(x, to, stride, rows, OUT: gl.constexpr, table=None, row=0, alone=None):
    """Store the first ``rows`` rows and OUT columns of x ``[64, WIDTH]`` in its own layout.

    A table has the places of rows from ``row`` on, in units of 4 numbers, so that stores are known
    to be aligned; those below 0 count back from -1, in memory ``alone``. Without one rows have the
    stride.
    """
    L: gl.constexpr = x.type.layout
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    there = (r < rows)[:, None]
    if x.shape[1] != OUT:
        there = there & (d < OUT)[None, :]
    if table is None:
        place = r * stride
    else:
        place = 4 * gl.load(table + row + r, mask=r < rows, other=0)
        if alone is not None:
            at = -4 - place[:, None] + d[None, :]
            rounded = x.to(alone.dtype.element_ty)
            gl.store(alone + at, rounded, mask=there & (place < 0)[:, None])
            there = there & (place >= 0)[:, None]
    gl.store(to + place[:, None] + d[None, :], x.to(to.dtype.element_ty), mask=there)


@gluon.jit
def store_parts(
    x, to, stride, rows, W0: gl.constexpr, OUT: gl.constexpr, table=None, row=0, alone=None
):  # fmt: skip
    """Store the first ``rows`` rows and OUT columns of Parts x ``[64, WIDTH]``."""
    store_rows(x.low, to, stride, rows, min(OUT, W0), table, row, alone)
    if OUT > W0:
        high = alone
        if alone is not None:
            high = alone + W0
        store_rows(x.high, to + W0, stride, rows, OUT - W0, table, row, high)


@gluon.jit
def store(
    C: gl.constexpr, x, to, stride, rows, WIDTH: gl.constexpr, column: gl.constexpr,
    OUT: gl.constexpr, table=None, row=0, alone=None,
):  # fmt: skip
    """Store the first ``rows`` rows of x ``[64, WIDTH]``, the columns from ``column`` on.

    Stores have 16 bytes where shared memory has room to rearrange x. Parts of sums are float32.
    """
    if not C.BIAS and to.dtype.element_ty.primitive_bitwidth == 16:
        x = gl.convert_layout(x.to(to.dtype.element_ty), output_layout(WIDTH))
    if alone is not None:
        alone = alone + column
    store_rows(x, to + column, stride, rows, min(OUT - column, WIDTH), table, row, alone)
