"""The pairs that dropout keeps (rules/dropout.py), in the threads that hold their scores.

A call of the generator makes the draws of eight keys, 8 apart. In a forward they are columns, and
one thread holds them all. In a backward they are rows, of four warps: each warp makes a quarter of
the draws of 64 keys, a bit each, and the warps exchange them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....rules import bound, dropout
from .assembly import KEEP, KEEP_BIT, KEEP_BY_BIT, multiply_text
from .layouts import only


@gluon.jit
def multiply(a, b: gl.constexpr):
    """Return the high and the low word of a product of words."""
    text: gl.constexpr = multiply_text(b)
    return gl.inline_asm_elementwise(
        text, "=r,=r,r", [a], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


philox_round = gluon.jit(
    bound(
        dropout.philox_round,
        multiply=multiply,
        M0=gl.constexpr(dropout.M0),
        M1=gl.constexpr(dropout.M1),
    )
)
philox = gluon.jit(
    bound(
        dropout.philox_rounds,
        philox_round=philox_round,
        unrolled=gl.static_range,
        ROUNDS=gl.constexpr(dropout.ROUNDS),
        # words are int32 here
        INCREMENT_0=gl.constexpr(dropout.INCREMENT_0 - (1 << 32)),
        INCREMENT_1=gl.constexpr(dropout.INCREMENT_1 - (1 << 32)),
        WORD=gl.constexpr(-1),
    )
)


class Place(NamedTuple):
    """The counters of a tile's first draw, within the longer call if it is a block of one."""

    block: Any  # the first key over 64
    row: Any  # the first query, or a query for each row
    head: Any
    b: Any


@gluon.jit
def first_draw(block, row, head, b, n):
    """Return the Place of keys from 64 ``block`` on, of a query, head and sequence of this call."""
    return Place(
        block + n.first_block, row + n.first_query, head + n.first_head, b + n.first_sequence
    )


@gluon.jit
def words_of(seed, column, row, head, b):
    """Return the four words of each counter, int32; ``seed`` is a pointer."""
    key = gl.load(seed)
    none = 0 * column + 0 * row
    counter = column + none, row + none, head + none, b + none
    return philox(counter, (key.to(gl.int32), (key >> 32).to(gl.int32)))


@gluon.jit
def upper(words, LOW):
    """Return draws in the upper halves of words: their low halves where LOW is 1, else the others.

    The rest of a word is part of a draw and changes no comparison with a whole number.
    """
    return words << (16 * LOW)


@gluon.jit
def along(L: gl.constexpr, RANK: gl.constexpr, axis: gl.constexpr, N: gl.constexpr):
    """Return 0 to N - 1 along an axis of a tile of this layout; the other axes have size 1."""
    x = gl.arange(0, N, only(L, RANK, axis))
    for other in gl.static_range(RANK):
        if other != axis:
            x = x.expand_dims(other)
    return x


@gluon.jit
def kept_columns(p, first, seed, threshold):
    """Return p ``[64, N]`` with 0 for the pairs that dropout drops, keys across.

    Rows and heads of the Place ``first`` are those of ``rows_of_draws``, or numbers.
    """
    BLOCKS: gl.constexpr = p.shape[1] // 64
    x = p.reshape([64, BLOCKS, 8, 4, 2])
    L: gl.constexpr = x.type.layout
    D: gl.constexpr = gl.SliceLayout(2, L)
    block = first.block + along(D, 4, 1, BLOCKS)
    column = 8 * block + 2 * along(D, 4, 2, 4) + along(D, 4, 3, 2)
    w0, w1, w2, w3 = words_of(seed, column, first.row, first.head, first.b)
    lane = along(L, 5, 2, 8)
    word = lane & 3
    w = gl.where(word < 2, gl.where(word == 0, w0.expand_dims(2), w1.expand_dims(2)),
                 gl.where(word == 2, w2.expand_dims(2), w3.expand_dims(2)))  # fmt: skip
    x = gl.inline_asm_elementwise(
        KEEP, "=f,f,r,r", [x, upper(w, 1 - (lane >> 2)), threshold << 16], gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(x.reshape(p.shape), p.type.layout)


@gluon.jit
def rows_of_draws(p):
    """Return 0 to 63, the rows of p ``[64, N]``, as ``kept_columns`` takes rows and heads."""
    x = p.reshape([64, p.shape[1] // 64, 8, 4, 2])
    return along(gl.SliceLayout(2, x.type.layout), 4, 0, 64)


# --- keys down ---------------------------------------------------------------------------------


@gluon.constexpr_function
def thread_bits():
    """Return the layout of ``drawn_bits`` in the threads that make them: a warp has 16 queries."""
    return gl.BlockedLayout([1, 1, 1], [8, 1, 4], [1, 4, 1], [2, 1, 0])


@gluon.jit
def drawn_bits(first, seed, threshold):
    """Return the bits ``[8, 4, 4]`` of 64 keys and 64 queries from a Place on, one a thread.

    Key 8 a + r and query 16 v + 8 h + 2 c + e have bit 8 (2 h + e) + a of number (r, v, c): 1 if
    dropout keeps the pair.
    """
    L: gl.constexpr = thread_bits()
    column = 8 * first.block + along(L, 3, 0, 8)
    row = first.row + 16 * along(L, 3, 1, 4) + 2 * along(L, 3, 2, 4)
    bits = 0 * column + 0 * row
    for i in gl.static_range(4):
        words = words_of(seed, column, row + 8 * (i // 2) + i % 2, first.head, first.b)
        for a in gl.static_range(8):
            draw = upper(words[a % 4], 1 - a // 4)
            bits = gl.inline_asm_elementwise(
                KEEP_BIT, "=&r,r,r,r,r", [bits, draw, threshold << 16, 1 << (8 * i + a)], gl.int32,
                is_pure=True, pack=1,
            )  # fmt: skip
    return bits


@gluon.jit
def kept_rows(x, bits):
    """Return x ``[64, 64]`` with 0 for the pairs that dropout drops: bits of ``drawn_bits``."""
    # warp, half of its rows, row of 8; 16 queries, half of them, lane, and one of its two
    split = x.reshape([4, 2, 8, 4, 2, 4, 2])
    L: gl.constexpr = split.type.layout
    own: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(6, L)))
    )
    word = gl.convert_layout(bits, own)
    word = word.expand_dims(0).expand_dims(1).expand_dims(4).expand_dims(6)
    word = word >> (2 * along(L, 7, 0, 4))
    place = along(L, 7, 1, 2) + 16 * along(L, 7, 4, 2) + 8 * along(L, 7, 6, 2)
    kept = gl.inline_asm_elementwise(
        KEEP_BY_BIT, "=f,f,r,r", [split, word, 1 << place], gl.float32, is_pure=True, pack=1
    )
    return gl.convert_layout(kept.reshape(x.shape), x.type.layout)
