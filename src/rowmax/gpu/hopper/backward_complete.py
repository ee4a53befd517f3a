"""dq in the launch that sums it: no launch writes zeros before, and none rounds after.

The first tile of keys of a head writes every tile of dQ, the others add to it. So they wait until
the first tile is done; the order has it many places earlier (``backward_order.complete_table``).
Places after the tiles of keys of a head round its sums. A word a head counts its done tiles: FIRST
for one that wrote, 1 for one that added. Each waits for tiles of earlier places alone, which a
block has taken: there is no deadlock, for any number of resident blocks.

Blocks begin with the tiles of the first heads, of which nothing is done. Their sums begin with
zeros instead, and their words with FIRST (``row_stats.clear``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import backward_tiles
from .backward_lib import publish, read_done, store
from .backward_order import plane_of
from .lib.assembly import ADD

FIRST = gl.constexpr(backward_tiles.FIRST)
ROUNDED_TILES = gl.constexpr(backward_tiles.ROUNDED_TILES)


@gluon.jit
def is_rounding(tile, n):
    """Return True if the place of a tile is one that rounds: past the last tile of keys."""
    return tile.first >= n.nk


@gluon.jit
def head_of(tile, n):
    """Return the number of a kv head, counted on through all sequences."""
    return tile.b * n.heads + tile.head


@gluon.jit
def wait_count(place, count):
    """Wait until the tiles of a head that ``count`` stands for are done."""
    seen = read_done(place)
    while seen < count:
        seen = read_done(place)


@gluon.jit
def begin_head(C: gl.constexpr, tile, t, n):
    """Wait until a tile of keys may add to dQ; return (its count's place, True if it writes)."""
    head = head_of(tile, n)
    place = t.done + head
    writes = (tile.first == 0) & (head >= n.zeroed)
    if (tile.hi > tile.lo) & (writes == 0):
        wait_count(place, FIRST)
    return place, writes


@gluon.jit
def end_tile(place, writes, tile, n):
    """Count a tile of keys, once all its copies are in memory."""
    if is_rounding(tile, n) == 0:
        publish(place, gl.where(writes, FIRST, 1), ADD)


@gluon.constexpr_function
def sums_layout(width):
    """Return the layout of 64 rows of sums in the order of threads, four adjacent a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *([128 * n] for n in (1, 2, 4, 8) if 8 * n < width)],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[16 * width], [32 * width]],
        block_bases=[],
        shape=[64 * width],
    )


@gluon.jit
def load_sums(at, WIDTH: gl.constexpr):
    """Return 64 rows of sums ``[64, WIDTH]``, from the order of ``backward_steps.thread_order``."""
    n = gl.arange(0, 64 * WIDTH, sums_layout(WIDTH))
    x = gl.load(at + n, cache_modifier=".cg")
    x = x.reshape([4, WIDTH // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return x.reshape([64, WIDTH])


@gluon.jit
def round_sums(C: gl.constexpr, c: gl.constexpr, tile, t, n):
    """Store dq of the rows of a place that rounds, once all tiles of keys of the head are done."""
    head = head_of(tile, n)
    tiles = (n.nk + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
    wait_count(t.done + head, FIRST + tiles - gl.where(head < n.zeroed, 0, 1))
    row_tiles = (n.nq + C.ROW_TILE - 1) // C.ROW_TILE
    begin = (tile.first // C.BLOCK_RESIDENT - tiles) * ROUNDED_TILES
    end = gl.minimum(begin + ROUNDED_TILES, row_tiles * n.group)
    for i in range(begin + c, end, C.WARPGROUPS):
        g = i // row_tiles
        round_tile(C, tile, tile.head * n.group + g, i - g * row_tiles, t, n)


@gluon.jit
def round_tile(C: gl.constexpr, tile, head, m, t, n):
    """Store dq of tile m of the rows of a query head."""
    plane, _ = plane_of(C, tile.b, head, 0, n.hq)
    first = m * C.ROW_TILE
    at = t.sums + (plane.to(gl.int64) * n.rows + first) * C.D
    row = tile.b.to(gl.int64) * n.nq + first
    dq = t.dq + (row * n.hq + head) * C.D_OUT
    x = load_sums(at, C.D) * n.out_scale  # columns in one part: ``backward_tiles.completes``
    store(C, x, dq, n.hq * C.D_OUT, n.nq - first, C.D, 0, C.D_OUT)
