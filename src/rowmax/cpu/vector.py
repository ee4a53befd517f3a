"""The machine's vectors, and one tile product as LLVM IR.

A matrix product is a loop over one register tile: ``MR`` rows by ``NV`` vectors of ``W`` numbers,
held in registers while k runs. Written as LLVM vectors it uses every register and both multipliers
of a core, which no compiler-vectorised loop does. It needs no BLAS. Only the shape differs between
machines.
"""

from __future__ import annotations

import platform
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

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def product(width: int, mr: int, nv: int, a_row: int, sums: ir.Type, operands: ir.Type):
    """Return an intrinsic for ``C[mr, nv * width] (+)= A[mr, k] B[k, nv * width]``.

    Arguments are addresses, strides in elements, k >= 1, and 1 to add to C:
    ``(C, c_row, A, a_stride, B, b_stride, k, add)``. ``A[r, i]`` is at ``r a_row + i a_stride``;
    a_row is a constant, so that one moving pointer reaches the whole of A. Operands of int32 are
    pairs of bfloat16, two terms of the sum over k each. The sum over k begins with 0, and C is
    added to it: sums of long rows in blocks have smaller errors.
    """
    vector, words = ir.VectorType(sums, width), ir.VectorType(operands, width)
    size = 8 if isinstance(sums, ir.DoubleType) else 4

    def n(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    @intrinsic
    def tile_product(typing, c, c_row, a, a_stride, b, b_stride, k, add):
        def emit(context, builder, signature, arguments):
            c, c_row, a, a_stride, b, b_stride, k, add = arguments
            fma = multiply_add(builder, vector, words)
            c = builder.inttoptr(c, sums.as_pointer())
            a, b = (builder.inttoptr(x, operands.as_pointer()) for x in (a, b))
            loop, done, added, stored = (
                builder.append_basic_block(label) for label in ("loop", "done", "sum", "stored")
            )

            def tile(r: int, v: int) -> ir.Value:
                at = builder.add(builder.mul(c_row, n(r)), n(v * width))
                return builder.bitcast(builder.gep(c, [at]), vector.as_pointer())

            def lanes(address: ir.Value, v: int) -> ir.Value:
                at = builder.gep(address, [n(v * width)])
                return builder.load(builder.bitcast(at, words.as_pointer()), align=size)

            def spread(address: ir.Value, r: int) -> ir.Value:
                one = builder.load(builder.gep(address, [n(r * a_row)]))
                blank = ir.Constant(words, ir.Undefined)
                first = builder.insert_element(blank, one, ir.Constant(_I32, 0))
                zeros = ir.Constant(ir.VectorType(_I32, width), [0] * width)
                return builder.shuffle_vector(first, blank, zeros)

            cells = [(r, v) for r in range(mr) for v in range(nv)]
            results: list[tuple[int, int, ir.Value]] = []
            start = builder.block
            builder.branch(loop)
            builder.position_at_end(loop)
            i = builder.phi(_I64)
            pa, pb = builder.phi(operands.as_pointer()), builder.phi(operands.as_pointer())
            running = [builder.phi(vector) for _ in cells]
            zero = ir.Constant(vector, [0.0] * width)
            for phi, value in ((i, n(0)), (pa, a), (pb, b), *((x, zero) for x in running)):
                phi.add_incoming(value, start)
            row = [lanes(pb, v) for v in range(nv)]
            after = []
            for r in range(mr):
                x = spread(pa, r)
                after += [fma(x, row[v], running[r * nv + v]) for v in range(nv)]
            moved = (builder.add(i, n(1)), builder.gep(pa, [a_stride]), builder.gep(pb, [b_stride]))
            for phi, new in zip((i, pa, pb, *running), (*moved, *after), strict=True):
                phi.add_incoming(new, loop)
            builder.cbranch(builder.icmp_signed("<", moved[0], k), loop, done)

            builder.position_at_end(done)
            builder.cbranch(builder.icmp_signed("!=", add, n(0)), added, stored)
            builder.position_at_end(added)
            totals = [
                builder.fadd(builder.load(tile(r, v), align=size), value)
                for (r, v), value in zip(cells, after, strict=True)
            ]
            builder.branch(stored)
            builder.position_at_end(stored)
            for (r, v), value, total in zip(cells, after, totals, strict=True):
                result = builder.phi(vector)
                result.add_incoming(value, done)
                result.add_incoming(total, added)
                results.append((r, v, result))
            for r, v, result in results:
                builder.store(result, tile(r, v), align=size)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return tile_product


def multiply_add(builder: ir.IRBuilder, vector: ir.VectorType, words: ir.VectorType):
    """Return ``(a, b, c) -> a b + c``, lane by lane."""
    if isinstance(words.element, ir.IntType):  # pairs of bfloat16: AVX512-BF16's own instruction
        kind = ir.FunctionType(vector, [vector, words, words])
        pairs = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v")
        return lambda a, b, c: builder.call(pairs, [c, a, b])
    # LLVM makes this one instruction if the machine has it, else two
    name = f"llvm.fmuladd.v{words.count}f{64 if isinstance(words.element, ir.DoubleType) else 32}"
    fma = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(vector, [vector] * 3), name
    )
    return lambda a, b, c: builder.call(fma, [a, b, c])


def _fetch_add(typing, address, n):
    """Add n to the int64 at an address, atomically, and return its value before."""

    def emit(context, builder, signature, arguments):
        at = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", at, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _fetch(typing, address):
    """Fetch the cache line of an address; the processor may leave that out."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0i8"
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(call, [pointer, *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), emit


def _pointer_to(typing, address, like):
    """Return the address as a pointer to numbers of ``like``'s dtype."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), emit


def _address(typing, pointer):
    """Return the address that a pointer holds."""

    def emit(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _I64)

    return types.int64(pointer), emit


# Numba passes an intrinsic's first parameter itself: a call has one fewer.
fetch_add: Any = intrinsic(_fetch_add)
fetch: Any = intrinsic(_fetch)
pointer_to: Any = intrinsic(_pointer_to)
address: Any = intrinsic(_address)
