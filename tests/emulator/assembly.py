"""The inline assembly of the kernels, each text with its meaning in Python.

``inline_asm`` raises for any other text, so a changed instruction needs a new meaning. White space
does not matter. Fences and warp barriers mean nothing: the memory of the emulator has
one order, and a partition is one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rowmax.rules import bound, softmax

from . import threads
from .memory import land_stores
from .values import Pointer, Tensor, raw


def exp2(x: Any) -> Any:
    """Return 2^x; 0 where it is below the normal numbers, as of ``ex2.approx.ftz``."""
    y = np.exp2(x)
    return np.where(y < np.finfo(np.float32).tiny, np.float32(0.0), y)


_followed = bound(softmax.followed, where=np.where, log2=np.log2, min=np.fmin)

#: the meaning of each text: a function of the arguments and the dtype of the result
MEANINGS: dict[str, Callable[[list[Any], Any], Any]] = {}


def means(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare that the decorated function is what ``text`` does."""

    def declare(meaning: Callable[..., Any]) -> Callable[..., Any]:
        MEANINGS[_plain(text)] = meaning
        return meaning

    return declare


def inline_asm(text: str, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    """Return what the text computes of the arguments."""
    meaning = MEANINGS.get(_plain(text))
    if meaning is None:
        raise NotImplementedError(f"tests/emulator/assembly.py declares no meaning of: {text}")
    return meaning(args, dtype)


def _plain(text: str) -> str:
    return " ".join(text.split())


# --- numbers -----------------------------------------------------------------------------------


@means("tanh.approx.f32 $0, $1;")
def tanh(args: list[Any], dtype: Any) -> Tensor:
    return Tensor(np.tanh(args[0].a))


@means("lg2.approx.ftz.f32 $0, $1;")
def log2(args: list[Any], dtype: Any) -> Tensor:
    with np.errstate(divide="ignore"):
        return Tensor(np.log2(args[0].a))


@means(
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
def split_product(args: list[Any], dtypes: Any) -> tuple[Tensor, Tensor]:
    exact = args[0].a.astype(np.float64) * float(raw(args[1]))
    high = Tensor(exact).to(dtypes[0])
    return high, Tensor(exact - high.a).to(dtypes[1])


@means(
    "{ .reg .b64 p; .reg .b32 b; mov.b32 b, 0xd2511f53; mul.wide.u32 p, $2, b; "
    "mov.b64 {$1, $0}, p; }"
)
def multiply_by_first(args: list[Any], dtypes: Any) -> tuple[Tensor, Tensor]:
    return _multiplied(args, 0xD2511F53)


@means(
    "{ .reg .b64 p; .reg .b32 b; mov.b32 b, 0xcd9e8d57; mul.wide.u32 p, $2, b; "
    "mov.b64 {$1, $0}, p; }"
)
def multiply_by_second(args: list[Any], dtypes: Any) -> tuple[Tensor, Tensor]:
    return _multiplied(args, 0xCD9E8D57)


def _multiplied(args: list[Any], b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of words times b."""
    product = _unsigned(args[0]).astype(np.uint64) * np.uint64(b)
    high, low = product >> np.uint64(32), product & np.uint64(0xFFFFFFFF)
    return Tensor(_word(high)), Tensor(_word(low))


def _unsigned(x: Any) -> Any:
    return np.asarray(raw(x), np.int32).view(np.uint32)


def _word(x: Any) -> Any:
    return x.astype(np.uint32).view(np.int32)


@means("{ .reg .pred p; setp.ge.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }")
def keep(args: list[Any], dtype: Any) -> Tensor:
    x, draw, threshold = args
    return Tensor(np.where(_unsigned(draw) >= _unsigned(threshold), x.a, np.float32(0.0)))


@means("{ .reg .pred p; setp.ge.u32 p, $2, $3; mov.b32 $0, $1; @p or.b32 $0, $0, $4; }")
def keep_bit(args: list[Any], dtype: Any) -> Tensor:
    bits, draw, threshold, bit = args
    kept = _unsigned(draw) >= _unsigned(threshold)
    return Tensor(np.where(kept, bits.a | _word(np.int64(bit)), bits.a))


@means(
    """{ .reg .pred p; .reg .b32 a; and.b32 a, $2, $3; setp.ne.b32 p, a, 0;
    selp.f32 $0, $1, 0f00000000, p; }"""
)
def keep_by_bit(args: list[Any], dtype: Any) -> Tensor:
    x, bits, bit = args
    return Tensor(np.where((bits.a & bit.a) != 0, x.a, np.float32(0.0)))


@means("cvt.rn.bf16x2.f32 $0, $2, $1;")
@means("cvt.rn.f16x2.f32 $0, $2, $1;")
def convert(args: list[Any], dtype: Any) -> Tensor:
    return args[0].to(dtype)


@means(
    """{
    .reg .pred p; .reg .b32 a;
    mov.b32 a, $1;
    setp.eq.b32 p, a, 0xffffffff;
    @p nanosleep.u32 1;
    mov.b32 $0, $1;
    }"""
)
@means(
    """{
    .reg .pred p; .reg .b32 a;
    mov.b32 a, $2;
    or.b32 a, a, $3;
    setp.eq.b32 p, a, 0xffffffff;
    @p nanosleep.u32 1;
    mov.b32 $0, $2; mov.b32 $1, $3;
    }"""
)
@means(
    """{
    .reg .pred p; .reg .b32 a;
    mov.b32 a, $8;
    or.b32 a, a, $9; or.b32 a, a, $10; or.b32 a, a, $11; or.b32 a, a, $12;
    or.b32 a, a, $13; or.b32 a, a, $14; or.b32 a, a, $15;
    setp.eq.b32 p, a, 0xffffffff;
    @p nanosleep.u32 1;
    mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11;
    mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;
    }"""
)
def settle(args: list[Any], dtype: Any) -> Tensor:
    """Return the argument: a load from shared memory is complete when it returns here."""
    return args[0]


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


@means(_MOVE.replace("THRESHOLD", "0f41000000"))
def move(args: list[Any], dtype: Any) -> Tensor:
    """Return the maximum of a row where it exceeds the reference by more than 8, else that."""
    return _moved(args, np.float32(8.0))


@means(_MOVE.replace("THRESHOLD", "0f40b17218"))
def move_natural(args: list[Any], dtype: Any) -> Tensor:
    """Return the maximum of a row where it exceeds the reference by more than 8 ln 2."""
    return _moved(args, np.float32(8.0 * np.log(2.0)))


def _moved(args: list[Any], threshold: np.float32) -> Tensor:
    """Return the new reference ``[64, 4]``; the four columns are the lanes of a quad."""
    peak, m = args[0].a, args[1].a
    top = np.broadcast_to(peak.max(1, keepdims=True), m.shape)
    return Tensor(np.where(top > m + threshold, top, m))


@means(
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
def follow_sums(args: list[Any], dtype: Any) -> tuple[Tensor, Tensor]:
    """Return the reference of each row after the largest sum of its lanes, and the factor of O."""
    s, m = args[0].a, args[1].a
    top = np.broadcast_to(np.fmax.reduce(s, axis=1, keepdims=True), m.shape)
    with np.errstate(invalid="ignore"):
        new = _followed(m, top).astype(np.float32)
        return Tensor(new), Tensor(exp2(m - new))


def _scale(n: int) -> None:
    """Declare the product of n numbers of a thread with the factors of their rows."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))

    @means(
        f"""{{
        .reg .pred p;
        setp.neu.f32 p, ${2 * n}, 0f3F800000;
        setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra KEEP;
        {products}
        KEEP:
        }}"""
    )
    def scale(args: list[Any], dtype: Any) -> Tensor:
        return args[0] * args[1]


for _n in (8, 16, 32, 64, 128):
    _scale(_n)


# --- order -------------------------------------------------------------------------------------


def _meet(barrier: int, *, waits: bool) -> None:
    """Declare one side of a named barrier of two warpgroups: a thread stands for 128."""
    verb = "sync" if waits else "arrive"

    @means(f"bar.{verb} {barrier}, 256; mov.u32 $0, 0;")
    def meet(args: list[Any], dtype: Any) -> None:
        threads.meet(barrier, 128, 256, waits=waits)


for _barrier in (9, 10, 11):
    _meet(_barrier, waits=True)
    _meet(_barrier, waits=False)


# --- memory ------------------------------------------------------------------------------------


@means("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;")
def follow(args: list[Any], dtype: Any) -> None:
    """Do nothing: one launch runs at a time."""


@means(
    "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; "
    "fence.proxy.async.global;"
)
def load_acquire(args: list[Pointer], dtype: Any) -> Tensor:
    threads.pause(2e-4)
    (place,) = args
    threads.check()
    return Tensor(place.memory[place.at].copy())


@means(
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
def wait_for_count(args: list[Any], dtype: Any) -> Tensor:
    """Return the number at a place, once it is at least another."""
    place, number = args
    while place.memory[place.at] < raw(number):
        threads.pause(2e-4)
        threads.check()
    return Tensor(place.memory[place.at].copy())


def _publish(verb: str, *, adds: bool) -> None:
    """Declare a store or a sum that follows this thread's copies."""

    @means(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        f"@p {verb} [$1], $2; }} mov.u32 $0, 0;"
    )
    def publish(args: list[Any], dtype: Any) -> None:
        land_stores()
        place, value = args
        place.memory[place.at] = raw(value) + (place.memory[place.at] if adds else 0)
        threads.progress()


_publish("st.release.gpu.global.b32", adds=False)
_publish("red.release.gpu.global.add.s32", adds=True)
