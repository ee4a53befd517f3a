"""The scores of the forward kernels: the terms that are added to products, and the mask."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...rules.score import ScoreTerms
from .forward_lib import full_range
from .lib import rules
from .lib.dropout import first_draw, kept_columns, rows_of_draws
from .lib.scores import columns, lanes, rows_of, widened
from .lib.softmax import along_row, by_lane


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
        there = column < tile.used - j * C.BLOCK_K
        x = gl.load(at + column * n.bias_k, mask=there, other=0.0)
    else:
        at = at + first.to(gl.int64) * n.bias_q
        within = row // C.GROUP * n.bias_q + (row % C.GROUP).to(gl.int64) * n.bias_h
        there = first + row // C.GROUP < tile.nq
        if C.BIAS == "column":  # all keys share it
            x = along_row(gl.load(at + within, mask=there, other=0.0))
        else:
            at = at + (j * C.BLOCK_K).to(gl.int64) * n.bias_k
            there = along_row(there) & (column < tile.used - j * C.BLOCK_K)
            x = gl.load(at + along_row(within) + column * n.bias_k, mask=there, other=0.0)
    return x


@gluon.jit
def dropped(C: gl.constexpr, p, j, first, tile, t, n):
    """Return weights p ``[64, BLOCK_K]`` with 0 for the pairs that dropout drops."""
    r = rows_of_draws(p)
    head = tile.head * C.GROUP + r % C.GROUP
    place = first_draw(j * (C.BLOCK_K // 64), first + r // C.GROUP, head, tile.b, n)
    return kept_columns(p, place, t.seed, n.threshold)


@gluon.jit
def masked(C: gl.constexpr, S, j, first, tile, t, n, EDGE: gl.constexpr):
    """Return scores S ``[64, BLOCK_K/8, 4, 2]`` of key tile j, -inf where the mask forbids a pair.

    EDGE: the limit that may cut the tile where limits are APART, "left", "right" or "both".

    A thread's column is a constant plus parts that depend on the lane and the tile. These parts are
    on the other side of the comparison: two limits a thread, and no register for a column.
    """
    L: gl.constexpr = S.type.layout
    col = columns(C.BLOCK_K, L)
    before = j * C.BLOCK_K + lanes(L)
    at = first + rows_of(L) // C.GROUP + tile.offset
    if C.RIGHT:
        limit = gl.minimum(at + n.right + 1, tile.used) - before
    else:
        limit = tile.used - before
    if C.APART and EDGE == "left":
        seen = col >= along_row(at - n.left - before)
    else:
        seen = col < along_row(limit)
        if C.LEFT and not (C.APART and EDGE == "right"):
            seen = seen & (col >= along_row(at - n.left - before))
    if C.DOCUMENTS:
        row = first + rows_of(L) // C.GROUP
        of_row = gl.load(t.q_ids + tile.b * n.ids_q + row, mask=row < tile.nq, other=0)
        key = col + along_row(before)
        of_key = gl.load(t.k_ids + tile.b * n.ids_k + key, mask=key < tile.used, other=0)
        seen = seen & (of_key == along_row(of_row))
    return gl.where(seen, S, float("-inf"))


@gluon.jit
def masked_where_partial(C: gl.constexpr, S, j, first, tile, t, n, EDGE: gl.constexpr):
    """Return ``masked`` scores, of documents only where a pair of the key tile may be forbidden."""
    if C.DOCUMENTS:
        if partial(C, j, first, tile, t, n):
            S = masked(C, S, j, first, tile, t, n, EDGE)
    else:
        S = masked(C, S, j, first, tile, t, n, EDGE)
    return S


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
