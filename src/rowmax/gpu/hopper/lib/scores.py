"""The positions of a thread's scores, the hyperbolic tangent, and a wait for loads.

Scores have the shape of the softmax, ``[64, N/8, 4, 2]`` (softmax.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .assembly import FROM_BFLOAT16, TANH, copy_constraints, settle_text
from .softmax import LOG2E


@gluon.jit
def tanh_of_hardware(x):
    """Return tanh x, as exact as bfloat16."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh_from_exponential(x):
    """Return tanh x, as exact as float16 needs."""
    return 1.0 - 2.0 / (gl.exp2(x * (2 * LOG2E)) + 1.0)


@gluon.jit
def widened(x):
    """Return x in float32, an instruction a number (the compiler takes three for two)."""
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            FROM_BFLOAT16, "=f,=f,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(gl.float32)
    return y


@gluon.jit
def settled(x, N: gl.constexpr = 8):
    """Wait until all of x has arrived from shared memory; return it. N registers are read at once.

    A barrier waits until loads are issued, not until their values arrive, and a TMA copy may
    overtake them. A buffer is free only when an instruction has read every register.
    """
    kind: gl.constexpr = "f" if x.dtype == gl.float32 else "r"
    constraints: gl.constexpr = copy_constraints(kind, N)
    pack: gl.constexpr = N * 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        settle_text(N), constraints, [x], x.dtype, is_pure=False, pack=pack
    )


@gluon.jit
def columns(N: gl.constexpr, L: gl.constexpr):
    """Return 8 a + e, ``[1, N/8, 1, 2]``: the part of a column that all threads share."""
    slices: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    eights = gl.arange(0, N // 8, slices)
    pairs = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L))))
    col = 8 * eights.expand_dims(0).expand_dims(2).expand_dims(3)
    return col + pairs.expand_dims(0).expand_dims(0).expand_dims(0)


@gluon.jit
def lanes(L: gl.constexpr):
    """Return 2 n, ``[1, 4]``: the part of a column that depends on the lane."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    return 2 * gl.arange(0, 4, gl.SliceLayout(0, rows))[None, :]


@gluon.jit
def rows_of(L: gl.constexpr):
    """Return 0 to 63, ``[64, 1]``."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    return gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
