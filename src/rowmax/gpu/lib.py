# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""Shared parts of the kernels: places, tiles in memory, lists of tiles, scores, masks, weights.

Kernels pass the records of ``kernel_args.py``: ``ptr``, ``num`` and ``cfg``. ``row`` and ``col``
are query and key positions within a sequence. Their shapes broadcast, so a kernel may hold its tile
of scores in either orientation. Scores are in natural units where ``cfg.NATURAL``, else in units of
log 2: ``s = log2(e) (...)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..call.inputs import parameters_of
from ..rules.score import ScoreTerms
from . import kernel_args, rules
from .rules import LN2, LOG2E

ROW_UNIT = tl.constexpr(kernel_args.ROW_UNIT)
PARAMETERS = tl.constexpr(parameters_of())
PARAMETER_ROWS = tl.constexpr(kernel_args.PARAMETER_ROWS)


class Place(NamedTuple):
    """One head of one sequence."""

    b: Any
    head: Any  # query head
    kv_head: Any
    q_start: Any  # start and length as in Sizes
    nq: Any
    k_start: Any
    nk: Any
    used: Any  # the number of keys in use: nk, or the length of the prefix
    offset: Any  # the key position of query 0
    prefix: Any  # ``num.right`` limits no key before it


class Sizes(NamedTuple):
    """The queries and keys of one sequence; a dense one starts at 0."""

    q_start: Any
    nq: Any
    k_start: Any
    nk: Any


class TilePlan(NamedTuple):
    """The streamed tiles of a resident tile, in a list or in a band."""

    count: Any
    n_full: Any  # full tiles among them
    first: Any  # the first tile, or a pointer to a list
    full: Any  # the first full tile, or where the partial ones of the list begin


# --- places ------------------------------------------------------------------------------------


@triton.jit
def tile_and_head(num):
    """Return (tile, head) of this program: ``num.together`` heads alternate, tile by tile."""
    heads = tl.num_programs(0) // num.tiles
    first = tl.program_id(0) // (num.tiles * num.together) * num.together
    i = tl.program_id(0) - num.tiles * first
    group = tl.minimum(num.together, heads - first)
    return i // group, first + i % group


@triton.jit
def sequence(cu, b, batch, total, longest):
    """Return (start, length) of packed sequence b, clamped to the range.

    The rows past the last sequence form one more, number ``batch``.
    """
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    end = tl.load(cu + tl.minimum(b + 1, batch))
    end = tl.minimum(tl.maximum(end, start), total)
    length = tl.where(b < batch, tl.minimum(end - start, longest), total - start)
    return start, length


@triton.jit
def sequence_of_slot(cu, slot, batch, total, BLOCK: tl.constexpr, GROUP: tl.constexpr = 1):
    """Return (b, tile) of one of ``total GROUP // BLOCK + batch + 1`` slots.

    Sequence b has the slots from ``cu[b] GROUP // BLOCK + b`` on: at least as many as it has tiles
    of BLOCK rows, GROUP rows for each query.
    """
    before = 0
    for s in tl.range(0, batch + 1, 256):
        b = s + tl.arange(0, 256)
        start = tl.load(cu + b, mask=b <= batch, other=0)
        start = tl.minimum(tl.maximum(start, 0), total)
        first = start * GROUP // BLOCK + b
        before += tl.sum(((first <= slot) & (b <= batch)).to(tl.int32), 0)
    b = tl.maximum(before - 1, 0)
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    return b, slot - (start * GROUP // BLOCK + b)


@triton.jit
def sequence_of_queries(ptr, num, cfg, tile, head):
    """Return (b, tile) of a slot of queries of a head of any sequence."""
    b = head // cfg.HQ
    if cfg.PACKED:
        b, tile = sequence_of_slot(ptr.cu_q, tile, num.batch, num.total_q, cfg.BLOCK_Q)
    elif num.right is not None:
        tile = num.tiles - 1 - tile  # the longest first
    return b, tile


@triton.jit
def sizes_of(ptr, num, cfg, b, KEYS: tl.constexpr):
    """Return the Sizes of sequence b.

    The rows past the packed sequences are queries without keys, or KEYS without queries.
    """
    if cfg.PACKED:
        q_start, nq = sequence(ptr.cu_q, b, num.batch, num.total_q, num.longest_q)
        k_start, nk = sequence(ptr.cu_k, b, num.batch, num.total_k, num.longest_k)
        if KEYS:
            nq = tl.where(b < num.batch, nq, 0)
        else:
            nk = tl.where(b < num.batch, nk, 0)
        return Sizes(q_start, nq, k_start, nk)
    else:
        return Sizes(0, num.total_q, 0, num.total_k)


@triton.jit
def place_of(ptr, num, cfg, b, head, sizes):
    """Return the Place of one head of sequence b."""
    used = sizes.nk
    if ptr.lengths is not None:
        length = tl.load(ptr.lengths + tl.minimum(b, num.batch - 1))
        used = tl.maximum(tl.minimum(used, length), 0)
    offset = sizes.nk - sizes.nq
    if cfg.TO_LENGTHS:
        offset = used - sizes.nq
    prefix = 0
    if ptr.prefix is not None:
        prefix = tl.load(ptr.prefix + tl.minimum(b, num.batch - 1))
    kv = head // cfg.GROUP
    return Place(
        b, head, kv, sizes.q_start, sizes.nq, sizes.k_start, sizes.nk, used, offset, prefix
    )


# --- tiles in memory ---------------------------------------------------------------------------


@triton.jit
def first_row(x, matrix, b, head, start, PACKED: tl.constexpr):
    """Return a pointer to the first row of (b, head)."""
    offset = tl.cast(head, tl.int64) * matrix.head
    if PACKED:
        return x + offset * matrix.ALIGN + tl.cast(start, tl.int64) * matrix.ROW
    else:
        return x + (offset + tl.cast(b, tl.int64) * matrix.b) * matrix.ALIGN


@triton.jit
def queries(x, matrix, cfg, place):
    """Return a pointer to the first query of a place."""
    return first_row(x, matrix, place.b, place.head, place.q_start, cfg.PACKED)


@triton.jit
def keys(x, matrix, cfg, place):
    """Return a pointer to the first key of a place."""
    return first_row(x, matrix, place.b, place.kv_head, place.k_start, cfg.PACKED)


@triton.jit
def vector(x, b, head, start, total, HEADS: tl.constexpr, PACKED: tl.constexpr):
    """Return a pointer to (b, head) in a contiguous ``[B, H, N]``, or ``[1, H, total]``."""
    if PACKED:
        return x + tl.cast(head, tl.int64) * total + start
    else:
        return x + (tl.cast(b, tl.int64) * HEADS + head) * total


@triton.jit
def row_vector(x, num, cfg, place):
    """Return a pointer to the first row's number in a vector of padded rows."""
    total = num.rows * ROW_UNIT
    return vector(x, place.b, place.head, place.q_start, total, cfg.HQ, cfg.PACKED)


@triton.jit
def tile_pointers(x, i0, ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ``[ROWS, COLUMNS]`` pointers from row i0 on."""
    r = tl.arange(0, ROWS).to(tl.int64)[:, None] * ROW
    return x + tl.cast(i0, tl.int64) * ROW + (r + tl.arange(0, COLUMNS).to(tl.int64)[None, :])


@triton.jit
def load_within(at, inside, within, RAGGED: tl.constexpr, PADDED: tl.constexpr):
    """Return a tile; zeros outside of ``inside [ROWS]`` if RAGGED, ``within [COLUMNS]`` if PADDED.

    A tile without a mask is read without a condition.
    """
    if RAGGED and PADDED:
        return tl.load(at, mask=inside[:, None] & within[None, :], other=0.0)
    elif RAGGED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=within[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_tile(x, matrix, i0, end, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Return ``[ROWS, BLOCK_D]`` from row i0; zeros past D and, if RAGGED, past ``end``."""
    at = tile_pointers(x, i0, matrix.ROW, ROWS, matrix.BLOCK_D)
    inside = i0 + tl.arange(0, ROWS) < end
    within = tl.arange(0, matrix.BLOCK_D) < matrix.D
    return load_within(at, inside, within, RAGGED, matrix.BLOCK_D != matrix.D)


@triton.jit
def store_tile(x, matrix, i0, end, value, ROWS: tl.constexpr):
    """Store ``value [ROWS, BLOCK_D]`` from row i0 up to ``end``."""
    at = tile_pointers(x, i0, matrix.ROW, ROWS, matrix.BLOCK_D)
    i = i0 + tl.arange(0, ROWS)
    d = tl.arange(0, matrix.BLOCK_D)
    tl.store(at, value.to(x.dtype.element_ty), mask=(i < end)[:, None] & (d < matrix.D)[None, :])


@triton.jit
def load_queries(x, matrix, i0, cfg, place, RAGGED: tl.constexpr) -> Any:
    """Return ``[BLOCK_Q, BLOCK_D]`` of queries from row i0 on; None of None."""
    if x is None:
        return  # noqa: RET502  (triton 3.6 refuses to return None by name)
    else:
        x = queries(x, matrix, cfg, place)
        return load_tile(x, matrix, i0, place.nq, cfg.BLOCK_Q, RAGGED)


@triton.jit
def load_keys(x, matrix, j0, cfg, place, RAGGED: tl.constexpr) -> Any:
    """Return ``[BLOCK_K, BLOCK_D]`` of keys from j0 on, zeros past those in use; None of None."""
    if x is None:
        return  # noqa: RET502  (triton 3.6 refuses to return None by name)
    else:
        x = keys(x, matrix, cfg, place)
        return load_tile(x, matrix, j0, place.used, cfg.BLOCK_K, RAGGED)


@triton.jit
def store_queries(x, matrix, value, i0, cfg, place, factor=None):
    """Store a tile of queries from row i0 on, times ``factor``, unless x is None."""
    if x is not None:
        x = queries(x, matrix, cfg, place)
        if factor is not None:
            value = value * factor
        store_tile(x, matrix, i0, place.nq, value, cfg.BLOCK_Q)


@triton.jit
def store_keys(x, matrix, value, j0, cfg, place, factor=None):
    """Store a tile of keys from j0 on, times ``factor``, unless x is None."""
    if x is not None:
        x = keys(x, matrix, cfg, place)
        if factor is not None:
            value = value * factor
        store_tile(x, matrix, j0, place.nk, value, cfg.BLOCK_K)


@triton.jit
def load_rows(x, row, end, other, RAGGED: tl.constexpr):
    """Return the numbers of the rows; ``other`` past ``end`` if RAGGED."""
    if RAGGED:
        return tl.load(x + row, mask=row < end, other=other)
    else:
        return tl.load(x + row)


@triton.jit
def load_vector(x, rows, num, cfg, place, other, RAGGED: tl.constexpr):
    """Return the numbers of rows in a vector of padded rows."""
    return load_rows(row_vector(x, num, cfg, place), rows, place.nq, other, RAGGED)


@triton.jit
def row_numbers(rows, do, i0, ptr, num, cfg, place, RAGGED: tl.constexpr):
    """Return (lse in the units of the scores, Delta - dlse) of the rows of dO from i0 on.

    They are loaded where a kernel before has stored them, else computed from lse, O and dlse. Past
    the end lse is +inf, for weights of 0.
    """
    nq = place.nq
    if ptr.delta is not None:
        lse2 = load_vector(ptr.lse2, rows, num, cfg, place, float("inf"), RAGGED)
        return lse2, load_vector(ptr.delta, rows, num, cfg, place, 0.0, RAGGED)
    else:
        start, total = place.q_start, num.total_q
        lse = vector(ptr.lse, place.b, place.head, start, total, cfg.HQ, cfg.PACKED)
        lse2 = load_rows(lse, rows, nq, float("inf"), RAGGED)
        if not cfg.NATURAL:
            lse2 = lse2 * LOG2E
        o = queries(ptr.out, num.out, cfg, place)
        o = load_tile(o, num.out, i0, nq, do.shape[0], RAGGED)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        if ptr.dlse is not None:
            dlse = vector(ptr.dlse, place.b, place.head, start, total, cfg.HQ, cfg.PACKED)
            delta -= load_rows(dlse, rows, nq, 0.0, RAGGED)
        return rules.without_weights(lse2), delta


@triton.jit
def load_rest(ptr, num, cfg, place, row, RAGGED: tl.constexpr):
    """Return the rest of LSE (``preprocess.py``) of the rows; 0 without natural scores."""
    rest = 0.0
    if cfg.NATURAL:
        rest = load_vector(ptr.rest, row, num, cfg, place, 0.0, RAGGED)
    return rest


@triton.jit
def pair_pointers(x, pairs, place, row, col):
    """Return pointers to the numbers of pairs (row, col) in a term ``[B, H, Nq, Nk]``."""
    base = tl.cast(place.b, tl.int64) * pairs.b + tl.cast(place.head, tl.int64) * pairs.head
    at = x + base * pairs.ALIGN + row.to(tl.int64) * (pairs.row * pairs.ALIGN)
    if pairs.col is None:
        return at + col
    else:
        return at + col.to(tl.int64) * pairs.col


# --- lists of tiles ----------------------------------------------------------------------------


@triton.jit
def band_plan(x0, x1, shift, back, back_all, ahead, end, prefix, BLOCK: tl.constexpr):
    """Return the plan of the tiles in [0, end) that a band (``rules/band.py``) touches.

    ``back`` is the limit of x0, ``back_all`` that of x1.
    """
    low, high = rules.any_range(x0, x1, shift, back, ahead, end, prefix)
    first, last = rules.touched_tiles(low, high, BLOCK)
    low_all, high_all = rules.all_range(x0, x1, shift, back_all, ahead, end, prefix)
    full, full_end = rules.filled_tiles(low_all, high_all, BLOCK, first, last)
    return TilePlan(last - first, full_end - full, first, full)


@triton.jit
def listed_plan(ptr, num, place, tile):
    """Return the plan that the list of a resident tile holds."""
    stride = num.order
    number = tl.cast(tl.minimum(place.b, num.batch - 1), tl.int64) * stride.b
    number += tl.cast(place.head, tl.int64) * stride.head + tile
    n_full = tl.load(ptr.counts + 2 * number)
    n_partial = tl.load(ptr.counts + 2 * number + 1)
    first = ptr.order + number * 2 * stride.length
    return TilePlan(n_full + n_partial, n_full, first, stride.length)


@triton.jit
def plan_band(i0, i1, ptr, num, cfg, place):
    """Return the plan of the tiles of keys that queries i0 to i1 see by their band."""
    prefix = None
    if ptr.prefix is not None:
        prefix = place.prefix
    left = num.left
    return band_plan(i0, i1, place.offset, left, left, num.right, place.used, prefix, cfg.BLOCK_K)


@triton.jit
def plan_keys(ptr, num, cfg, place, tile):
    """Return the plan of the tiles of keys that a tile of queries sees."""
    if ptr.order is not None:
        return listed_plan(ptr, num, place, tile)
    else:
        i0 = tile * cfg.BLOCK_Q
        i1 = tl.minimum(i0 + cfg.BLOCK_Q, place.nq) - 1
        return plan_band(i0, i1, ptr, num, cfg, place)


@triton.jit
def tile_count(plan, KIND: tl.constexpr):
    """Return the number of "full", "partial" or "any" tiles."""
    if KIND == "full":
        return plan.n_full
    elif KIND == "partial":
        return plan.count - plan.n_full
    else:
        return plan.count


@triton.jit
def nth_tile(i, ptr, plan, KIND: tl.constexpr):
    """Return (tile, partial): the i-th "full", "partial" or "any" tile; True if it needs a mask.

    One loop over any tile tests each one. Two loops, over full and over partial tiles, save the
    tests but double the code and its prologue.
    """
    if ptr.order is not None:
        if KIND == "full":
            return tl.load(plan.first + i), False
        elif KIND == "partial":
            return tl.load(plan.first + plan.full + i), True
        else:
            partial = i >= plan.n_full
            i += tl.where(partial, plan.full - plan.n_full, 0)
            return tl.load(plan.first + i), partial
    else:
        if KIND == "full":
            tile = plan.full + i
        else:
            tile = plan.first + i
        if KIND == "partial":
            tile += tl.where(tile < plan.full, 0, plan.n_full)
        return tile, (tile < plan.full) | (tile >= plan.full + plan.n_full)


# --- scores and weights ------------------------------------------------------------------------


@triton.jit
def distances(num, place, row, col):
    """Return ``|i + offset - j|`` of a tile."""
    at = row + place.offset
    if num.shift is not None:
        at += num.shift
    return tl.abs(at - col).to(tl.float32)


@triton.jit
def load_pairs(x, pairs, cfg, place, row, col):
    """Return a tile of a term ``[B, H, Nq, Nk]``, 0 past its rows.

    Rows are read by units, the last one to its end (``kernel_args.in_units``).
    """
    at = pair_pointers(x, pairs, place, row, col)
    if cfg.RAGGED_K:
        end = tl.cdiv(place.nk, pairs.ALIGN) * pairs.ALIGN
        return tl.load(at, mask=(row < place.nq) & (col < end), other=0)
    elif cfg.RAGGED_Q:
        return tl.load(at, mask=row < place.nq, other=0)
    else:
        return tl.load(at)


@triton.jit
def store_pairs(x, g, num, cfg, place, row, col, inside):
    """Store a tile of gradients of the bias; ``inside`` is True for rows before the end."""
    if cfg.RAGGED_K:
        inside = inside & (col < place.nk)
    at = pair_pointers(x, num.dbias, place, row, col)
    tl.store(at, g.to(x.dtype.element_ty), mask=inside)


@triton.jit
def scored(x, ptr, num, cfg, place, row, col, bias=None):
    """Return (s, y) of ``x = q.k`` as ``rules.score`` does; the bias is loaded unless given.

    Where ``cfg.FOLDED`` s is x, still without its scale.
    """
    distance = None
    if ptr.bias is not None and bias is None:
        bias = load_pairs(ptr.bias, num.bias, cfg, place, row, col)
    if cfg.DISTANCE:
        distance = distances(num, place, row, col)
    scale = None if cfg.FOLDED else num.scale2
    unit: tl.constexpr = 1.0 if cfg.NATURAL else LOG2E
    at = ptr.heads
    heads = [
        (tl.load(at + n * cfg.HQ + place.head) * unit if n >= 0 else None) for n in cfg.HEAD_ROWS
    ]
    terms = ScoreTerms(scale, num.scale_cap, num.cap2, bias, distance, *heads)
    if ptr.q.dtype.element_ty == tl.float32:
        return rules.score_precise(x, terms)
    else:
        return rules.score(x, terms)


@triton.jit
def power(x, cfg):
    """Return ``e^x`` of a difference of natural scores, ``2^x`` of one in units of log 2."""
    if cfg.NATURAL:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp2(x)


@triton.jit
def finished(m, l, acc, ptr, num, cfg, head):
    """Return (O, LSE) of the sums over all keys; ``head`` is one, or each row's."""
    if not cfg.NATURAL:
        m = m * LN2
    if ptr.sink is not None:
        m, l, alpha = rules.with_sink(m, l, tl.load(ptr.sink + head).to(tl.float32))
        acc = acc * alpha[:, None]
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    if ptr.seed is not None:
        acc = acc * num.keep_scale
    return acc / l[:, None], tl.where(empty, float("-inf"), m + tl.log(l))


@triton.jit
def seen(ptr, num, cfg, place, row, col):
    """Return True for the pairs of a partial tile that may attend."""
    ok = (row < place.nq) & (col < place.used)
    if num.left is not None:
        ok = ok & (col >= row + place.offset - num.left)
    if num.right is not None:
        before = col <= row + place.offset + num.right
        if ptr.prefix is not None:
            before = before | (col < place.prefix)
        ok = ok & before
    if ptr.q_ids is not None:
        q_ids = ptr.q_ids + tl.cast(place.b, tl.int64) * num.q_ids
        k_ids = ptr.k_ids + tl.cast(place.b, tl.int64) * num.k_ids
        q_id = tl.load(q_ids + row, mask=row < place.nq, other=0)
        ok = ok & (q_id == tl.load(k_ids + col, mask=col < place.used, other=0))
    if ptr.allowed is not None:
        ok = ok & (load_pairs(ptr.allowed, num.allowed, cfg, place, row, col) != 0)
    return ok


@triton.jit
def only_seen(x, ptr, num, cfg, place, row, col, partial, KIND: tl.constexpr):
    """Return x, with 0 for the pairs of a partial tile that may not attend."""
    if cfg.EDGES and KIND != "full":
        if KIND == "partial" or partial:
            x = tl.where(seen(ptr, num, cfg, place, row, col), x, 0.0)
    return x


@triton.jit
def weights(
    x, lse2, rest, ptr, num, cfg, place, row, col, partial, KIND: tl.constexpr, bias=None
):  # fmt: skip
    """Return (P, y) of ``x = q.k``, with lse2 and rest shaped to broadcast over x.

    The rest of a natural LSE is in units of log 2.
    """
    s, y = scored(x, ptr, num, cfg, place, row, col, bias)
    if cfg.FOLDED:
        p = tl.exp2(s * num.scale2 - lse2)
    elif cfg.NATURAL:
        p = rules.natural_weight(s, lse2, rest)
    else:
        p = tl.exp2(s - lse2)
    return only_seen(p, ptr, num, cfg, place, row, col, partial, KIND), y


@triton.jit
def product_gradient(ds, y, ptr, num, cfg, place):
    """Return the gradient of ``q.k``, without scale, from that of the scores."""
    at = ptr.heads
    heads = [(tl.load(at + n * cfg.HQ + place.head) if n >= 0 else None) for n in cfg.HEAD_ROWS]
    return rules.product_gradient(ds, y, ScoreTerms(None, num.scale_cap, None, None, None, *heads))


@triton.jit
def head_gradients(ds, x, y, ptr, num, cfg, place, row, col):
    """Return the sums over keys of the gradients of heads' parameters.

    ``[PARAMETER_ROWS, queries]``, row n that of row n of ``heads``. ds, x and y are tiles of dS, of
    ``q.k`` and of ``rules.score``; dS is 0 where a pair may not attend.
    """
    ROWS: tl.constexpr = PARAMETER_ROWS
    distance = None
    if cfg.DISTANCE:
        distance = distances(num, place, row, col)
    at = ptr.heads
    heads = [(tl.load(at + n * cfg.HQ + place.head) if n >= 0 else None) for n in cfg.HEAD_ROWS]
    terms = ScoreTerms(num.scale, num.scale_cap, None, None, distance, *heads)
    sums = tl.zeros([ROWS, ds.shape[0]], tl.float32)
    which = tl.arange(0, ROWS)[:, None]
    for n in tl.static_range(len(cfg.HEAD_ROWS)):
        if cfg.HEAD_ROWS[n] >= 0:
            g = rules.head_gradient(ds, x, y, terms, tl.constexpr(PARAMETERS[n]))
            g = tl.where(ds == 0.0, 0.0, g)  # x and y of such a pair may be NaN
            sums += tl.where(which == cfg.HEAD_ROWS[n], tl.sum(g, 1)[None, :], 0.0)
    return sums


# --- dropout -----------------------------------------------------------------------------------


@triton.jit
def kept(ptr, num, place, row, j0, j, BLOCK: tl.constexpr):
    """Return True for the pairs that dropout keeps; keys are ``j0 + j``, j shaped to broadcast.

    Every element computes its own draw. The eight columns that share a call of the generator lie
    in one thread of a tensor core's accumulator: their counters are equal, and the compiler merges
    the calls.
    """
    seed = tl.load(ptr.seed)
    if BLOCK >= 64:
        lane = (j >> 3) & 7
        block = j0 // 64 + (j >> 6)
    else:
        lane = ((j0 >> 3) + (j >> 3)) & 7
        block = j0 // 64 + 0 * j
    b = place.b
    head = place.head
    column = block * 8 + (j & 7)
    if num.first_query is not None:
        b += num.first_sequence
        head += num.first_head
        row += num.first_query
        column += num.first_key >> 3  # whole blocks of 64 keys (``supports``)
    c0 = (column + row * 0).to(tl.uint32)
    c1 = (row + j * 0).to(tl.uint32)
    c2 = c0 * 0 + tl.cast(head, tl.uint32)
    c3 = c0 * 0 + tl.cast(b, tl.uint32)
    k0 = c0 * 0 + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = c0 * 0 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = rules.philox((c0, c1, c2, c3), (k0, k1))
    word = lane & 3
    w = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    draw = tl.where(lane < 4, w & 0xFFFF, w >> 16).to(tl.int32)
    return draw >= num.threshold


@triton.jit
def dropped(p, dp, ptr, num, place, row, j0, j, BLOCK: tl.constexpr):
    """Return (P R, dP) with dropout; P R still lacks the factor ``keep_scale``."""
    if ptr.seed is not None:
        keep = kept(ptr, num, place, row, j0, j, BLOCK)
        return tl.where(keep, p, 0.0), tl.where(keep, dp * num.keep_scale, 0.0)
    else:
        return p, dp


# --- sums without the pairs that are not seen ---------------------------------------------------
#
# A pair that may not attend has weight 0, even if its numbers are NaN. In a product of tiles 0
# times NaN is NaN. So a sum that is NaN is computed again, a row of the other side at a time, from
# the pairs that may attend.


@triton.jit
def has_nan(x):
    """Return True if a tile holds NaN."""
    # over both axes at once: triton 3.6 has no code for sm_100 for one axis after the other
    return tl.max((x != x).to(tl.int32), None) > 0


@triton.jit
def load_row(x, matrix, i):
    """Return row i as float32, ``[1, BLOCK_D]``."""
    d = tl.arange(0, matrix.BLOCK_D)
    x = tl.load(x + tl.cast(i, tl.int64) * matrix.ROW + d, mask=d < matrix.D, other=0.0)
    return x.to(tl.float32)[None]


@triton.jit
def query_row(x, matrix, i, cfg, place) -> Any:
    """Return query i as float32, ``[1, BLOCK_D]``; None of None."""
    if x is None:
        return  # noqa: RET502  (triton 3.6 refuses to return None by name)
    else:
        return load_row(queries(x, matrix, cfg, place), matrix, i)


@triton.jit
def key_row(x, matrix, j, cfg, place) -> Any:
    """Return key j as float32, ``[1, BLOCK_D]``; None of None."""
    if x is None:
        return  # noqa: RET502  (triton 3.6 refuses to return None by name)
    else:
        return load_row(keys(x, matrix, cfg, place), matrix, j)


@triton.jit
def times_row(tile, row):
    """Return ``tile @ row^T`` as a column, in float32."""
    return tl.sum(tile.to(tl.float32) * row, 1)[:, None]
