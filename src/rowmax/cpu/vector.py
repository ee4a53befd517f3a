"""The machine's vectors, and LLVM IR as functions of compiled code."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic


class Machine(NamedTuple):
    """The register tile of a float32 product, MR x (NV vectors of W), and the tiles of scores.

    Tiles are multiples of the register tile, and a tile of keys of dropout's blocks of 64. They
    were chosen by measurement: the scores of a tile stay in the second cache.
    """

    w: int
    mr: int
    nv: int
    tile_q: int
    tile_k: int
    pairs: bool = False  # products of bfloat16 pairs, summed in float32


def _machine() -> Machine:
    if {"avx512f", "avx512dq", "avx512vl"} <= FEATURES:  # 32 registers of 512 bits
        pairs, large = "avx512bf16" in FEATURES, "amx-tile" in FEATURES  # a second cache of 2 MB
        return Machine(w=16, mr=8, nv=2, tile_q=128 if large else 64, tile_k=256, pairs=pairs)
    if {"avx2", "fma"} <= FEATURES:  # 16 of 256
        return Machine(w=8, mr=6, nv=2, tile_q=96, tile_k=192)
    if platform.machine().lower() in ("arm64", "aarch64"):  # 32 of 128
        return Machine(w=4, mr=6, nv=4, tile_q=96, tile_k=192)
    return Machine(w=4, mr=4, nv=2, tile_q=64, tile_k=256)


def _features() -> set[str]:
    """Return the CPU features that Numba compiles for: the host's, or NUMBA_CPU_FEATURES."""
    given = config.CPU_FEATURES  # pyright: ignore
    if given is not None:
        return {f[1:] for f in given.split(",") if f.startswith("+")}
    return {name for name, there in llvm.get_host_cpu_features().items() if there}


FEATURES = _features()
W, MR, NV, TILE_Q, TILE_K, PAIRS = _machine()
if PAIRS:
    llvm.initialize_native_asmparser()  # their instruction is named in assembly below

Value = Any  # LLVM's values have no types in its bindings

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def const(value: int, kind: ir.Type = I64) -> ir.Constant:
    """Return a constant integer."""
    return ir.Constant(kind, value)


def shuffled(b: ir.IRBuilder, x: Value, lanes: Sequence[int], y: Value | None = None) -> Any:
    """Return the named lanes of x, or of x and y one after the other."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return b.shuffle_vector(x, x if y is None else y, mask)


def repeated(b: ir.IRBuilder, x: Value, lanes: int) -> Value:
    """Return a number in every lane of a vector."""
    blank = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    return shuffled(b, b.insert_element(blank, x, const(0, I32)), [0] * lanes)


def rounded(b: ir.IRBuilder, x: Value) -> Value:
    """Return a vector of float32 as bfloat16, to nearest, ties to even."""
    lanes = x.type.count
    ints, shorts = ir.VectorType(I32, lanes), ir.VectorType(I16, lanes)
    sixteen, one, most, quiet = (ir.Constant(ints, [n] * lanes) for n in (16, 1, 0x7FFF, 0x7FC0))
    bits = b.bitcast(x, ints)
    odd = b.and_(b.lshr(bits, sixteen), one)
    nearest = b.lshr(b.add(bits, b.add(odd, most)), sixteen)
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, nearest), shorts)


def loop(
    b: ir.IRBuilder,
    count: Value,
    step: int | Value,
    starts: Sequence[Value],
    body: Callable[[Value, list[Value]], list[Value] | None],
) -> list[Value]:
    """Emit ``for i in range(0, count, step): carried = body(i, carried)``; count is positive.

    A body that carries nothing returns None.
    """
    before, inside = b.block, b.append_basic_block("loop")
    done = b.append_basic_block("done")
    b.branch(inside)
    b.position_at_end(inside)
    i, carried = b.phi(I64), [b.phi(start.type) for start in starts]
    after = body(i, list(carried)) or []
    following = b.add(i, const(step) if isinstance(step, int) else step)
    starts, new = [const(0), *starts], [following, *after]
    for phi, first, last in zip([i, *carried], starts, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, b.block)
    b.cbranch(b.icmp_signed("<", following, count), inside, done)
    b.position_at_end(done)
    return after


def guarded(b: ir.IRBuilder, condition: Value, values: list[Value], body: Any) -> list[Value]:
    """Emit ``values = body(values)`` where the condition holds."""
    before = b.block
    with b.if_then(condition):
        found = body(values)
        inside = b.block
    phis = []
    for old, new in zip(values, found, strict=True):
        phi = b.phi(old.type)
        phi.add_incoming(old, before)
        phi.add_incoming(new, inside)
        phis.append(phi)
    return phis


def emitted(
    parameters: Sequence[types.Type], result: types.Type = types.void
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: ``emit(builder, *arguments)`` becomes a function for compiled code."""
    signature = result(*parameters)

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context, builder, signature, arguments):
            value = emit(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        @wraps(emit)  # Numba reads the names of the parameters
        def typed(*_):
            return signature, codegen

        return intrinsic(typed)

    return decorate


def declared(builder: ir.IRBuilder, name: str, kind: ir.FunctionType) -> ir.Function:
    """Return LLVM's function of a name, which a module declares once."""
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def multiply_add(builder: ir.IRBuilder, vector: ir.VectorType, words: ir.VectorType):
    """Return ``(a, b, c) -> a b + c``, lane by lane."""
    if isinstance(words.element, ir.IntType):  # pairs of bfloat16: AVX512-BF16's own instruction
        kind = ir.FunctionType(vector, [vector, words, words])
        pairs = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v")
        return lambda a, b, c: builder.call(pairs, [c, a, b])
    # LLVM makes this one instruction if the machine has it, else two
    name = f"llvm.fmuladd.v{words.count}f{64 if isinstance(words.element, ir.DoubleType) else 32}"
    fma = declared(builder, name, ir.FunctionType(vector, [vector] * 3))
    return lambda a, b, c: builder.call(fma, [a, b, c])


@emitted([types.int64] * 2, types.int64)
def fetch_add(b, address, n):
    """Add n to the int64 at an address, atomically, and return its value before."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), n, "seq_cst")


@emitted([types.int64])
def fetch(b, address):
    """Fetch the cache line of an address; the processor may leave that out."""
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = declared(b, "llvm.prefetch.p0i8", kind)
    b.call(function, [pointer, *(const(n, I32) for n in (0, 3, 1))])


def _pointer_to(typing, address, like):
    """Return the address as a pointer to numbers of ``like``'s dtype."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), emit


def _address(typing, pointer):
    """Return the address that a pointer holds."""

    def emit(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], I64)

    return types.int64(pointer), emit


def _ends(typing, start, size, counts):
    """Return where parts of memory begin, and where the last ends: ``counts`` times size bytes."""
    kind = types.UniTuple(types.int64, len(counts) + 1)

    def emit(context, builder, signature, arguments):
        at, size, counts = arguments
        found = ir.Constant(context.get_value_type(kind), ir.Undefined)
        for n, count in enumerate(signature.args[2]):
            found = builder.insert_value(found, at, n)
            number = context.cast(builder, builder.extract_value(counts, n), count, types.int64)
            at = builder.add(at, builder.mul(size, number))
        return builder.insert_value(found, at, len(signature.args[2]))

    return kind(types.int64, types.int64, counts), emit


# Numba passes an intrinsic's first parameter itself: a call has one fewer.
pointer_to: Any = intrinsic(_pointer_to)
address: Any = intrinsic(_address)
ends: Any = intrinsic(_ends)
