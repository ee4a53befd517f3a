"""P from S^T, and what dP - Delta is to be multiplied with: softcap, bias, ALiBi and masks.

Scores are in units of log 2, as lse is; with C.NATURAL both are in natural units, and only their
difference is multiplied by log2(e) (``Problem.natural``). With a softcap ``dX = P (1 - (t/c)^2)
(dP - Delta)``, and that product of the first two is all that is kept of them beside P, rounded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.scores import columns, lanes, rows_of, tanh
from ..lib.softmax import LOG2E, along_row, by_lane


@gluon.jit
def seen(C: gl.constexpr, p, first, m, tile, sizes, terms):
    """Which pairs of 64 rows from ``first`` on and tile m of the other side may see each other.
    Rows are keys and columns queries but where C.QUERIES_DOWN."""
    key, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    n_queries, n_keys, left, right, spans = sizes
    L: gl.constexpr = p.type.layout
    # limits of the column, less the lane's own part of it: what is left of it is a constant
    at = first + rows_of(L)
    before = m * C.BLOCK_Q + lanes(L)
    col = columns(C.BLOCK_Q, L)
    if C.QUERIES_DOWN:
        at = at + offset - before
        end = used - before + 0 * at
        if C.RIGHT:
            end = gl.minimum(at + right + 1, end)
        ok = col < along_row(end)
        if C.LEFT:
            ok = ok & (col >= along_row(at - left))
    else:
        here = at - offset - before
        low = 0 * here
        if C.RIGHT:
            low = here - right
        if C.RAGGED:
            low = gl.where(at < used, low, C.BLOCK_Q)
        ok = col >= along_row(low)
        if C.LEFT:
            ok = ok & (col <= along_row(here + left))
    if C.DOCUMENTS:
        q_ids, k_ids, ids_q, ids_k = terms[2:6]
        row = first + rows_of(L)
        other = col + along_row(before)
        if C.QUERIES_DOWN:
            of_row = gl.load(q_ids + b * ids_q + row, mask=row < n_queries, other=0)
            of_other = gl.load(k_ids + b * ids_k + other, mask=other < n_keys, other=0)
        else:
            of_row = gl.load(k_ids + b * ids_k + row, mask=row < n_keys, other=0)
            of_other = gl.load(q_ids + b * ids_q + other, mask=other < n_queries, other=0)
        ok = ok & (of_other == along_row(of_row))
    return ok


@gluon.jit
def distance(C: gl.constexpr, S, first, m, tile):
    """``|i + offset - j|`` of every pair, as S lies."""
    key, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    S4 = by_lane(S)
    L: gl.constexpr = S4.type.layout
    at = first + rows_of(L) - m * C.BLOCK_Q - lanes(L)
    at = at + offset if C.QUERIES_DOWN else at - offset
    far = gl.abs(columns(C.BLOCK_Q, L).to(gl.float32) - along_row(at.to(gl.float32)))
    return gl.convert_layout(far.reshape(S.shape), S.type.layout)


@gluon.jit
def line_bias(C: gl.constexpr, S, first, m, head, tile, terms):
    """A number a key (ROW) or a query (COLUMN), against a tile of scores."""
    L: gl.constexpr = S.type.layout
    bias, each_b, each_h, heads, length = terms[6]
    plane = tile[2] * each_b * heads + head * each_h
    start = bias + plane.to(gl.int64) * length
    if C.QUERIES_DOWN == C.ROW:  # it lies along what passes by
        j = m * C.BLOCK_Q + gl.arange(0, C.BLOCK_Q, gl.SliceLayout(0, L))
        x = gl.load(start + j, mask=j < length, other=0.0)[None, :]
    else:
        j = first + gl.arange(0, C.TOKENS, gl.SliceLayout(1, L))
        x = gl.load(start + j, mask=j < length, other=0.0)[:, None]
    return x


@gluon.jit
def weights(
    C: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr, S, less, bias, m, head, tile, sizes,
    terms, scale, dtype: gl.constexpr,
):  # fmt: skip
    """(P, w): the weights, and what dP - Delta is to be multiplied with to give dX.

    ``less`` is lse, against S."""
    inner, alibi = terms[:2]
    y = S
    if C.SOFTCAP:
        y = tanh(S * inner, dtype)
    first = tile[0] + c * C.TOKENS
    if C.ROW or C.COLUMN:
        bias = line_bias(C, S, first, m, head, tile, terms)
    if C.NATURAL:
        s = y * scale + bias.to(gl.float32)
        if C.ALIBI:
            s = s - distance(C, S, first, m, tile) * gl.load(alibi + head)
        p = gl.exp2((s - less) * LOG2E)
    else:
        if C.ALIBI:
            far = distance(C, S, first, m, tile)
            less = less + far * (gl.load(alibi + head) * LOG2E)
        p = gl.exp2(y * scale - less)
    if MASKED:
        p4 = by_lane(p)
        ok = seen(C, p4, first, m, tile, sizes, terms)
        p = gl.convert_layout(gl.where(ok, p4, 0.0).reshape(p.shape), p.type.layout)
    w = p
    if C.SOFTCAP:
        w = p * (1.0 - y * y)
    return p, w
