"""The online softmax of one tile, with no value shared between threads.

A warpgroup holds its scores ``[64, BLOCK_K]`` in the layout of a tensor core: the four lanes of a
quad share a row, lane n with columns ``8 a + 2 n + e``. In the shape ``[64, BLOCK_K/8, 4, 2]`` a
reduction over the second and the last dimension stays within a thread. The statistics of a row,
``[64, 4]``, have one number for each lane: m is the same in all four, l is a partial sum.

m is not the running maximum but a reference that follows it. The reference moves only where a
maximum exceeds it by a factor of more than 2^8, so weights stay below 2^8. Elsewhere the factor of
O is 1. The result is exact for any reference.

The reference is in base 2, with log2(e) in the factor of a score, so that an exponent is one FMA.
A step may also take no maximum (``lagging_step``; rules/softmax.py): the reference follows the sums
of the weights of the step before.

Natural scores (``Problem.natural``) have a natural reference, and only their difference is
multiplied by log2(e): a bias of 3e38, or the lowest number of float32, would overflow in base 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....rules import softmax
from .assembly import FOLLOW, MOVE, MOVE_NATURAL, TO_BFLOAT16, TO_FLOAT16

#: below any score, and finite, so that a row that sees nothing has exp2(-inf) = 0, not NaN
LOWEST = gl.constexpr(-1e30)
#: the lowest number of float32; no natural score is below it
LOWEST_NATURAL = gl.constexpr(-3.4028234663852886e38)
#: a first reference, in base 2: scores that begin low, under a mask in a bias, may rise to 95
FIRST = gl.constexpr(-32.0)
FIRST_WEIGHT = gl.constexpr(2.0**-32)
#: the least sum of weights by that reference: with less, weights times small values would vanish
LEAST = gl.constexpr(2.0**-20)
LOG2E = gl.constexpr(softmax.LOG2E)
LN2 = gl.constexpr(softmax.LN2)
FULL = gl.constexpr(softmax.FULL)


@gluon.jit
def by_lane(x):
    """Return x ``[64, N]`` as ``[64, N/8, 4, 2]``."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def along_row(r):
    """Return r ``[64, 4]`` as ``[64, 1, 4, 1]``, which broadcasts to ``[64, N/8, 4, 2]``."""
    return r.expand_dims(1).expand_dims(3)


@gluon.jit
def rounded(p, dtype: gl.constexpr):
    """Return p in the dtype of the product.

    In assembly: the compiler would delay the conversion until the next product, where no running
    product hides it.
    """
    if dtype == gl.bfloat16:
        r = gl.inline_asm_elementwise(
            TO_BFLOAT16, "=r,f,f", [p], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        r = gl.inline_asm_elementwise(TO_FLOAT16, "=r,f,f", [p], gl.float16, is_pure=False, pack=2)
    return r


@gluon.jit
def moved(m, peak, NATURAL: gl.constexpr):
    """Return the new reference of each row, ``[64, 4]``; ``peak`` is a lane's own maximum.

    The quad exchanges maxima only when some lane of the warp has passed the threshold. A row moves
    by its own maximum, so no row depends on its neighbours.
    """
    text: gl.constexpr = MOVE_NATURAL if NATURAL else MOVE
    return gl.inline_asm_elementwise(
        text, "=&f,=&f,f,f,f,f", [peak, m], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def softmax_step(
    x, m, l, scale, NATURAL: gl.constexpr, LATE: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """Return (p, m, l, alpha): weights, statistics of the rows, and the factor of O.

    p is ``[64, N]``, of scores x ``[64, N/8, 4, 2]``, and rounded unless LATE.
    ``scale`` includes log2(e): x is the product, and exponents are of two. Natural scores include
    their scale.
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
    if not LATE:
        p = rounded(p, dtype)
    return p.reshape([x.shape[0], 8 * x.shape[1]]), m_new, l, alpha


@gluon.jit
def followed(m, l, s):
    """Return (m, l, alpha) once the reference m has followed s, the lanes' sums of weights.

    A row moves by the largest sum of its own lanes, as in ``moved``. alpha is the factor of O, and
    of the weights of s where O does not have them yet.
    """
    m_new, alpha = gl.inline_asm_elementwise(
        FOLLOW, "=&f,=&f,=&f,=&f,f,f,f,f", [s, m], dtype=(gl.float32, gl.float32),
        is_pure=True, pack=2,
    )  # fmt: skip
    return m_new, l * alpha, alpha


@gluon.jit
def lagging_step(x, m, l, scale, LATE: gl.constexpr, dtype: gl.constexpr):
    """Return (p, l, s): weights by the reference m as it is, and their sums by lane.

    Arguments are those of ``softmax_step``, scores in base 2. Weights below 2^8 follow from scores
    that have not risen; past 2^127 they are infinite, and then l is never finite again.
    """
    p = gl.exp2(x * scale - along_row(m))
    s = gl.sum(gl.sum(p, 3), 1)
    if not LATE:
        p = rounded(p, dtype)
    return p.reshape([x.shape[0], 8 * x.shape[1]]), l + s, s
