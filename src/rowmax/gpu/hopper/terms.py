"""From the product Q K^T to scores: softcap, bias, ALiBi, and the masks of partial tiles.

Scores are seen as the softmax sees them, ``[64, BLOCK_K/8, 4, 2]`` (softmax.py). They stay as
the product left them, to be scaled by the exponential, unless something is added to them:
then they are scaled here, but for the log2(e) that the exponential is to take in.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import LOG2E, along_row


@gluon.jit
def tanh(x, dtype: gl.constexpr):
    """The hardware's, as good as bfloat16; for float16 one from an exponential."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 - 2.0 / (gl.exp2(x * (2 * LOG2E)) + 1.0)
    return y


_SETTLED = gl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 a, b, c, d, e, f, g, h;
    mov.b32 a, $8;
    mov.b32 b, $9;
    mov.b32 c, $10;
    mov.b32 d, $11;
    mov.b32 e, $12;
    mov.b32 f, $13;
    mov.b32 g, $14;
    mov.b32 h, $15;
    or.b32 a, a, b;
    or.b32 c, c, d;
    or.b32 e, e, f;
    or.b32 g, g, h;
    or.b32 a, a, c;
    or.b32 e, e, g;
    or.b32 a, a, e;
    setp.eq.b32 p, a, 0xffffffff;
    @p nanosleep.u32 1;
    mov.b32 $0, $8;
    mov.b32 $1, $9;
    mov.b32 $2, $10;
    mov.b32 $3, $11;
    mov.b32 $4, $12;
    mov.b32 $5, $13;
    mov.b32 $6, $14;
    mov.b32 $7, $15;
    }"""
)


@gluon.jit
def settled(x):
    """x, once all of it has arrived from shared memory.

    A barrier waits for loads to be issued, not for what they bring, and the copy engine does not
    queue behind them: a buffer is free only when something has looked at every register.
    """
    if x.dtype == gl.float32:
        y = gl.inline_asm_elementwise(
            _SETTLED,
            "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
            [x],
            gl.float32,
            is_pure=False,
            pack=8,
        )
    elif x.dtype == gl.float16:
        y = gl.inline_asm_elementwise(
            _SETTLED,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
            [x],
            gl.float16,
            is_pure=False,
            pack=16,
        )
    else:
        y = gl.inline_asm_elementwise(
            _SETTLED,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
            [x],
            gl.bfloat16,
            is_pure=False,
            pack=16,
        )
    return y


@gluon.jit
def columns(N: gl.constexpr, L: gl.constexpr):
    """8 a + e, the part of a column that is the same in every thread."""
    slices: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    eights = gl.arange(0, N // 8, slices)
    pairs = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L))))
    col = 8 * eights.expand_dims(0).expand_dims(2).expand_dims(3)
    return col + pairs.expand_dims(0).expand_dims(0).expand_dims(0)


@gluon.jit
def lanes(L: gl.constexpr):
    """2 n, the part that is a lane's own: ``[1, 4]``."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    return 2 * gl.arange(0, 4, gl.SliceLayout(0, rows))[None, :]


@gluon.jit
def rows_of(L: gl.constexpr):
    """0 to 63: ``[64, 1]``."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    return gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]


@gluon.jit
def with_terms(C: gl.constexpr, S, copied, j, first, tile, terms, scale, dtype: gl.constexpr):
    """Scores with all but the mask. ``copied`` is the tile of a bias that came by TMA."""
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    inner, alibi = terms[:2]
    L: gl.constexpr = S.type.layout
    if C.SOFTCAP:
        S = tanh(S * inner, dtype)
    if C.ADDED:
        S = S * scale
    if C.BIAS == "copied":
        S = S + copied.to(gl.float32)
    elif C.BIAS != "":
        S = S + gathered(C, L, j, first, tile, terms).to(gl.float32)
    if C.ALIBI:
        r = rows_of(L)
        slope = gl.load(alibi + head * C.GROUP + r % C.GROUP)
        here = (first + offset + r // C.GROUP - j * C.BLOCK_K - lanes(L)).to(gl.float32)
        S = S - along_row(slope + 0.0 * here) * gl.abs(
            along_row(here) - columns(C.BLOCK_K, L).to(gl.float32)
        )
    return S


@gluon.jit
def gathered(C: gl.constexpr, L: gl.constexpr, j, first, tile, terms):
    """A bias from global memory, each number once for as many scores as share it in a thread."""
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    bias, bias_b, bias_h, bias_q, bias_k = terms[2:7]
    row = rows_of(L)
    column = columns(C.BLOCK_K, L) + along_row(lanes(L))
    at = bias + b.to(gl.int64) * bias_b + (head * C.GROUP).to(gl.int64) * bias_h
    if C.BIAS == "row":  # one for all queries
        at = at + (j * C.BLOCK_K).to(gl.int64) * bias_k
        x = gl.load(at + column * bias_k, mask=column < nk - j * C.BLOCK_K, other=0.0)
    else:
        at = at + first.to(gl.int64) * bias_q
        within = row // C.GROUP * bias_q + (row % C.GROUP).to(gl.int64) * bias_h
        seen = first + row // C.GROUP < nq
        if C.BIAS == "column":  # one for all keys
            x = along_row(gl.load(at + within, mask=seen, other=0.0))
        else:
            at = at + (j * C.BLOCK_K).to(gl.int64) * bias_k
            seen = along_row(seen) & (column < nk - j * C.BLOCK_K)
            x = gl.load(at + along_row(within) + column * bias_k, mask=seen, other=0.0)
    return x


@gluon.jit
def masked(C: gl.constexpr, S, j, first, tile, sizes, terms):
    """Scores of key tile j, -inf where a pair may not see each other.

    A thread's columns are constants but for its lane and the tile, so these move to the other
    side of the comparison: two limits a thread, and no register for a column.
    """
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    nq_, nk_, left, right = sizes
    L: gl.constexpr = S.type.layout
    col = columns(C.BLOCK_K, L)
    before = j * C.BLOCK_K + lanes(L)
    at = first + rows_of(L) // C.GROUP + offset
    if C.RIGHT:
        limit = gl.minimum(at + right + 1, nk) - before
    else:
        limit = nk - before
    seen = col < along_row(limit)
    if C.LEFT:
        seen = seen & (col >= along_row(at - left - before))
    if C.DOCUMENTS:
        q_ids, k_ids, ids_q, ids_k = terms[8:12]
        row = first + rows_of(L) // C.GROUP
        of_row = gl.load(q_ids + b * ids_q + row, mask=row < nq, other=0)
        key = col + along_row(before)
        of_key = gl.load(k_ids + b * ids_k + key, mask=key < nk, other=0)
        seen = seen & (of_key == along_row(of_row))
    return gl.where(seen, S, float("-inf"))


@gluon.jit
def partial(C: gl.constexpr, j, first, tile, sizes, terms):
    """Whether a tile may hold a pair that a mask with documents forbids."""
    token, head, b, q_row, k_row, nq, nk, offset, lo, hi = tile
    nq_, nk_, left, right = sizes
    q_ids, k_ids, ids_q, ids_k, q_range, k_range = terms[8:14]
    # ranges are kept for each sequence where ids are, else once for all
    q_at = q_range + 2 * (
        (b if ids_q else 0) * ((nq + C.TOKENS - 1) // C.TOKENS) + first // C.TOKENS
    )
    k_at = k_range + 2 * ((b if ids_k else 0) * ((nk_ + C.BLOCK_K - 1) // C.BLOCK_K) + j)
    begin = j * C.BLOCK_K
    here = first < nq
    low = gl.load(q_at, mask=here, other=0)
    some = low != gl.load(q_at + 1, mask=here, other=0)
    some = some | (low != gl.load(k_at)) | (low != gl.load(k_at + 1))
    some = some | (begin + C.BLOCK_K > nk)
    if C.RIGHT:
        some = some | (begin + C.BLOCK_K > first + offset + right + 1)
    if C.LEFT:
        some = some | (begin < first + C.TOKENS - 1 + offset - left)
    return some
