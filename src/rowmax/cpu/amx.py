"""Tile instructions of Intel's processors (AMX), and the permission to use them.

``product`` computes ``C[32, 32] (+)= A[32, 32 k] B[32 k, 32]`` of bfloat16 in float32:

  A  rows of bfloat16: ``A[r, 2 i]`` and ``A[r, 2 i + 1]`` are neighbours.
  B  pairs of rows: ``B[2 i, c]`` and ``B[2 i + 1, c]`` are neighbours, a uint32 at row i, column c.
  C  rows of float32.

LLVM uses no tile register of its own, so the assembly below declares none.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import types

from .functions import inner
from .vector import FEATURES, Value, const, emitted, loop

STRIP = 32  # rows of C

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@lru_cache(maxsize=1)
def ready() -> bool:
    """Return True if kernels may use tile instructions: the processor has them and Linux permits.

    Linux grants the registers to a process, with all its threads, at its request. It refuses where
    a thread's signal stack is too small for them. The answer is kept.
    """
    there = {"amx-tile", "amx-bf16", "avx512f", "avx512dq", "avx512bf16"} <= FEATURES
    return there and sys.platform == "linux" and permitted()


def permitted() -> bool:
    """Request the tile registers from Linux; return False if it refuses."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    except (OSError, AttributeError):
        return False


def _emit(b: ir.IRBuilder, text: str, *arguments: Value) -> None:
    """Emit assembly that reads and writes memory."""
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in arguments])
    places = ",".join(["r"] * len(arguments) + ["~{memory}"])
    b.call(ir.InlineAsm(kind, text, places, True), arguments)


@emitted([types.int64])
def _configure(b, palette):
    _emit(b, "ldtilecfg ($0)", palette)


@emitted([])
def release(b):
    """Give the tile registers back: the system then saves none of them for this thread."""
    _emit(b, "tilerelease")


@inner
def configure():
    """Configure eight tiles of 16 rows of 64 bytes for this thread."""
    owner = np.zeros(64, np.uint8)
    owner[0] = 1
    for tile in range(8):
        owner[16 + 2 * tile] = 64
        owner[48 + tile] = 16
    _configure(owner.ctypes.data)
    return owner.size


@emitted([types.int64] * 8)
def product(b, c, c_bytes, a, a_bytes, pairs, pair_bytes, k, add):
    """Compute ``C[32, 32] (+)= A[32, 32 k] B[32 k, 32]``: addresses, bytes from row to row."""
    half = const(4)
    c2, a2 = b.add(c, b.shl(c_bytes, half)), b.add(a, b.shl(a_bytes, half))
    with b.if_else(b.icmp_signed("!=", add, const(0))) as (more, new):
        with more:
            text = (
                "tileloadd ($0,$2), %tmm0\ntileloadd 64($0,$2), %tmm1\n"
                "tileloadd ($1,$2), %tmm2\ntileloadd 64($1,$2), %tmm3"
            )
            _emit(b, text, c, c2, c_bytes)
        with new:
            _emit(b, "\n".join(f"tilezero %tmm{n}" for n in range(4)))
    step = b.shl(pair_bytes, half)

    def body(i, at):
        text = (
            "tileloadd ($2,$4), %tmm6\ntileloadd ($0,$3), %tmm4\n"
            "tileloadd 64($2,$4), %tmm7\ntdpbf16ps %tmm6, %tmm4, %tmm0\n"
            "tileloadd ($1,$3), %tmm5\ntdpbf16ps %tmm7, %tmm4, %tmm1\n"
            "tdpbf16ps %tmm6, %tmm5, %tmm2\ntdpbf16ps %tmm7, %tmm5, %tmm3"
        )
        _emit(b, text, *at, a_bytes, pair_bytes)
        first, second, below = at
        return [b.add(first, const(64)), b.add(second, const(64)), b.add(below, step)]

    loop(b, k, 1, [a, a2, pairs], body)
    text = (
        "tilestored %tmm0, ($0,$2)\ntilestored %tmm1, 64($0,$2)\n"
        "tilestored %tmm2, ($1,$2)\ntilestored %tmm3, 64($1,$2)"
    )
    _emit(b, text, c, c2, c_bytes)
