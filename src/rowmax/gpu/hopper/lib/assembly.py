"""The inline assembly of the kernels, each text under a name."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TANH = gl.constexpr("tanh.approx.f32 $0, $1;")
TO_BFLOAT16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TO_FLOAT16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")

#: two numbers of bfloat16 are the upper halves of two of float32
FROM_BFLOAT16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")

CLOCK = gl.constexpr("mov.u32 $0, %clock;")
NANOSECONDS = gl.constexpr("mov.u32 $0, %globaltimer_lo;")

#: Copies eight registers, and reads all of them in one instruction that depends on their values.
SETTLE = gl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 a, b, c, d, e, f, g, h;
    mov.b32 a, $8; mov.b32 b, $9; mov.b32 c, $10; mov.b32 d, $11;
    mov.b32 e, $12; mov.b32 f, $13; mov.b32 g, $14; mov.b32 h, $15;
    or.b32 a, a, b; or.b32 c, c, d; or.b32 e, e, f; or.b32 g, g, h;
    or.b32 a, a, c; or.b32 e, e, g; or.b32 a, a, e;
    setp.eq.b32 p, a, 0xffffffff;
    @p nanosleep.u32 1;
    mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11;
    mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;
    }"""
)

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
#: Move the reference of two rows where a maximum has passed it by more than 2^8: by 8 in base 2,
#: by 8 ln 2 in natural units.
MOVE = gl.constexpr(_MOVE.replace("THRESHOLD", "0f41000000"))
MOVE_NATURAL = gl.constexpr(_MOVE.replace("THRESHOLD", "0f40b17218"))


@gluon.constexpr_function
def turn_text(verb, c):
    """Return the text that waits for the turn of warpgroup c ("sync"), or gives it ("arrive").

    Triton's barriers have lower numbers.
    """
    return f"bar.{verb} {9 + c}, 256; mov.u32 $0, 0;"
