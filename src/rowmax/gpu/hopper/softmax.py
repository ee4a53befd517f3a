"""The online softmax of one tile, with nothing shared between threads.

A warpgroup holds its scores ``[64, BLOCK_K]`` as a tensor core leaves them: the four lanes of
a quad share a row, lane n with columns ``8 a + 2 n + e``. Seen as ``[64, BLOCK_K/8, 4, 2]``, a
reduction over the second and the last dimension stays within a thread, and what is kept of a
row, ``[64, 4]``, is one number a lane: m agrees across the four, l is a partial sum.

m is not the running maximum but a reference that follows it: it moves, and O is rescaled, only
where a maximum has passed it by more than 2^8, so that weights stay below that. The result is
exact for any reference.

The reference is in base 2, with log2(e) in the factor of a score, so that an exponent is one FMA.
Natural scores (``Problem.natural``) have a natural reference, and only their difference is
multiplied by log2(e): a bias of 3e38, or the lowest number there is, would overflow in base 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: below any score, and finite, so that a row of nothing gives exp2(-inf) = 0, never NaN
LOWEST = gl.constexpr(-1e30)
#: the lowest number there is, below which no natural score is
LOWEST_NATURAL = gl.constexpr(-3.4028234663852886e38)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def by_lane(x):
    """``[64, N]`` as ``[64, N/8, 4, 2]``."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def along_row(r):
    """``[64, 4]`` against ``[64, N/8, 4, 2]``."""
    return r.expand_dims(1).expand_dims(3)


#: moves a reference where a maximum has passed it by more than THRESHOLD
_MOVE = """{
    .reg .pred p, q, r;
    .reg .f32 a, b, s, t;
    add.f32 s, $4, THRESHOLD;
    add.f32 t, $5, THRESHOLD;
    setp.gt.f32 p, $2, s;
    setp.gt.or.f32 r, $3, t, p;
    mov.f32 $0, $4;
    mov.f32 $1, $5;
    vote.sync.any.pred r, r, 0xffffffff;
    @!r bra KEEP;
    shfl.sync.bfly.b32 a, $2, 1, 31, 0xffffffff;
    shfl.sync.bfly.b32 b, $3, 1, 31, 0xffffffff;
    max.f32 a, a, $2;
    max.f32 b, b, $3;
    shfl.sync.bfly.b32 $0, a, 2, 31, 0xffffffff;
    shfl.sync.bfly.b32 $1, b, 2, 31, 0xffffffff;
    max.f32 a, a, $0;
    max.f32 b, b, $1;
    setp.gt.f32 p, a, s;
    setp.gt.f32 q, b, t;
    selp.f32 $0, a, $4, p;
    selp.f32 $1, b, $5, q;
    KEEP:
    }"""
#: how far a maximum may pass the reference before it moves: 2^8, in base 2 (8) and natural (8 ln 2)
_MOVED = gl.constexpr(_MOVE.replace("THRESHOLD", "0f41000000"))
_MOVED_NATURAL = gl.constexpr(_MOVE.replace("THRESHOLD", "0f40b17218"))


@gluon.jit
def rounded(p, dtype: gl.constexpr):
    """p in the dtype of the product. Said in assembly, because the compiler would put it off
    until the product, out from under the one that is running."""
    if dtype == gl.bfloat16:
        r = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        r = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, is_pure=False, pack=2
        )
    return r


@gluon.jit
def moved(m, peak, NATURAL: gl.constexpr):
    """The new reference of each row; ``peak`` is a lane's own maximum.

    The quad compares notes only when some lane of the warp has passed the threshold, and a row
    moves on its own account, so that no row depends on its neighbours.
    """
    text: gl.constexpr = _MOVED_NATURAL if NATURAL else _MOVED
    return gl.inline_asm_elementwise(
        text, "=&f,=&f,f,f,f,f", [peak, m], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def softmax_step(x, m, l, scale, NATURAL: gl.constexpr):
    """Weights of a tile of scores x against the reference: (p, m, l, what O is to be scaled by).

    ``scale`` carries log2(e): scores enter as they left the product, exponents are of two.
    Natural scores are whole.
    """
    peak = gl.max(gl.max(x, 3), 1)
    if NATURAL:
        m_new = moved(m, peak, True)
        p = gl.exp2((x - along_row(m_new)) * LOG2E)
        alpha = gl.exp2((m - m_new) * LOG2E)
    else:
        m_new = moved(m, peak * scale, False)
        p = gl.exp2(x * scale - along_row(m_new))
        alpha = gl.exp2(m - m_new)
    l = l * alpha + gl.sum(gl.sum(p, 3), 1)
    return p, m_new, l, alpha
