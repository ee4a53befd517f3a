"""Products of few rows with rows of a head in place, as LLVM IR.

One query reads every key once, so its speed is that of memory: nothing is packed. Rows of float32,
bfloat16 or float16 are widened in registers; sums are float32. Rows are whole vectors.

Several rows that share keys are taken in blocks, so that a number is loaded once for a block. The
bits of a sum are the same in every block.

Functions of heads are for tensors where a key's rows of all heads are next to one another, and for
one row a head. They read in the order of memory, so a processor fetches ahead. Sums have the order,
and the bits, of those of one head.

A function is one of three, by the dtype of ``kind``: float32, uint16 (bfloat16) or int16 (float16).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import (
    F32,
    FEATURES,
    I16,
    I32,
    I64,
    TILE_K,
    Value,
    const,
    guarded,
    loop,
    multiply_add,
    repeated,
    rounded,
    shuffled,
)
from .wide import halves

#: numbers of a vector, and keys of a step of scores: their sums fill the registers
LANES = 16 if {"avx512f", "avx512dq", "avx512vl"} <= FEATURES else 8
COLUMNS = 4  # vectors of a step of sums of rows
#: rows of a block of products, whose sums with KEYS keys are a vector; keys of a block of sums of
#: rows of all queries
ROWS, KEYS = 4, LANES // 4
#: rows of a block of sums of rows: even and odd ones of COLUMNS vectors are in registers
SUMMED = 2 if LANES == 16 else 1
#: True if the processor converts float16
HALVES = "f16c" in FEATURES or "avx512f" in FEATURES

_FLOATS = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)
_SHORTS = ir.VectorType(I16, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)
_VECTOR = 4 * LANES  # bytes of a vector of float32
_ROW = 4 * TILE_K  # bytes from one row of scores to the next


def _kind(dtype: types.Type) -> str:
    return {types.uint16: "bfloat16", types.int16: "float16"}.get(dtype, "float32")


def _load(b: ir.IRBuilder, address: Value, kind: str = "float32") -> Value:
    """Load a vector of numbers of a kind, as float32."""
    if kind == "float32":
        return b.load(b.inttoptr(address, _FLOATS.as_pointer()), align=2)
    if kind == "float16":
        return b.fpext(b.load(b.inttoptr(address, _HALVES.as_pointer()), align=2), _FLOATS)
    bits = b.zext(b.load(b.inttoptr(address, _SHORTS.as_pointer()), align=2), _INTS)
    return b.bitcast(b.shl(bits, ir.Constant(_INTS, [16] * LANES)), _FLOATS)


def _store(b: ir.IRBuilder, x: Value, address: Value, kind: str = "float32") -> None:
    """Store a vector of float32 as numbers of a kind, to nearest, ties to even."""
    if kind == "float16":
        x = b.fptrunc(x, _HALVES)
    elif kind == "bfloat16":
        x = rounded(b, x)
    b.store(x, b.inttoptr(address, x.type.as_pointer()), align=2)


def _spread(b: ir.IRBuilder, address: Value) -> Value:
    """Return the float32 at an address in every lane."""
    return repeated(b, b.load(b.inttoptr(address, F32.as_pointer()), align=4), LANES)


def _multiply_add(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    return multiply_add(b, _FLOATS, _FLOATS)(x, y, z)


def _totals(b: ir.IRBuilder, x: list[Value]) -> Value:
    """Return the sums of the lanes of each of ``LANES`` vectors, in one vector."""
    step = 1
    while len(x) > 1:
        low, high = halves(step, LANES)
        pairs = []
        for u, v in zip(x[::2], x[1::2], strict=True):
            pairs.append(b.fadd(shuffled(b, u, low, v), shuffled(b, u, high, v)))
        x, step = pairs, 2 * step
    return x[0]


def _function(module: ir.Module, emit: Any, kind: str, count: int) -> ir.Function:
    """Return the function of a kind, which a module has once however often it is called."""
    name = f"rowmax.{emit.__name__}.{kind}"
    if name in module.globals:
        return module.globals[name]
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
    made.linkage = "linkonce_odr"
    made.attributes.add("noinline")
    builder = ir.IRBuilder(made.append_basic_block())
    emit(builder, kind, *made.args)
    builder.ret_void()
    return made


def _of_kinds(count: int, inline: bool = False) -> Any:
    """Return a decorator of ``emit(builder, kind, *int64)``; ``kind`` is an array's dtype.

    A function compiles sooner, and its registers are its own; a row alone is worth no call.
    """

    def decorate(emit: Any) -> Any:
        @wraps(emit)  # Numba reads the names of the parameters
        def typed(typing: Any, kind: Any, *_: Any) -> Any:
            def codegen(context, builder, signature, arguments):
                name = _kind(kind.dtype)
                if inline:
                    emit(builder, name, *arguments[1:])
                else:
                    builder.call(_function(builder.module, emit, name, count), arguments[1:])
                return context.get_dummy_value()

            return types.void(kind, *[types.int64] * count), codegen

        return intrinsic(typed)

    return decorate


def _in_blocks(b: ir.IRBuilder, count: Value, size: int, body: Any) -> None:
    """Emit ``body(first, rows)`` for blocks of ``size`` rows, then for single ones."""
    whole = b.and_(count, const(-size)) if size > 1 else const(0)
    with b.if_then(b.icmp_signed(">", whole, const(0))):
        loop(b, whole, size, [], lambda r, _: body(r, size))
    with b.if_then(b.icmp_signed("<", whole, count)):
        loop(b, b.sub(count, whole), 1, [], lambda r, _: body(b.add(whole, r), 1))


def _several(b: ir.IRBuilder, first: Value, step: Value, count: int) -> list[Value]:
    """Return ``count`` addresses from ``first`` on, ``step`` bytes apart."""
    found = [first]
    while len(found) < count:
        found.append(b.add(found[-1], step))
    return found


def _keys_at(
    b: ir.IRBuilder, rows: Value, row_bytes: Value, n: Value, j: Value, count: int
) -> list[Value]:
    """Return the addresses of ``count`` rows from row j on; past row n - 1, of that one."""
    last, found = b.sub(n, const(1)), []
    for g in range(count):
        key = b.add(j, const(g))
        key = b.select(b.icmp_signed("<", key, last), key, last)
        found.append(b.add(rows, b.mul(row_bytes, key)))
    return found


@_of_kinds(7)
def dots(b, kind, to, q, rows, row_bytes, n, d, m):
    """Write ``q . row`` of m rows of q and n rows to rows of TILE_K float32; q is float32.

    Whole steps of ``LANES``: past n they have the product of the last row again.
    """
    row_size = b.mul(d, const(4))
    steps = b.and_(b.add(n, const(LANES - 1)), const(-LANES))

    def block(r, count):
        queries = _several(b, b.add(q, b.mul(r, row_size)), row_size, count)
        places = _several(b, b.add(to, b.mul(r, const(_ROW))), const(_ROW), count)
        keys = LANES // count

        def step(j, _):
            at = _keys_at(b, rows, row_bytes, n, j, keys)
            x = _totals(b, _products(b, kind, queries, at, d))
            for i, place in enumerate(places):
                part = x if count == 1 else shuffled(b, x, range(i * keys, (i + 1) * keys))
                _store(b, part, b.add(place, b.mul(j, const(4))))

        loop(b, steps, keys, [], step)

    _in_blocks(b, m, ROWS, block)


def _products(
    b: ir.IRBuilder, kind: str, queries: list[Value], rows: list[Value], d: Value
) -> list[Value]:
    """Return the products of float32 rows, each with all other rows, a sum of each lane."""

    def step(c, sums, count):
        at = [b.mul(b.add(c, const(LANES * n)), const(4)) for n in range(count)]
        inside = b.mul(c, const(_size(kind)))
        others = [_parts(b, b.add(row, inside), kind, count) for row in rows]
        found, given = [], iter(sums)
        for q in queries:
            x = _of_columns(b, [_load(b, b.add(q, place)) for place in at], kind)
            for parts in others:
                total = next(given)
                for part, y in zip(x, parts, strict=True):
                    total = _multiply_add(b, y, part, total)
                found.append(total)
        return found

    return _by_pairs(b, d, [_ZERO] * (len(queries) * len(rows)), step)


@_of_kinds(9)
def dots_of_heads(b, kind, to, room, q, rows, row_bytes, n, d, heads, head_bytes):
    """Write ``dots`` of each kv head, which has one row of q.

    ``to`` are rows of TILE_K numbers; ``room`` is memory for ``LANES * LANES`` of each row of q.
    """
    row_size = b.mul(d, const(4))

    def block(j, _):
        def key(g, _):
            (at,) = _keys_at(b, rows, row_bytes, n, b.add(j, g), 1)
            place = b.add(room, b.mul(g, const(_VECTOR)))

            def head(h, _):
                own = b.add(q, b.mul(h, row_size))
                (total,) = _products(b, kind, [own], [b.add(at, b.mul(head_bytes, h))], d)
                _store(b, total, b.add(place, b.mul(h, const(LANES * _VECTOR))))

            loop(b, heads, 1, [], head)

        loop(b, const(LANES), 1, [], key)

        def total(h, _):
            first = b.add(room, b.mul(h, const(LANES * _VECTOR)))
            sums = [_load(b, b.add(first, const(_VECTOR * g))) for g in range(LANES)]
            row = b.add(to, b.mul(h, const(_ROW)))
            _store(b, _totals(b, sums), b.add(row, b.mul(j, const(4))))

        loop(b, heads, 1, [], total)

    loop(b, n, LANES, [], block)


def _size(kind: str) -> int:
    return 4 if kind == "float32" else 2


def _by_pairs(b: ir.IRBuilder, d: Value, values: list[Value], step: Any) -> list[Value]:
    """Emit ``values = step(c, values, count)`` for pairs of vectors of d, then for the last one."""
    whole = b.and_(d, const(-2 * LANES))
    pairs = b.icmp_signed(">", whole, const(0))
    values = guarded(
        b, pairs, values, lambda v: loop(b, whole, 2 * LANES, v, lambda c, x: step(c, x, 2))
    )
    return guarded(b, b.icmp_signed("<", whole, d), values, lambda v: step(whole, v, 1))


def _parts(b: ir.IRBuilder, address: Value, kind: str, count: int) -> list[Value]:
    """Return vectors of consecutive numbers; of two of bfloat16, the even ones, then the odd ones.

    Two of bfloat16 are one vector of pairs, and each is a shift or a mask away.
    """
    if kind != "bfloat16" or count == 1:
        step = _size(kind) * LANES
        return [_load(b, b.add(address, const(step * n)), kind) for n in range(count)]
    pairs = b.load(b.inttoptr(address, _INTS.as_pointer()), align=2)
    low = b.shl(pairs, ir.Constant(_INTS, [16] * LANES))
    high = b.and_(pairs, ir.Constant(_INTS, [0xFFFF0000] * LANES))
    return [b.bitcast(x, _FLOATS) for x in (low, high)]


def _of_columns(b: ir.IRBuilder, x: list[Value], kind: str) -> list[Value]:
    """Return two vectors of consecutive numbers in the order of ``_parts``."""
    if kind != "bfloat16" or len(x) == 1:
        return x
    first, second = x
    return [shuffled(b, first, range(n, 2 * LANES, 2), second) for n in (0, 1)]


def _to_columns(b: ir.IRBuilder, x: list[Value], kind: str) -> list[Value]:
    """Return two vectors in the order of ``_parts`` as vectors of consecutive numbers."""
    if kind != "bfloat16" or len(x) == 1:
        return x
    woven = [n // 2 + LANES * (n % 2) for n in range(2 * LANES)]
    first, second = x
    return [shuffled(b, first, woven[n : n + LANES], second) for n in (0, LANES)]


@_of_kinds(7)
def add_rows(b, kind, to, weights, rows, row_bytes, n, d, m):
    """Add to m float32 rows the sums of n rows, times rows of TILE_K weights; n is positive."""
    size, row_size = _size(kind), b.mul(d, const(4))

    def block(r, many):
        totals = _several(b, b.add(to, b.mul(r, row_size)), row_size, many)
        factors = _several(b, b.add(weights, b.mul(r, const(_ROW))), const(_ROW), many)

        def columns(c, count):
            """Add up ``count`` vectors from column c on, even and odd rows apart."""
            whole = b.and_(n, const(-2))
            pairs = [2] * (count // 2) + [1] * (count % 2)
            half = many * count

            def one(j, sums):
                row = b.add(b.add(rows, b.mul(row_bytes, j)), b.mul(c, const(size)))
                parts, found = [], []
                for both in pairs:
                    at = b.add(row, const(size * LANES * len(parts)))
                    parts += _parts(b, at, kind, both)
                for i, factor in enumerate(factors):
                    w = _spread(b, b.add(factor, b.mul(j, const(4))))
                    own = sums[count * i : count * (i + 1)]
                    found += [_multiply_add(b, w, x, t) for x, t in zip(parts, own, strict=True)]
                return found

            def two(j, sums):
                return one(j, sums[:half]) + one(b.add(j, const(1)), sums[half:])

            sums = [_ZERO] * (2 * half)
            some = b.icmp_signed(">", whole, const(0))
            sums = guarded(b, some, sums, lambda s: loop(b, whole, 2, s, two))
            odd = b.icmp_signed("<", whole, n)
            sums = guarded(b, odd, sums, lambda s: one(whole, s[:half]) + s[half:])
            both = [b.fadd(sums[v], sums[half + v]) for v in range(half)]
            for i, row in enumerate(totals):
                first = b.add(row, b.mul(c, const(4)))
                for v, x in enumerate(_to_all_columns(b, both[count * i :], pairs, kind)):
                    place = b.add(first, const(_VECTOR * v))
                    _store(b, b.fadd(x, _load(b, place)), place)

        _by_columns(b, d, columns)

    _in_blocks(b, m, SUMMED, block)


def _to_all_columns(b: ir.IRBuilder, x: list[Value], pairs: list[int], kind: str) -> list[Value]:
    """Return vectors of ``_parts``, in pairs or alone, as vectors of consecutive numbers."""
    found: list[Value] = []
    for both in pairs:
        found += _to_columns(b, x[len(found) : len(found) + both], kind)
    return found


@_of_kinds(9)
def add_rows_of_heads(b, kind, to, room, weights, rows, row_bytes, n, d, heads, head_bytes):
    """Add to the row of each kv head what ``add_rows`` adds.

    ``weights`` are rows of TILE_K numbers; ``room`` is memory for two rows of each row of ``to``.
    """
    size, row_size = _size(kind), b.mul(d, const(4))
    plane = b.mul(heads, row_size)

    def clear(c, _):
        _store(b, _ZERO, b.add(room, b.mul(c, const(4))))

    loop(b, b.mul(heads, b.mul(d, const(2))), LANES, [], clear)

    def key(j, _):
        sums = b.add(room, b.mul(plane, b.and_(j, const(1))))  # even and odd rows apart
        column = b.add(weights, b.mul(j, const(4)))
        first = b.add(rows, b.mul(row_bytes, j))

        def head(h, _):
            row = b.add(first, b.mul(head_bytes, h))
            w = _spread(b, b.add(column, b.mul(h, const(_ROW))))
            total = b.add(sums, b.mul(row_size, h))

            def step(c, _, count):
                at = b.add(row, b.mul(c, const(size)))
                place = b.add(total, b.mul(c, const(4)))
                for v, x in enumerate(_parts(b, at, kind, count)):
                    here = b.add(place, const(_VECTOR * v))
                    _store(b, _multiply_add(b, w, x, _load(b, here)), here)
                return []

            _by_pairs(b, d, [], step)

        loop(b, heads, 1, [], head)

    loop(b, n, 1, [], key)

    def finish(h, _):
        total, row = (b.add(x, b.mul(row_size, h)) for x in (room, to))

        def step(c, _, count):
            inside = b.mul(c, const(4))
            at = [b.add(b.add(total, inside), const(_VECTOR * v)) for v in range(count)]
            found = [b.fadd(_load(b, x), _load(b, b.add(x, plane))) for x in at]
            for v, x in enumerate(_to_columns(b, found, kind)):
                place = b.add(b.add(row, inside), const(_VECTOR * v))
                _store(b, b.fadd(x, _load(b, place)), place)
            return []

        _by_pairs(b, d, [], step)

    loop(b, heads, 1, [], finish)


@_of_kinds(9)
def write_sums(b, kind, to, row_bytes, n, weights, others, m, d, heads, head_bytes):
    """Write n rows of each kv head: row j is ``sum_r weights[r, j] others[r]``.

    r are the m rows of a head: of TILE_K weights, and of d float32.
    """
    size = _size(kind)

    def rows_of_head(h, first, rows):
        start = b.add(b.add(to, b.mul(head_bytes, h)), b.mul(row_bytes, first))
        start_of_weights, before = b.add(weights, b.mul(first, const(4))), b.mul(h, m)

        def columns(c, count):
            inside = b.add(others, b.mul(c, const(4)))

            def several(j, many):
                column = b.add(start_of_weights, b.mul(j, const(4)))

                def one(i, sums):
                    r, found = b.add(before, i), []
                    factor = b.add(column, b.mul(r, const(_ROW)))
                    other = b.add(inside, b.mul(b.mul(r, d), const(4)))
                    x = [_load(b, b.add(other, const(_VECTOR * v))) for v in range(count)]
                    for g in range(many):
                        w = _spread(b, b.add(factor, const(4 * g)))
                        own = sums[count * g : count * (g + 1)]
                        found += [
                            _multiply_add(b, w, y, total) for y, total in zip(x, own, strict=True)
                        ]
                    return found

                sums = loop(b, m, 1, [_ZERO] * (count * many), one)
                first = b.add(b.add(start, b.mul(row_bytes, j)), b.mul(c, const(size)))
                for g, place in enumerate(_several(b, first, row_bytes, many)):
                    for v, total in enumerate(sums[count * g : count * (g + 1)]):
                        _store(b, total, b.add(place, const(size * LANES * v)), kind)

            _in_blocks(b, rows, KEYS, several)

        _by_columns(b, d, columns)

    # rows of several heads are written one at a time, in the order of memory
    step = b.select(b.icmp_signed("==", heads, const(1)), n, const(1))
    loop(b, n, step, [], lambda j, _: loop(b, heads, 1, [], lambda h, _: rows_of_head(h, j, step)))


@_of_kinds(3, inline=True)
def widen(b, kind, to, row, d):
    """Write a row as float32."""
    _converted(b, to, "float32", row, kind, d)


@_of_kinds(3, inline=True)
def narrow(b, kind, to, row, d):
    """Write a float32 row in the dtype of a kind."""
    _converted(b, to, kind, row, "float32", d)


def _converted(b: ir.IRBuilder, to: Value, to_kind: str, row: Value, kind: str, d: Value) -> None:
    def step(c, _):
        x = _load(b, b.add(row, b.mul(c, const(_size(kind)))), kind)
        _store(b, x, b.add(to, b.mul(c, const(_size(to_kind)))), to_kind)

    loop(b, d, LANES, [], step)


def _by_columns(b: ir.IRBuilder, d: Value, columns: Any) -> None:
    """Emit ``columns(c, count)`` for steps of ``COLUMNS`` vectors of d, then for single vectors."""
    step = COLUMNS * LANES
    whole = b.sub(d, b.urem(d, const(step)))

    with b.if_then(b.icmp_signed(">", whole, const(0))):
        loop(b, whole, step, [], lambda c, _: columns(c, COLUMNS))
    with b.if_then(b.icmp_signed("<", whole, d)):
        loop(b, b.sub(d, whole), LANES, [], lambda c, _: columns(b.add(whole, c), 1))
