"""Steps of one row of the backward: its weights, dS, and what is summed from dS alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ..call.problem import FAR
from ..rules.softmax import LOG2E
from .functions import STRICT, SUMS, array, bfloat_to_float, choice, exp2, inner, number
from .heads import add_to_dheads, through_heads
from .operands import memory_of, rescale, row_size, store
from .rows import exponentials, is_wide, keep_row, pair_at, position, power, query_scale, score_row
from .rules import natural_weight, score_gradient, through_softcap
from .tiles import numbers_at, row_at
from .vector import TILE_K
from .wide import gradients as wide_gradients


class Rows(NamedTuple):
    """Numbers of the rows of a tile, arrays ``[n]``."""

    delta: np.ndarray  # Delta - dLSE
    lse: np.ndarray  # in the units of the scores; +inf for a row that sees nothing
    rest: np.ndarray  # the rounding error of LSE, natural; empty where scores are in base 2


class Buffers(NamedTuple):
    """Arrays of one row of a tile, ``[TILE_K]``; empty if the call does not use them."""

    y: np.ndarray  # y of ``rules.score``
    x: np.ndarray  # scaled products, or x' of tangents
    kept: np.ndarray  # 1 where dropout keeps the pair, else 0


@inner
def buffers_of(call, reads_x, like):
    """Return (the array that owns them, the Buffers of a thread)."""
    y, x = TILE_K if call.bent else 0, TILE_K if reads_x else 0
    kept = TILE_K + 64 if call.threshold else 0
    owner, at = memory_of(like, 1, (y, x, kept // like.itemsize))
    kept_at = array(at[2], kept, np.uint8)
    return owner, Buffers(array(at[0], y, like), array(at[1], x, like), kept_at)


@choice(inline="always")
def _real(x) -> Any:
    """Return a number of a row; uint16: the bits of a bfloat16, as float32."""
    return (lambda x: bfloat_to_float(x)) if x == types.uint16 else (lambda x: x)


@inner(fastmath=SUMS)
def product_of_rows(a, b):
    """Return the product of two rows; those of bfloat16 are their bits."""
    total = _real(a.dtype.type(0))
    for c in range(a.size):
        total += _real(a[c]) * _real(b[c])
    return total


@choice
def product_at(a, b, d, like, operand_like) -> Any:
    """Return the product of two of the caller's rows, by address."""
    if operand_like.dtype in (types.uint16, types.uint32):
        return lambda a, b, d, like, operand_like: product_of_rows(
            array(a, d, np.uint16), array(b, d, np.uint16)
        )
    return lambda a, b, d, like, operand_like: product_of_rows(array(a, d, like), array(b, d, like))


@inner
def write_deltas(call, seq, place, delta, like, operand_like):
    """Write ``Delta - dLSE`` of a tile of queries; any number for a row that sees nothing."""
    size, row_bytes = like.itemsize, row_size(operand_like)
    for i in range(place.n):
        at = place.s, seq.query + place.i0 + i, place.h
        out = call.out.address + row_bytes * row_at(call.out, *at)
        dout = call.dout.address + row_bytes * row_at(call.dout, *at)
        total = product_at(out, dout, call.value_d, like, operand_like)
        if call.dlse.address:
            row = numbers_at(call.dlse, size, place.s, place.h, seq.query + place.i0 + i)
            total -= array(row, 1, like)[0]
        delta[i] = total


@inner
def keep_deltas(call, seq, place, delta, like):
    """Write ``Delta - dLSE`` of a tile of queries for the gradient of a sink, if it is wanted."""
    if call.delta.address:
        at = numbers_at(call.delta, like.itemsize, place.s, place.h, seq.query + place.i0)
        kept = array(at, place.n, like)
        for i in range(place.n):
            kept[i] = delta[i]


@inner
def rests_of(call, seq, place, like):
    """Return the rounding errors of the lse of a tile of queries; none in base 2."""
    at = numbers_at(call.rest, like.itemsize, place.s, place.h, seq.query + place.i0)
    return array(at, place.n if call.natural else 0, like)


@inner
def rows_of(call, seq, place, like, operand_like):
    """Return the numbers of the rows of a tile of queries."""
    size, at = like.itemsize, seq.query + place.i0
    delta = array(numbers_at(call.delta, size, place.s, place.h, at), place.n, like)
    lse = array(numbers_at(call.lse, size, place.s, place.h, at), place.n, like)
    if call.out.address:  # else the host has written delta
        write_deltas(call, seq, place, delta, like, operand_like)
    return Rows(delta, lse, rests_of(call, seq, place, like))


@inner
def scores_of_row(call, seq, place, r, part, S, y, x, like, operand_like):
    """Return the scores of row r of a tile, ``[part.width]``, whose products S holds.

    Write y, and the scaled products to x, unless they are empty.
    """
    row = array(S + like.itemsize * r * TILE_K, part.width, like)
    rescale(operand_like, row, query_scale(call))
    for j in range(x.size):
        x[j] = row[j]
    score_row(row, y, call, seq, place.s, place.h, place.i0 + r, part)
    return row


@inner
def row_gradients(call, seq, place, r, part, p, rows, tiles, buffers, like, operand_like):
    """Replace row r of products by P R, and of dP by dS, times scale; add to dbias and dheads.

    ``tiles`` are the addresses of the products and of dP, in rows of TILE_K.
    """
    S, dP = tiles
    width, i = part.width, place.i0 + r
    y, x, keep = buffers.y[:width], buffers.x[:width], buffers.kept
    # where nothing else reads dS it includes the scale, which saves a pass
    unit = 1.0 if call.dbias.address or y.size or x.size else call.scale
    P = scores_of_row(call, seq, place, r, part, S, y, x, like, operand_like)
    dS = array(dP + like.itemsize * r * TILE_K, width, like)
    if call.threshold:
        keep = keep_row(buffers.kept, width, call, place.s, place.h, i, part.j0)
    rest = rows.rest[r] if call.natural else like.dtype.type(0)
    row = (rows.lse[r], rest, rows.delta[r], call.natural)
    gradient_row(P, dS, keep, row, call.keep_scale, unit)
    if call.dbias.address:
        add_to_bias(call.dbias, dS[: part.keys], call.store_bias, place.s, place.h, i, part.j0, p)
    if x.size:
        at = position(call, seq, i, part)
        add_to_dheads(dS, x, y, call, call.dheads, place.s, place.h, at, p)
    if unit == 1.0:
        through_heads(dS, y, call, place.h)
        scaled_dx(dS, y[: y.size if call.softcap > 0 else 0], call.scale)


@inner(fastmath=STRICT, inline="always")
def weight(x, lse, rest, natural):
    """Return the weight of a score; ``rest`` is in base 2 and used only in natural units."""
    return natural_weight(x, lse, rest) if natural else exp2(x - lse)


@choice
def gradient_row(p, ds, kept, row, keep_scale, unit) -> Any:
    """Replace scores by ``P R``, and ``dO . v`` by ``unit P (R (dO . v) - Delta)``.

    A weight of 0 has no gradient, even if its value is NaN.
    """
    if not is_wide(p.dtype):
        return _plain_gradient_row

    def compute(p, ds, kept, row, keep_scale, unit):
        lse, _, delta, natural = row
        if natural or kept.size:
            loop_gradient_row(p, ds, kept, row, keep_scale, unit)
        else:
            at, to = p.ctypes.data, ds.ctypes.data
            wide_gradients(at, to, p.size, lse, delta, np.float32(unit))

    return compute


def _plain_gradient_row(p, ds, kept, row, keep_scale, unit):
    loop_gradient_row(p, ds, kept, row, keep_scale, unit)


@inner(fastmath=STRICT)
def loop_gradient_row(p, ds, kept, row, keep_scale, unit):
    """Compute ``gradient_row`` in vectors of the compiler's choice."""
    lse, rest, delta, natural = row
    zero, unit = number(0, lse), number(unit, lse)
    rest = rest * number(LOG2E, lse)
    if kept.size:
        scale = p.dtype.type(keep_scale)
        for j in range(p.size):
            w = weight(p[j], lse, rest, natural)
            keep = scale if kept[j] else zero
            ds[j] = zero if w == zero else score_gradient(unit * w, ds[j] * keep, delta)
            p[j] = w * keep
    else:
        for j in range(p.size):
            w = weight(p[j], lse, rest, natural)
            ds[j] = zero if w == zero else score_gradient(unit * w, ds[j], delta)
            p[j] = w


@inner(fastmath=STRICT)
def scaled_dx(ds, y, scale):
    """Replace dS by ``scale dX``, a factor of both dQ and dK.

    A dS of 0 stays 0: under a masked pair y may be that of a key that is NaN.
    """
    unit, zero = ds.dtype.type(scale), ds.dtype.type(0)
    if y.size:
        for j in range(ds.size):
            ds[j] = zero if ds[j] == zero else through_softcap(ds[j], y[j]) * unit
    else:
        for j in range(ds.size):
            ds[j] *= unit


@inner(fastmath=SUMS)
def add_to_bias(dbias, ds, store, s, h, i, j0, p):
    """Add dS to dbias, summed along the dimensions that the bias broadcasts over.

    ``store`` is True if no other row adds to these elements.
    """
    at = dbias.p * p + pair_at(dbias, s, h, i, j0)
    address = dbias.address + ds.itemsize * at
    if dbias.j == 0:
        total = ds.dtype.type(0)
        for j in range(ds.size):
            total += ds[j]
        array(address, 1, ds)[0] += total
        return
    to = array(address, ds.size, ds)
    if store:
        for j in range(ds.size):
            to[j] = ds[j]
    else:
        for j in range(ds.size):
            to[j] += ds[j]


@inner
def any_far(rows, n):
    """Return True if rounding matters in the lse of some row (``FAR``)."""
    far = False
    for r in range(n):
        far |= FAR <= abs(rows.lse[r]) < np.inf
    return far


@inner
def add_far_rows(call, seq, place, part, rows, S, buffers, like, operand_like):
    """Add the sum of ``exp(s - lse)`` over a part of a tile, whose products S holds, to rest."""
    for r in range(place.n):
        if FAR <= abs(rows.lse[r]) < np.inf:
            y, none = buffers.y[: part.width], buffers.x[:0]
            row = scores_of_row(call, seq, place, r, part, S, y, none, like, operand_like)
            rows.rest[r] += exponentials(row, rows.lse[r], True)


@inner
def finish_far_rows(call, place, rows, like):
    """Add the sink to the sums in rest, and replace them by their logs."""
    zero = like.dtype.type(0)
    for r in range(place.n):
        if FAR <= abs(rows.lse[r]) < np.inf:
            total = rows.rest[r]
            if call.sink.address:
                sink = array(call.sink.address, call.hq, like)[place.h]
                total += power(sink - rows.lse[r], True)
            rows.rest[r] = math.log(total) if total > zero else zero


@inner
def write_rows(to, stride, rows, n, d, padded, like, operand_like):
    """Write n rows of scratch memory, padded to whole vectors, to rows ``stride`` apart."""
    one = like.dtype.type(1)
    for j in range(n):
        row = array(rows + like.itemsize * j * padded, d, like)
        store(operand_like, to + row_size(operand_like) * stride * j, row, one)
