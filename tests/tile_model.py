"""A model of the tile instruction of rowmax/cpu/amx.py, for processors that lack it.

``install()`` replaces the instruction in kernels that are compiled later. Use it in a process of
its own, with its own NUMBA_CACHE_DIR.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rowmax.cpu import amx, operands, strips, strips_backward
from rowmax.cpu.functions import array, bfloat_to_float, inner


@inner
def _read(address: int) -> Any:
    """Return a bfloat16 as float32; one below the normal numbers is 0."""
    bits = array(address, 1, np.empty(0, np.uint16))[0]
    return bfloat_to_float(bits if bits & np.uint16(0x7F80) else np.uint16(0))


@inner
def product(
    c: int, c_bytes: int, a: int, a_bytes: int, pairs: int, pair_bytes: int, k: int, add: int
) -> None:
    """Compute ``C[32, 32] (+)= A[32, 32 k] B[32 k, 32]``; add the pairs of terms in order."""
    for r in range(32):
        row = array(c + c_bytes * r, 32, np.empty(0, np.float32))
        for j in range(32):
            total = row[j] if add else np.float32(0)
            for i in range(16 * k):
                x, y = a + a_bytes * r + 4 * i, pairs + pair_bytes * i + 4 * j
                total += _read(x) * _read(y) + _read(x + 2) * _read(y + 2)
            row[j] = total


@inner
def _nothing() -> int:
    return 0


def install() -> None:
    """Let bfloat16 take the path of tile instructions, with the model in their place."""
    for module in (strips, strips_backward):
        module.product = product  # pyright: ignore
    operands.configure = operands.release = _nothing  # pyright: ignore
    amx.ready = lambda: True  # pyright: ignore
