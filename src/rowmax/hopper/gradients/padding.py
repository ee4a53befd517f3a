"""What lies past the end of a sequence is not to reach it.

The last tile of a packed sequence ends in rows of the next one, and keys past a prefix length may
hold anything. Their weights are 0, but 0 times what is no number, or infinite, is not: whoever
copies such a tile clears those rows before it tells anyone. The copy lands at a barrier of its
own, the last of the tile's ring, which has one more than buffers for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import fence_async_shared, mbarrier
from ..pipeline import barriers, clear_rows


@gluon.jit
def full_barriers(STAGES: gl.constexpr, SHORT: gl.constexpr):
    """One for each buffer of a ring, and where tiles may be short one for those."""
    return barriers(STAGES + 1 if SHORT else STAGES, 1)


@gluon.jit
def landing(full, s, STAGES: gl.constexpr, SHORT: gl.constexpr, short):
    """The barrier for the copy of a tile into buffer s of a ring."""
    if SHORT:
        s = gl.where(short, STAGES, s)
    return full.index(s)


@gluon.jit
def cleared(
    full, s, STAGES: gl.constexpr, buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr, rows, nth
):
    """Zeros past the first ``rows`` of the tile in buffer s, if it is short: the ``nth`` such."""
    if rows < ROWS:
        mbarrier.wait(full.index(STAGES), nth & 1)
        clear_rows(buffer, ROWS, WIDTH, rows)
        fence_async_shared()
        mbarrier.arrive(full.index(s), count=1)
