"""Rings of buffers in shared memory, their barriers, and the mailbox of a block.

Every buffer has two barriers: ``full`` (the copy is in memory) and ``empty`` (every warpgroup that
reads the buffer has released it). Use n of a ring of S buffers takes buffer ``n % S`` in phase
``(n // S) & 1``. Both sides count uses and share no other state.

The last tile of a packed sequence ends in rows of the next one, and keys past a prefix length may
hold anything. Their weights are 0, but 0 times NaN or infinity is NaN. So the producer clears
those rows of a short tile before it completes ``full``. The copy of a short tile completes a
barrier of its own: the last of the ring's, which then has one more than buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import fence_async_shared, mbarrier, reinterpret
from .layouts import matrix
from .order import Tile
from .scores import settled


class Ring(NamedTuple):
    """Buffers in shared memory and their barriers, used in rotation."""

    buffers: Any
    full: Any
    empty: Any


class Mailbox(NamedTuple):
    """Two slots for the messages of the producer: a tile, or the end of the tiles."""

    messages: Any  # int32 [2, 16]: 1 or 0, then the fields of the tile
    full: Any
    empty: Any


@gluon.jit
def slot(n, STAGES: gl.constexpr):
    """Return the buffer of use n of a ring."""
    if STAGES == 1:
        s = 0
    elif STAGES & (STAGES - 1):
        s = n % STAGES
    else:
        s = n & (STAGES - 1)
    return s


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    """Return the phase of the buffer of use n of a ring."""
    return (n // STAGES) & 1 if STAGES & (STAGES - 1) else (n >> (STAGES // 2)) & 1


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr, c: gl.constexpr = 0, pred=True):
    """Wait for the copy of use n. ``c`` chooses one of several adjacent rings."""
    mbarrier.wait(ring.full.index(c * STAGES + slot(n, STAGES)), phase(n, STAGES), pred=pred)


@gluon.jit
def wait_empty(ring, n, STAGES: gl.constexpr, c: gl.constexpr = 0):
    """Wait until the buffer of use n is free."""
    mbarrier.wait(ring.empty.index(c * STAGES + slot(n, STAGES)), phase(n, STAGES) ^ 1)


@gluon.jit
def release(ring, n, STAGES: gl.constexpr, c: gl.constexpr = 0, pred=True):
    """Release the buffer of use n."""
    mbarrier.arrive(ring.empty.index(c * STAGES + slot(n, STAGES)), count=1, pred=pred)


@gluon.jit
def tile_buffers(desc, n: gl.constexpr):
    """Return n buffers in shared memory for the tiles that a descriptor copies."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_type.shape, desc.layout)


@gluon.jit
def tile_at(buffers, s, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return buffer s as ``[ROWS, WIDTH]``."""
    return reinterpret(
        buffers.index(s), buffers.dtype, [ROWS, WIDTH], matrix(ROWS, WIDTH, buffers.dtype)
    )


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Return n barriers, each of which completes a phase after ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


# --- short tiles -------------------------------------------------------------------------------


@gluon.jit
def full_barriers(STAGES: gl.constexpr, SHORT: gl.constexpr):
    """Return one barrier for each buffer of a ring, and one more where tiles may be short."""
    return barriers(STAGES + 1 if SHORT else STAGES, 1)


@gluon.jit
def landing(full, s, STAGES: gl.constexpr, SHORT: gl.constexpr, short):
    """Return the barrier for the copy of a tile into buffer s of a ring."""
    if SHORT:
        s = gl.where(short, STAGES, s)
    return full.index(s)


@gluon.jit
def cleared(
    full, s, STAGES: gl.constexpr, buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr, rows, nth
):
    """Clear the tile in buffer s past its first ``rows``, if it is short: the ``nth`` short one."""
    if rows < ROWS:
        mbarrier.wait(full.index(STAGES), nth & 1)
        clear_rows(buffer, ROWS, WIDTH, rows)
        fence_async_shared()
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def clear_rows(buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr, begin):
    """Store zeros in rows ``begin`` and up of a tile ``[ROWS, WIDTH]``.

    The swizzle permutes a row within its 128 bytes, and a wider tile consists of matrices with 128
    bytes a row, one after the other.
    """
    W: gl.constexpr = min(WIDTH, 64)
    parts: gl.constexpr = WIDTH // W
    eights: gl.constexpr = ROWS // 8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    single = reinterpret(buffer, buffer.dtype, [parts * ROWS, W], plain)
    eight = reinterpret(buffer, buffer.dtype, [parts * eights, 8, W], flat)
    row: gl.constexpr = gl.BlockedLayout([max(W // 32, 1)], [32], [gl.num_warps()], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, W // 16], [2, 16], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(parts):
        for r in range(begin, gl.minimum((begin + 7) // 8 * 8, ROWS)):
            single.index(part * ROWS + r).store(gl.zeros([W], buffer.dtype, row))
        for i in range((begin + 7) // 8, eights):
            eight.index(part * eights + i).store(gl.zeros([8, W], buffer.dtype, rows))


# --- the mailbox -------------------------------------------------------------------------------


@gluon.jit
def mailbox(readers: gl.constexpr):
    """Return a mailbox whose messages a number of partitions read."""
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Mailbox(messages, barriers(2, 1), barriers(2, readers))


@gluon.jit
def post_message(mail, n, tile, live):
    """Post message n: a tile, or the end of the tiles."""
    L: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 16, L)
    words = gl.full([16], 0, gl.int32, L) + live.to(gl.int32)
    for i in gl.static_range(10):
        words = gl.where(at == i + 1, tile[i], words)
    wait_empty(mail, n, 2)
    mail.messages.index(slot(n, 2)).store(words)
    mbarrier.arrive(mail.full.index(slot(n, 2)), count=1)


@gluon.jit
def _word(words, at, i: gl.constexpr):
    return gl.sum(gl.where(at == i, words, 0), 0)


@gluon.jit
def read_message(mail, n):
    """Return (tile, True if it is one) of message n. The caller must release it."""
    L: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    wait_full(mail, n, 2)
    w = mail.messages.index(slot(n, 2)).load(L)
    at = gl.arange(0, 16, L)
    tile = Tile(
        _word(w, at, 1), _word(w, at, 2), _word(w, at, 3), _word(w, at, 4), _word(w, at, 5),
        _word(w, at, 6), _word(w, at, 7), _word(w, at, 8), _word(w, at, 9), _word(w, at, 10),
    )  # fmt: skip
    return tile, _word(w, at, 0) != 0


@gluon.jit
def release_message(mail, n, tile, live):
    """Release the slot of message n, whose values must have arrived."""
    total = live.to(gl.int32)
    for i in gl.static_range(10):
        total += tile[i]
    settled(total, 1)
    release(mail, n, 2)


@gluon.jit
def take_message(mail, n):
    """Read message n and release its slot; return (tile, True if it is one)."""
    tile, live = read_message(mail, n)
    release_message(mail, n, tile, live)
    return tile, live
