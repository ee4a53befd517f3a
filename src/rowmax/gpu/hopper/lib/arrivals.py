"""Keys and values that arrive while a kernel runs: copies write them, and a stream counts these.

The copies were enqueued before the kernel, and copy engines make them: they need no multiprocessor
of the kernel (``distributed/pulls.py``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....rules import arrivals
from .assembly import WAIT_FOR_COUNT

GRANULE, ALL = gl.constexpr(arrivals.GRANULE), gl.constexpr(arrivals.ALL)


@gluon.jit
def await_keys(t, head, row, seen):
    """Wait for the keys of the tile from memory row ``row`` on; return the copies seen to be done.

    ``seen`` are those seen before. Once all have been, nothing is read. ``head`` is the kv head.
    TMA copies after this call read what has arrived.
    """
    if t.needed is not None:  # noqa: SIM102  (a constant)
        if seen < ALL:
            of_head = head * gl.load(t.needed)
            number = gl.load(t.needed + 1 + of_head + row // GRANULE)
            if seen < number:
                seen = gl.inline_asm_elementwise(
                    WAIT_FOR_COUNT, "=r,l,r", [t.arrived, number], dtype=gl.int32, is_pure=False,
                    pack=1,
                )  # fmt: skip
    return seen
