"""The two matrix products of attention, over scratch tiles, in register tiles.

``from_rows``: A is stored row by row in a tile of TILE_K columns (P and dS).
``from_columns``: A is stored column by column (Q and dO transposed, or P^T and dS^T).
B is always read along its rows. Arguments are addresses and strides in elements.

A product is a loop over one register tile: ``MR`` rows by ``NV`` vectors of ``W`` numbers, held in
registers while k runs. Written as LLVM vectors it uses every register and both multipliers of a
core, which no compiler-vectorised loop does. It needs no BLAS. Only the shape differs between
machines.

``like`` is an array of the operands' dtype: float32, float64, or uint32 for pairs of
bfloat16, each two terms of the sum over k. Those of uint16 are bfloat16 for amx.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .amx import STRIP
from .functions import choice, inner, of_dtype
from .vector import MR, NV, TILE_K, Value, W, const, emitted, guarded, loop, multiply_add, repeated


def _kind(dtype) -> tuple[int, ir.Type, ir.Type, int]:
    """Return lanes of a vector, LLVM's types of sums and operands, and bytes of either."""
    if dtype == types.float64:
        return max(2, W // 2), ir.DoubleType(), ir.DoubleType(), 8
    return W, ir.FloatType(), ir.IntType(32) if dtype == types.uint32 else ir.FloatType(), 4


def _panel(dtype) -> int:
    return STRIP if dtype == types.uint16 else NV * _kind(dtype)[0]


#: columns of a register tile
panel = of_dtype(_panel)
#: columns of which a step is a multiple: whole register tiles
span = of_dtype(lambda d: STRIP if d == types.uint16 else math.lcm(MR, _panel(d)))


def _product(width: int, nv: int, a_row: int, sums: ir.Type, operands: ir.Type) -> Any:
    """Return a function for ``C[MR, nv * width] (+)= A[MR, k] B[k, nv * width]``.

    Arguments are addresses, strides in elements, k >= 1, and 1 to add to C:
    ``(C, c_row, A, a_stride, B, b_stride, k, add)``. ``A[r, i]`` is at ``r a_row + i a_stride``;
    a_row is a constant, so that one moving pointer reaches the whole of A. Operands of int32 are
    pairs of bfloat16, two terms of the sum over k each. The sum over k begins with 0, and C is
    added to it: sums of long rows in blocks have smaller errors.
    """
    vector, words = ir.VectorType(sums, width), ir.VectorType(operands, width)
    size = 8 if isinstance(sums, ir.DoubleType) else 4

    @emitted([types.int64] * 8)
    def tile_product(b, c, c_row, a, a_stride, rows, b_stride, k, add):
        fma = multiply_add(b, vector, words)
        c = b.inttoptr(c, sums.as_pointer())
        a, rows = (b.inttoptr(x, operands.as_pointer()) for x in (a, rows))

        def lanes(row: Value, v: int) -> Value:
            at = b.gep(row, [const(v * width)])
            return b.load(b.bitcast(at, words.as_pointer()), align=size)

        def step(_, carried):
            a, row, *running = carried
            vectors = [lanes(row, v) for v in range(nv)]
            after = []
            for r in range(MR):
                x = repeated(b, b.load(b.gep(a, [const(r * a_row)])), width)
                after += [fma(x, vectors[v], running[r * nv + v]) for v in range(nv)]
            return [b.gep(a, [a_stride]), b.gep(row, [b_stride]), *after]

        zeros = [ir.Constant(vector, [0.0] * width)] * (MR * nv)
        _, _, *found = loop(b, k, 1, [a, rows, *zeros], step)
        offsets = [b.add(b.mul(c_row, const(r)), const(v * width)) for r, v in np.ndindex(MR, nv)]
        places = [b.bitcast(b.gep(c, [at]), vector.as_pointer()) for at in offsets]

        def added(values):
            return [b.fadd(b.load(at, align=size), x) for at, x in zip(places, values, strict=True)]

        found = guarded(b, b.icmp_signed("!=", add, const(0)), found, added)
        for at, x in zip(places, found, strict=True):
            b.store(x, at, align=size)

    return tile_product


def _tiled(name, full, single, w, size, a_row):
    """Return ``C[m, n] (+)= A[m, k] B[k, n]``; m is rounded up to MR, n is whole vectors.

    Each has its own name: Numba's cache on disk distinguishes functions by name and types, and the
    types are the same.
    """

    def multiply(m, n, k, c, c_row, a, a_stride, b, b_stride, add):
        whole = n - n % (NV * w)
        for col in range(0, whole, NV * w):
            for row in range(0, m, MR):
                c_at, a_at = c + size * (row * c_row + col), a + size * row * a_row
                full(c_at, c_row, a_at, a_stride, b + size * col, b_stride, k, add)
        for col in range(whole, n, w):
            for row in range(0, m, MR):
                c_at, a_at = c + size * (row * c_row + col), a + size * row * a_row
                single(c_at, c_row, a_at, a_stride, b + size * col, b_stride, k, add)

    multiply.__qualname__ = name
    return inner(multiply)


def _multiply(dtype, a_row):
    w, sums, operands, size = _kind(dtype)
    full, single = (_product(w, nv, a_row, sums, operands) for nv in (NV, 1))
    return _tiled(f"multiply_{dtype}_{a_row}", full, single, w, size, a_row)


@choice
def from_rows(like, m, n, k, c, c_row, a, b, b_stride) -> Any:
    """Compute ``C += A B`` with A[r, i] at ``r TILE_K + i``."""
    multiply = _multiply(like.dtype, TILE_K)
    return lambda like, m, n, k, c, c_row, a, b, b_stride: multiply(
        m, n, k, c, c_row, a, 1, b, b_stride, 1
    )


@choice
def from_columns(like, m, n, k, c, c_row, a, a_stride, b, b_stride, add) -> Any:
    """Compute ``C (+)= A B`` with A[r, i] at ``r + i a_stride``."""
    multiply = _multiply(like.dtype, 1)
    return lambda like, m, n, k, c, c_row, a, a_stride, b, b_stride, add: multiply(
        m, n, k, c, c_row, a, a_stride, b, b_stride, add
    )
