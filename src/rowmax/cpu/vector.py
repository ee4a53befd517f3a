"""What the CPU kernels stand on: the machine's vectors, and one tile product in LLVM's own terms.

A matrix product is a loop over one register tile: ``MR`` rows by ``NV`` vectors of ``W``
numbers, held in registers while k runs. Written as LLVM vectors it takes every register and both
multipliers of a core, which no loop that a compiler vectorises does, and needs no BLAS. The
shape is the only thing that differs from machine to machine.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


class Registers(NamedTuple):
    """The register tile of a float32 product: MR x (NV vectors of W)."""

    w: int
    mr: int
    nv: int


def _registers() -> Registers:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):  # 32 registers of 512 bits
        return Registers(w=16, mr=8, nv=2)
    if features.get("avx2") and features.get("fma"):  # 16 of 256
        return Registers(w=8, mr=6, nv=2)
    if platform.machine().lower() in ("arm64", "aarch64"):  # 32 of 128
        return Registers(w=4, mr=6, nv=4)
    return Registers(w=4, mr=4, nv=2)


REGISTERS = _registers()
W, MR, NV = REGISTERS

TILE_Q = 96  # multiples of every register tile above; TILE_K of dropout's blocks of 64, too
TILE_K = 192

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def product(width: int, mr: int, nv: int, a_row: int, kind: ir.Type):
    """An intrinsic for ``C[mr, nv * width] (+)= A[mr, k] B[k, nv * width]``.

    Arguments are addresses, steps in elements, k >= 1, and whether C is added to:
    ``(C, c_row, A, a_step, B, b_step, k, add)``. ``A[r, i]`` is at ``r a_row + i a_step``; a_row
    is a constant, so that the whole of A is reached from one moving pointer.
    """
    vector = ir.VectorType(kind, width)
    size = 4 if isinstance(kind, ir.FloatType) else 8
    suffix = f"v{width}f{8 * size}"

    def n(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    @intrinsic
    def tile_product(typing, c, c_row, a, a_step, b, b_step, k, add):
        def emit(context, builder, signature, arguments):
            c, c_row, a, a_step, b, b_step, k, add = arguments
            name = f"llvm.fma.{suffix}"
            fma = builder.module.globals.get(name) or ir.Function(
                builder.module, ir.FunctionType(vector, [vector] * 3), name
            )
            pointer, wide = kind.as_pointer(), vector.as_pointer()
            c, a, b = (builder.inttoptr(x, pointer) for x in (c, a, b))
            zero, load, loop, done = (
                builder.append_basic_block(label) for label in ("zero", "load", "loop", "done")
            )

            def tile(r: int, v: int) -> ir.Value:
                at = builder.add(builder.mul(c_row, n(r)), n(v * width))
                return builder.bitcast(builder.gep(c, [at]), wide)

            def lanes(address: ir.Value, v: int) -> ir.Value:
                at = builder.gep(address, [n(v * width)])
                return builder.load(builder.bitcast(at, wide), align=size)

            def spread(address: ir.Value, r: int) -> ir.Value:
                one = builder.load(builder.gep(address, [n(r * a_row)]))
                blank = ir.Constant(vector, ir.Undefined)
                first = builder.insert_element(blank, one, ir.Constant(_I32, 0))
                zeros = ir.Constant(ir.VectorType(_I32, width), [0] * width)
                return builder.shuffle_vector(first, blank, zeros)

            cells = [(r, v) for r in range(mr) for v in range(nv)]
            builder.cbranch(builder.icmp_signed("!=", add, n(0)), load, zero)
            builder.position_at_end(zero)
            builder.branch(loop)
            builder.position_at_end(load)
            before = [builder.load(tile(r, v), align=size) for r, v in cells]
            builder.branch(loop)

            builder.position_at_end(loop)
            i, pa, pb = builder.phi(_I64), builder.phi(pointer), builder.phi(pointer)
            sums = [builder.phi(vector) for _ in cells]
            for block in (zero, load):
                for phi, start in ((i, n(0)), (pa, a), (pb, b)):
                    phi.add_incoming(start, block)
            for phi, start in zip(sums, before, strict=True):
                phi.add_incoming(ir.Constant(vector, [0.0] * width), zero)
                phi.add_incoming(start, load)
            row = [lanes(pb, v) for v in range(nv)]
            after = []
            for r in range(mr):
                x = spread(pa, r)
                after += [builder.call(fma, [x, row[v], sums[r * nv + v]]) for v in range(nv)]
            steps = (builder.add(i, n(1)), builder.gep(pa, [a_step]), builder.gep(pb, [b_step]))
            for phi, new in zip((i, pa, pb, *sums), (*steps, *after), strict=True):
                phi.add_incoming(new, loop)
            builder.cbranch(builder.icmp_signed("<", steps[0], k), loop, done)

            builder.position_at_end(done)
            for (r, v), value in zip(cells, after, strict=True):
                builder.store(value, tile(r, v), align=size)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return tile_product


@intrinsic
def fetch_add(typing, address, n):
    """Adds n to the int64 at an address, atomically, and returns what it was."""

    def emit(context, builder, signature, arguments):
        at = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", at, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def pointer_to(typing, address, like):
    """The address as a pointer to numbers of ``like``'s dtype."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), emit
