"""Steps of a row over vectors of 16 numbers, as LLVM IR.

LLVM makes vectors of 256 bits of Numba's loops on Intel's processors, and 22 instructions of the
range of an exponential. Written out, they are vectors of 512 bits, and two instructions of AVX-512.
Other processors run the same IR in narrower vectors, with an exponential of plain operations.

A row is given by its address; its count of numbers is a multiple of ``STEP``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ..rules.softmax import score_gradient
from .vector import (
    F32,
    FEATURES,
    I16,
    I32,
    TILE_K,
    TILE_Q,
    Value,
    W,
    const,
    declared,
    emitted,
    loop,
    repeated,
    rounded,
    shuffled,
)

LANES, STEP = 16, 32  # numbers of a vector; of a step of a loop

#: coefficients of f, f^2, .. in ``2^f - 1`` on [0, 1): relative errors 3.3e-6, for weights that are
#: rounded to bfloat16, and 2.2e-9. Their sum is 1: the weight of a row's greatest score, 2^0 or
#: just below, is exact
_EXP2_BFLOAT = (
    0.6930321208213494,
    0.24137976288891044,
    0.05203236913271023,
    0.013555747157029976,
)
_EXP2 = (
    0.6931470324006426,
    0.24022951328618783,
    0.05548415247612147,
    0.009678063876108676,
    0.0012440877066409789,
    0.00021715025429841638,
)
_FLAGS = ("contract", "nsz")  # NaN, inf and the order of additions stay

FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
TWO_BFLOATS = ir.VectorType(I16, 2 * LANES)

_ROUNDS = {"avx512f", "avx512dq"} <= FEATURES  # has instructions for floor and 2^floor
_SHORTENS = {"avx512f", "avx512bf16"} <= FEATURES  # has one for float32 to bfloat16


class Lanes:
    """A vector of float32; operators emit instructions."""

    def __init__(self, builder: ir.IRBuilder, value: Value) -> None:
        self.builder, self.value = builder, value

    def _by(self, operation: Callable[..., Value], x: Lanes | float) -> Lanes:
        return Lanes(self.builder, operation(self.value, self._other(x), flags=_FLAGS))

    def _other(self, x: Lanes | float) -> Value:
        return x.value if isinstance(x, Lanes) else self.all(x).value

    def all(self, x: float) -> Lanes:
        """Return the same number in every lane."""
        return Lanes(self.builder, ir.Constant(FLOATS, [float(np.float32(x))] * LANES))

    def __add__(self, x: Lanes | float) -> Lanes:
        return self._by(self.builder.fadd, x)

    def __sub__(self, x: Lanes | float) -> Lanes:
        return self._by(self.builder.fsub, x)

    def __mul__(self, x: Lanes | float) -> Lanes:
        return self._by(self.builder.fmul, x)

    def where(
        self, relation: str, x: Lanes | float, yes: Lanes | float, no: Lanes | float
    ) -> Lanes:
        """Return ``yes`` in the lanes where the relation to x holds, else ``no``."""
        test = self.builder.fcmp_ordered(relation, self.value, self._other(x))
        return Lanes(self.builder, self.builder.select(test, self._other(yes), self._other(no)))

    def call(self, name: str, *more: Value) -> Lanes:
        """Call an LLVM function of this vector."""
        arguments = [self.value, *more]
        kind = ir.FunctionType(FLOATS, [x.type for x in arguments])
        function = declared(self.builder, name, kind)
        return Lanes(self.builder, self.builder.call(function, arguments))

    def total(self) -> Value:
        """Return the sum of the lanes."""
        x = self
        for width in (8, 4, 2, 1):
            x = x + Lanes(
                self.builder, shuffled(self.builder, x.value, [i ^ width for i in range(16)])
            )
        return self.builder.extract_element(x.value, const(0, I32))

    def greatest(self) -> Value:
        """Return the greatest lane."""
        x = self
        for width in (8, 4, 2, 1):
            y = Lanes(self.builder, shuffled(self.builder, x.value, [i ^ width for i in range(16)]))
            x = x.where(">", y, x, y)
        return self.builder.extract_element(x.value, const(0, I32))


def halves(step: int, lanes: int) -> tuple[list[int], list[int]]:
    """Return lanes of a pair of vectors: of the first where the bit ``step`` is 0, else the second.

    The first list has the lanes in which the bit is 0, the second those in which it is 1.
    """
    low = [i if not i & step else lanes + i - step for i in range(lanes)]
    return low, [i + step if not i & step else lanes + i for i in range(lanes)]


def spread(b: ir.IRBuilder, x: Value) -> Lanes:
    """Return a number in every lane."""
    return Lanes(b, repeated(b, x, LANES))


def load(b: ir.IRBuilder, address: Value, kind: ir.Type = FLOATS) -> Value:
    """Load a vector from any address."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=2)


def write(b: ir.IRBuilder, value: Value, address: Value) -> None:
    """Write a vector to any address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=2)


def floats(b: ir.IRBuilder, address: Value) -> Lanes:
    """Load 16 float32."""
    return Lanes(b, load(b, address))


def offset(b: ir.IRBuilder, address: Value, i: Value, size: int, more: int = 0) -> Value:
    """Return the address of element ``i + more``, of ``size`` bytes."""
    return b.add(address, b.mul(b.add(i, const(more)), const(size)))


def exp2(x: Lanes, coefficients: Sequence[float]) -> Lanes:
    """Return ``2^floor(x) (1 + f ..)``, f = x - floor(x); 0 of -inf, and NaN of NaN."""
    every, now = const(-1, I16), const(4, I32)
    if _ROUNDS:
        f = x.call("llvm.x86.avx512.mask.reduce.ps.512", const(9, I32), x.value, every, now)
        floor = None
    else:
        x = x.where("<", -127.0, -127.0, x)
        x = x.where(">", 128.0, 128.0, x)
        floor = x.call("llvm.floor.v16f32")
        f = x - floor
    p = x.all(coefficients[-1])
    for c in (*coefficients[-2::-1], 1.0):
        p = p * f + c
    if floor is None:
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return p.call(name, x.value, x.value, every, now)
    b = x.builder
    bias, shift = (ir.Constant(INTS, [n] * LANES) for n in (127, 23))
    power = b.shl(b.add(b.fptosi(floor.value, INTS), bias), shift)
    return p * Lanes(b, b.bitcast(power, FLOATS))


def bfloats(low: Lanes, high: Lanes) -> Value:
    """Return 32 bfloat16: those of low, then those of high; to nearest, ties to even."""
    b = low.builder
    if _SHORTENS:
        kind = ir.FunctionType(TWO_BFLOATS, [FLOATS, FLOATS])
        convert = ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
        return b.call(convert, [low.value, high.value])
    first, second = (rounded(b, x.value) for x in (low, high))
    return shuffled(b, first, range(2 * LANES), second)


_ADDRESS = _COUNT = types.int64
_REAL = types.float32


@emitted([_ADDRESS, _COUNT], _REAL)
def greatest(b, row, n):
    """Return the greatest score; where one is NaN, NaN or another score."""
    least = ir.Constant(FLOATS, [float("-inf")] * LANES)

    def body(i, tops):
        found = []
        for v in range(2):
            x, top = floats(b, offset(b, row, i, 4, LANES * v)), Lanes(b, tops[v])
            found.append(top.where(">", x, top, x).value)
        return found

    x, y = (Lanes(b, top) for top in loop(b, n, STEP, [least, least], body))
    return x.where(">", y, x, y).greatest()


@emitted([_ADDRESS, _COUNT], types.boolean)
def finite(b, row, n):
    """Return True if n bfloat16 are neither inf nor NaN: no exponent is full."""
    mask = ir.Constant(TWO_BFLOATS, [0x7F80] * STEP)
    none = ir.Constant(ir.VectorType(ir.IntType(1), STEP), [0] * STEP)

    def body(i, full):
        exponents = b.and_(load(b, offset(b, row, i, 2), TWO_BFLOATS), mask)
        return [b.or_(full[0], b.icmp_unsigned("==", exponents, mask))]

    full = loop(b, n, STEP, [none], body)[0]
    return b.icmp_unsigned("==", b.bitcast(full, I32), const(0, I32))


@emitted([_ADDRESS, _COUNT, _REAL])
def multiply(b, row, n, factor):
    """Multiply a row by a number."""
    factor = spread(b, factor)

    def body(i, _):
        at = offset(b, row, i, 4)
        write(b, (floats(b, at) * factor).value, at)

    loop(b, n, LANES, [], body)


def _exponentials(natural: bool) -> Any:
    @emitted([_ADDRESS, _COUNT, _REAL, _REAL], _REAL)
    def exponentials(b, row, n, shift, unit):
        shift, unit = spread(b, shift), spread(b, unit)
        zero = shift.all(0.0).value

        def body(i, totals):
            after = []
            for v in range(2):
                at = offset(b, row, i, 4, LANES * v)
                x = floats(b, at) - shift
                p = exp2(x * unit if natural else x, _EXP2)
                write(b, p.value, at)
                after.append((Lanes(b, totals[v]) + p).value)
            return after

        x, y = (Lanes(b, total) for total in loop(b, n, STEP, [zero, zero], body))
        return (x + y).total()

    return exponentials


#: ``(row, n, shift, unit)``: replace each score s by ``2^(s - shift)``, or of natural scores by
#: ``2^(unit (s - shift))``, and return the sum
exponentials, natural_exponentials = _exponentials(False), _exponentials(True)


def _bfloat_exponentials(natural: bool) -> Any:
    @emitted([_ADDRESS, _ADDRESS, _COUNT, _REAL, _REAL, _REAL], _REAL)
    def bfloat_exponentials(b, row, to, n, factor, shift, unit):
        factor, shift, unit = spread(b, factor), spread(b, shift), spread(b, unit)
        zero = shift.all(0.0).value

        def body(i, totals):
            p = []
            for v in range(2):
                x = floats(b, offset(b, row, i, 4, LANES * v))
                x = (x - shift) * unit if natural else x * factor - shift
                p.append(exp2(x, _EXP2_BFLOAT))
            write(b, bfloats(*p), offset(b, to, i, 2))
            return [(Lanes(b, t) + x).value for t, x in zip(totals, p, strict=True)]

        x, y = (Lanes(b, total) for total in loop(b, n, STEP, [zero, zero], body))
        return (x + y).total()

    return bfloat_exponentials


#: ``(row, to, n, factor, shift, unit)``: write ``2^(factor s - shift)``, or of natural scores
#: ``2^(unit (s - shift))``, as bfloat16 and return the float32 sum
bfloat_exponentials = _bfloat_exponentials(False)
natural_bfloat_exponentials = _bfloat_exponentials(True)


@emitted([_ADDRESS, _ADDRESS, _COUNT, _REAL, _REAL, _REAL])
def gradients(b, p, dp, n, lse, delta, unit):
    """Replace scores by weights P, and dP by ``unit dS``; a weight of 0 has no gradient."""
    lse, delta, unit = spread(b, lse), spread(b, delta), spread(b, unit)

    def body(i, _):
        for v in range(2):
            at, to = (offset(b, x, i, 4, LANES * v) for x in (p, dp))
            weight = exp2(floats(b, at) - lse, _EXP2)
            ds = score_gradient(unit * weight, floats(b, to), delta)
            write(b, weight.value, at)
            write(b, weight.where("==", 0.0, 0.0, ds).value, to)

    loop(b, n, STEP, [], body)


def _transposed(b: ir.IRBuilder, x: list[Value]) -> list[Value]:
    """Return the columns of a square block of rows."""
    lanes, step = len(x), 1
    while step < lanes:
        low, high = halves(step, lanes)
        for r in range(lanes):
            if not r & step:
                u, v = x[r], x[r + step]
                x[r], x[r + step] = shuffled(b, u, low, v), shuffled(b, u, high, v)
        step *= 2
    return x


@emitted([_ADDRESS, _COUNT, _ADDRESS, _COUNT])
def transpose(b, to, to_bytes, rows, row_bytes):
    """Transpose 16 x 16 numbers of 4 bytes; rows are so many bytes apart."""
    x = [load(b, b.add(rows, b.mul(row_bytes, const(r))), INTS) for r in range(LANES)]
    for r, column in enumerate(_transposed(b, x)):
        write(b, column, b.add(to, b.mul(to_bytes, const(r))))


def _turned(kind: ir.Type, partial: bool) -> Any:
    """Return a function that writes W numbers of W rows as columns, float32 times a factor.

    ``partial``: only the first n rows are read, and the other columns are zero.
    """
    words = ir.VectorType(kind, W)
    zero = ir.Constant(words, None)

    @emitted([_ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT, _REAL])
    def turned(b, to, to_bytes, rows, row_bytes, n, factor):
        x = []
        for r in range(W):
            row = b.mul(row_bytes, const(r))
            inside = b.icmp_signed("<", const(r), n)
            if partial:
                row = b.select(inside, row, const(0))
            y = load(b, b.add(rows, row), words)
            x.append(b.select(inside, y, zero) if partial else y)
        if kind == F32:
            factor = repeated(b, factor, W)
        for r, column in enumerate(_transposed(b, x)):
            column = b.fmul(column, factor, flags=_FLAGS) if kind == F32 else column
            write(b, column, b.add(to, b.mul(to_bytes, const(r))))

    return turned


#: ``(to, to_bytes, rows, row_bytes, n, factor)``: W rows of float32, and some of them
turned_floats, some_turned_floats = _turned(F32, False), _turned(F32, True)
#: the same of pairs of bfloat16, without the factor
turned_pairs, some_turned_pairs = _turned(I32, False), _turned(I32, True)


@emitted([_ADDRESS, _ADDRESS, _ADDRESS, _COUNT])
def weave(b, to, first, second, n):
    """Write two rows of n bfloat16 as n pairs of neighbours."""

    def body(i, _):
        x, y = (load(b, offset(b, row, i, 2), TWO_BFLOATS) for row in (first, second))
        for half in range(2):
            lanes = [LANES * half + j // 2 + STEP * (j % 2) for j in range(STEP)]
            write(b, shuffled(b, x, lanes, y), offset(b, to, i, 4, LANES * half))

    loop(b, n, STEP, [], body)


@emitted([_ADDRESS, _ADDRESS, _COUNT, _REAL])
def shorten(b, to, row, n, factor):
    """Write n float32 times factor as bfloat16."""
    factor = spread(b, factor)

    def body(i, _):
        x, y = (floats(b, offset(b, row, i, 4, LANES * v)) * factor for v in range(2))
        write(b, bfloats(x, y), offset(b, to, i, 2))

    loop(b, n, STEP, [], body)


_WOVEN = [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]


def _write_pairs(b: ir.IRBuilder, rows: list[Lanes], to: Value) -> Value:
    """Write 16 numbers of two rows as pairs of bfloat16; return them, those of the first first."""
    both = bfloats(*rows)
    write(b, shuffled(b, both, _WOVEN), to)
    return both


@emitted([_ADDRESS, _ADDRESS, _ADDRESS, _COUNT])
def pair_rows(b, to, low, high, n):
    """Write n float32 of two rows as pairs of bfloat16, those of low first; n is positive."""

    def body(i, _):
        rows = [floats(b, offset(b, row, i, 4)) for row in (low, high)]
        _write_pairs(b, rows, offset(b, to, i, 4))

    loop(b, n, LANES, [], body)


@emitted([_ADDRESS, _ADDRESS, _COUNT])
def pair_rows_with_zeros(b, to, row, n):
    """Write n float32 as pairs of bfloat16 with 0; n is positive."""

    def body(i, _):
        x = floats(b, offset(b, row, i, 4))
        _write_pairs(b, [x, x.all(0.0)], offset(b, to, i, 4))

    loop(b, n, LANES, [], body)


def _write_gradients(b, at, v, p, ds, places):
    """Write P and dS of two rows at column ``at + 16 v``: both as pairs, and dS as rows.

    Panels of pairs are 32 columns wide and hold TILE_Q queries.
    """
    p_pairs, ds_pairs, ds_rows = places
    panel = b.mul(at, const(2 * TILE_Q))
    _write_pairs(b, p, b.add(p_pairs, b.add(panel, const(64 * v))))
    both = _write_pairs(b, ds, b.add(ds_pairs, b.add(panel, const(64 * v))))
    for r in range(2):
        to = b.add(offset(b, ds_rows, at, 2, LANES * v), const(2 * TILE_K * r))
        write(b, shuffled(b, both, range(LANES * r, LANES * (r + 1))), to)


def _two_rows(b, row, at, v):
    """Load 16 numbers of a row of TILE_K and of the next."""
    first = offset(b, row, at, 4, LANES * v)
    return [floats(b, first), floats(b, b.add(first, const(4 * TILE_K)))]


@emitted([_ADDRESS] * 5 + [_COUNT])
def pair_gradients(b, p, dp, p_pairs, ds_pairs, ds_rows, n):
    """Write two rows of P and dS, which are float32, as operands of bfloat16."""

    def body(i, _):
        for v in range(2):
            both = _two_rows(b, p, i, v), _two_rows(b, dp, i, v)
            _write_gradients(b, i, v, *both, (p_pairs, ds_pairs, ds_rows))

    loop(b, n, STEP, [], body)


@emitted([_ADDRESS] * 5 + [_COUNT, _ADDRESS, _ADDRESS, _REAL, _REAL])
def bfloat_gradients(b, s, dp, p_pairs, ds_pairs, ds_rows, n, lse, delta, factor, unit):
    """Write P and ``unit dS`` of two rows of scores as operands of bfloat16.

    Scores are in base 2 after ``factor``; lse and delta are addresses of two numbers.
    """
    lse, delta = (
        [spread(b, b.load(b.inttoptr(offset(b, x, const(r), 4), F32.as_pointer()))) for r in (0, 1)]
        for x in (lse, delta)
    )
    factor, unit = spread(b, factor), spread(b, unit)

    def body(i, _):
        for v in range(2):
            weights, found = [], []
            scores, products = _two_rows(b, s, i, v), _two_rows(b, dp, i, v)
            for r in range(2):
                w = exp2(scores[r] * factor - lse[r], _EXP2_BFLOAT)
                ds = score_gradient(unit * w, products[r], delta[r])
                weights.append(w)
                found.append(w.where("==", 0.0, 0.0, ds))
            _write_gradients(b, i, v, weights, found, (p_pairs, ds_pairs, ds_rows))

    loop(b, n, STEP, [], body)
