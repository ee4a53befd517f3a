"""Clocks of a block's events, stored if a config has events (CLOCKS); else there is no code.

The first block stores them in an array ``[parts, USES, 8]`` of int32: a part is a warpgroup, or the
producer after the last one. The last row of a part has the clock and the nanoseconds of its begin
and of its end. ``benchmarks/clocks.py`` reads it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .assembly import CLOCK, NANOSECONDS

#: uses of K whose events are stored, and one row for the begin and the end
USES = gl.constexpr(301)


@gluon.jit
def mark(C: gl.constexpr, clocks, part: gl.constexpr, use, event: gl.constexpr):
    """Store the clock of an event of use ``use`` of K, if CLOCKS has the event's bit."""
    if C.CLOCKS >> event & 1:
        now = gl.inline_asm_elementwise(CLOCK, "=r", [], gl.int32, is_pure=False, pack=1)
        at = clocks + (use * 8 + part * USES * 8 + event)
        gl.store(at, now, mask=(use < USES - 1) & (gl.program_id(0) == 0))


@gluon.jit
def mark_time(C: gl.constexpr, clocks, part: gl.constexpr, at: gl.constexpr):
    """Store the clock and the nanoseconds of the begin (``at`` 0) or the end (2) of a part."""
    if C.CLOCKS:
        now = gl.inline_asm_elementwise(CLOCK, "=r", [], gl.int32, is_pure=False, pack=1)
        time = gl.inline_asm_elementwise(NANOSECONDS, "=r", [], gl.int32, is_pure=False, pack=1)
        first = gl.program_id(0) == 0
        gl.store(clocks + ((part + 1) * USES - 1) * 8 + at, now, mask=first)
        gl.store(clocks + ((part + 1) * USES - 1) * 8 + at + 1, time, mask=first)
