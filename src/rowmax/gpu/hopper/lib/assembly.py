"""The inline assembly of the kernels, each text under a name."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TANH = gl.constexpr("tanh.approx.f32 $0, $1;")
TO_BFLOAT16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TO_FLOAT16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")

#: two numbers of bfloat16 are the upper halves of two of float32
FROM_BFLOAT16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")

#: log2 of a normal number, within 2^-22
LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")

#: Two numbers times a factor, each as a sum: the rounded product, and what it lacks. The factor is
#: a sum of two numbers, too, and the second FMA adds the lesser one's product.
SPLIT_PRODUCT = gl.constexpr(
    """{
    .reg .b32 s, t, r;
    .reg .f32 a, b;
    cvt.rn.bf16x2.f32 s, $3, $3;
    and.b32 t, s, 0xffff0000;
    mov.b32 b, t;
    sub.f32 a, $3, b;
    cvt.rn.bf16x2.f32 t, a, a;
    mul.rn.bf16x2 $0, $2, s;
    neg.bf16x2 r, $0;
    fma.rn.bf16x2 r, $2, s, r;
    fma.rn.bf16x2 $1, $2, t, r;
    }"""
)

#: Wait until a number in memory, which other engines store, is at least $2, and return it. After
#: 600 seconds the kernel ends with an error. Later copies by TMA read what was stored before it.
WAIT_FOR_COUNT = gl.constexpr(
    """{
    .reg .pred p;
    .reg .b64 begin, now;
    mov.u64 begin, %globaltimer;
    AGAIN:
    ld.acquire.sys.global.b32 $0, [$1];
    setp.ge.s32 p, $0, $2;
    @p bra DONE;
    nanosleep.u32 100;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.lt.u64 p, now, 600000000000;
    @p bra AGAIN;
    trap;
    DONE:
    bar.warp.sync 0xffffffff;
    shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;
    fence.proxy.async.global;
    }"""
)

#: A number if a draw is at least $3, else 0. Draws are unsigned, in the upper half of a word. One
#: text for both instructions: the compiler would gather all comparisons before all selections.
KEEP = gl.constexpr("{ .reg .pred p; setp.ge.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }")
#: Bits, with those of $4 if a draw is at least $3.
KEEP_BIT = gl.constexpr(
    "{ .reg .pred p; setp.ge.u32 p, $2, $3; mov.b32 $0, $1; @p or.b32 $0, $0, $4; }"
)
#: A number if bits have that of $3, else 0.
KEEP_BY_BIT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 a; and.b32 a, $2, $3; setp.ne.b32 p, a, 0; "
    "selp.f32 $0, $1, 0f00000000, p; }"
)

CLOCK = gl.constexpr("mov.u32 $0, %clock;")
NANOSECONDS = gl.constexpr("mov.u32 $0, %globaltimer_lo;")


@gluon.constexpr_function
def settle_text(n):
    """Return the text that copies n registers, and reads all in an instruction that needs them."""
    copies = [f"mov.b32 ${i}, ${n + i};" for i in range(n)]
    reads = [f"or.b32 a, a, ${n + i};" for i in range(1, n)]
    lines = [
        ".reg .pred p; .reg .b32 a;",
        f"mov.b32 a, ${n};",
        *reads,
        "setp.eq.b32 p, a, 0xffffffff;",
        "@p nanosleep.u32 1;",
        *copies,
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def copy_constraints(kind, n):
    """Return the constraints of n registers that are copied to n others."""
    return ",".join([f"={kind}"] * n + [kind] * n)


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

#: Move the reference of two rows by log2 of the largest sum of weights of their lanes, past 2^8,
#: and by no more than MOST; and the factor of O: 1 where the reference stays.
FOLLOW = gl.constexpr(
    """{
    .reg .pred p, q, r;
    .reg .f32 a, b, s, t;
    setp.gt.f32 p, $4, 0f43800000;
    setp.gt.or.f32 r, $5, 0f43800000, p;
    mov.f32 $0, $6;
    mov.f32 $1, $7;
    mov.f32 $2, 0f3F800000;
    mov.f32 $3, 0f3F800000;
    vote.sync.any.pred r, r, 0xffffffff;
    @!r bra KEEP;
    shfl.sync.bfly.b32 a, $4, 1, 31, 0xffffffff;
    shfl.sync.bfly.b32 b, $5, 1, 31, 0xffffffff;
    max.f32 a, a, $4;
    max.f32 b, b, $5;
    shfl.sync.bfly.b32 s, a, 2, 31, 0xffffffff;
    shfl.sync.bfly.b32 t, b, 2, 31, 0xffffffff;
    max.f32 a, a, s;
    max.f32 b, b, t;
    setp.gt.f32 p, a, 0f43800000;
    setp.gt.f32 q, b, 0f43800000;
    min.f32 a, a, 0f71800000;
    min.f32 b, b, 0f71800000;
    lg2.approx.ftz.f32 a, a;
    lg2.approx.ftz.f32 b, b;
    @p add.f32 $0, $6, a;
    @q add.f32 $1, $7, b;
    sub.f32 a, $6, $0;
    sub.f32 b, $7, $1;
    ex2.approx.ftz.f32 $2, a;
    ex2.approx.ftz.f32 $3, b;
    KEEP:
    }"""
)


@gluon.constexpr_function
def multiply_text(b):
    """Return the text of the high and the low word of a word times b."""
    return (
        f"{{ .reg .b64 p; .reg .b32 b; mov.b32 b, {b:#x}; mul.wide.u32 p, $2, b; "
        "mov.b64 {$1, $0}, p; }"
    )


@gluon.constexpr_function
def scale_text(n):
    """Return the text that multiplies n numbers, of two rows, by the factors of their rows.

    Nothing is multiplied where all factors of a warp are 1. Numbers 0 and 2 are of both rows.
    """
    products = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    lines = [
        ".reg .pred p;",
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra KEEP;",
        *products,
        "KEEP:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def scale_constraints(n):
    """Return the constraints of ``scale_text``: the numbers stay in their registers."""
    return ",".join(["=&f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def turn_text(verb, c):
    """Return the text that waits for the turn of warpgroup c ("sync"), or gives it ("arrive").

    Triton's barriers have lower numbers.
    """
    return f"bar.{verb} {9 + c}, 256; mov.u32 $0, 0;"


#: the verbs of ``publish_text``
STORE = gl.constexpr("st.release.gpu.global.b32")
ADD = gl.constexpr("red.release.gpu.global.add.s32")


@gluon.constexpr_function
def publish_text(verb):
    """Return the text that stores or adds a number in global memory, in one lane.

    The copies that the warp has begun are in memory before.
    """
    return (
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        f"@p {verb} [$1], $2; }} mov.u32 $0, 0;"
    )
