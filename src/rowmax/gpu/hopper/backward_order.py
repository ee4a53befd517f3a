"""The order of resident tiles, and the streamed tiles that each of them needs.

Where dQ must be the same in every run (ORDERED), the tiles of keys of a head add to a tile of dQ in
a fixed order. It is the order in which blocks take them from a counter. Each tile of keys follows
one neighbour and waits for no other (``backward_writer.add_dq``). Every earlier tile is done or
runs, so there is no deadlock for any number of blocks. The order keeps waits short:

- Under a diagonal, tiles of queries pass from the diagonal on, and the last tile of keys begins
  first (UP). All tiles of keys of a head may begin at once: each begins two tiles before its
  neighbour, and reaches the neighbour's first tile when the neighbour is two tiles ahead.
- In a window they pass from the other end, and the first tile of keys begins first: the mirror
  image.
- Where all tiles of keys begin at the same tile of queries, each waits once for the one before and
  keeps that distance. Two heads at once halve the wait.
- Under a diagonal where heads share keys, UP would begin the longest tiles of keys last. The
  distance of neighbours would grow from head to head of the group. There tiles of queries pass from
  the last to the diagonal, each for all heads before the next (ABREAST). All tiles of keys begin at
  the same one, and the longest begin first.

More heads at once would wait even less. But consecutive blocks share the tiles that they load and
add to, and the tiles of many heads do not fit in L2: every block would load them from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .lib.order import Order, Tile, row_at, table_rows
from .lib.rules import all_range, any_range, touched_tiles

#: greater than any position
UNBOUNDED = gl.constexpr(2**31 - 1)


class Range(NamedTuple):
    """Streamed tiles, from the first to before the end."""

    begin: Any
    end: Any


@gluon.jit
def first_place(C: gl.constexpr, t, n):
    """Return (this block's first place in the order, the end of its places).

    Even the first place is from the counter: then every tile of an earlier place is done or runs,
    and a block may wait for it (``backward_writer.add_dq``).
    """
    if C.DRAWN:
        place = gl.atomic_add(t.counter, 1)
        end = gl.load(t.ends)
        if C.VARLEN:
            end = end * n.heads
    else:
        place = gl.program_id(0)
        end = gl.load(t.ends + place)
    return place, end


@gluon.jit
def next_place(C: gl.constexpr, place, t):
    """Return the place after this one: from the counter, or one stride on."""
    if C.DRAWN:
        place = gl.atomic_add(t.counter, 1)
    else:
        place = place + gl.num_programs(0)
    return place


@gluon.jit
def in_documents(C: gl.constexpr, lo, hi, first, b, t, n):
    """Return (lo, hi) cut to the tiles that may share a document with the resident tile."""
    if C.SPANS:
        length = n.nq if C.QUERIES_RESIDENT else n.nk
        tiles = (length + C.BLOCK_RESIDENT - 1) // C.BLOCK_RESIDENT
        m = gl.minimum(gl.maximum(first, 0) // C.BLOCK_RESIDENT, tiles - 1)
        at = t.spans + 2 * (b * tiles + m)
        lo = gl.maximum(lo, gl.load(at))
        hi = gl.maximum(gl.minimum(hi, gl.load(at + 1)), lo)
    return lo, hi


@gluon.jit
def streamed_range(C: gl.constexpr, first, b, nq, used, offset, t, n):
    """Return (lo, hi), the streamed tiles that see some row of the resident tile at ``first``."""
    left = n.left if C.LEFT else None
    right = n.right if C.RIGHT else None
    if C.QUERIES_RESIDENT:
        last = gl.minimum(first + C.BLOCK_RESIDENT, nq) - 1
        low, high = any_range(first, last, offset, left, right, used)
    else:
        last = gl.minimum(first + C.BLOCK_RESIDENT, used) - 1
        low, high = any_range(first, last, -offset, right, left, nq)
    lo, hi = touched_tiles(low, high, C.BLOCK_STREAMED)
    lo, hi = in_documents(C, lo, hi, first, b, t, n)
    if not C.QUERIES_RESIDENT:
        hi = gl.where(first < used, hi, lo)
    return lo, hi


@gluon.jit
def alike_range(C: gl.constexpr, first, b, t, n):
    """Return (lo, hi): the streamed tiles whose one id is that of the 64 rows from ``first`` on."""
    length = n.nq if C.QUERIES_RESIDENT else n.nk
    parts = (length + C.TOKENS - 1) // C.TOKENS
    at = t.alike + 2 * (b * parts + gl.minimum(first // C.TOKENS, parts - 1))
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def full_range(C: gl.constexpr, first, tile, t, n):
    """Return the Range of the tiles that need no mask for the 64 resident rows from ``first`` on.

    Queries past the last one need no mask: their lse is +inf.
    """
    last = first + C.TOKENS - 1
    # with the last row moved by a tile less one, a division that rounds down gives the first full
    # tile: to round a quotient up takes four instructions more
    moved = last + C.BLOCK_STREAMED - 1
    full = tile.lo
    end = tile.hi
    left = n.left if C.LEFT else None
    right = n.right if C.RIGHT else None
    if C.QUERIES_RESIDENT:
        low, high = all_range(first, moved, tile.offset, left, right, UNBOUNDED)
        LOW: gl.constexpr = C.LEFT
        HIGH: gl.constexpr = C.RIGHT
    else:
        low, high = all_range(first, moved, -tile.offset, right, left, UNBOUNDED)
        LOW: gl.constexpr = C.RIGHT
        HIGH: gl.constexpr = C.LEFT
    if LOW:
        full = low // C.BLOCK_STREAMED
    if HIGH:
        end = gl.maximum(high, 0) // C.BLOCK_STREAMED
    if C.RAGGED:
        if C.QUERIES_RESIDENT:
            end = gl.minimum(end, tile.used // C.BLOCK_STREAMED)
        else:
            full = gl.where(last < tile.used, full, tile.hi)
    if C.SPANS:
        lo, hi = alike_range(C, first, tile.b, t, n)
        full = gl.maximum(full, lo)
        end = gl.minimum(end, hi)
    full = gl.minimum(gl.maximum(full, tile.lo), tile.hi)
    return Range(full, gl.minimum(gl.maximum(end, full), tile.hi))


@gluon.jit
def tile_of(C: gl.constexpr, row, t, n):
    """Return the Tile of a row of the order."""
    first, b = row.first, row.b
    nq, nk = n.nq, n.nk
    q_row, k_row = 0, 0
    if C.VARLEN:
        if C.QUERIES_RESIDENT:
            q_row, nq, k_row, nk = row.row, row.length, row.other_row, row.other_length
        else:
            k_row, nk, q_row, nq = row.row, row.length, row.other_row, row.other_length
    offset = nk - nq
    used = nk
    if C.PREFIX:
        used = gl.maximum(gl.minimum(nk, gl.load(t.lengths + b)), 0)
    lo, hi = streamed_range(C, first, b, nq, used, offset, t, n)
    return Tile(first, row.head, b, q_row, k_row, nq, used, offset, lo, hi)


@gluon.jit
def place_tile(C: gl.constexpr, place, kv_heads, t, n):
    """Return the Tile at a place of the order."""
    order = Order(t.table, t.ends, t.counter, n.heads, kv_heads, n.streamed)
    return tile_of(C, row_at(C, place, order), t, n)


@gluon.jit
def gradient_row(C: gl.constexpr, c: gl.constexpr, tile):
    """Return the first row of warpgroup c in the resident side's gradient.

    The rows of all sequences, dense or packed, are consecutive.
    """
    if C.QUERIES_RESIDENT:
        row = tile.q_row
        n = tile.nq
    else:
        row = tile.k_row
        n = tile.nq + tile.offset
    row = row + tile.first + c * C.TOKENS
    if not C.VARLEN:
        row = row + tile.b * n
    return row


@gluon.jit
def resident_head(tile, n):
    """Return the head of the tile's rows: each share of a kv head's group has a head of its own."""
    head = tile.head
    if n.shares is not None:
        head = head // n.shares
    return head


@gluon.jit
def place_of_share(row, tile, n):
    """Return (row, head, heads) in memory of the gradient at a row of ``gradient_row``.

    The rows of all first shares come before those of the second ones.
    """
    heads = n.heads
    if n.shares is not None:
        heads = heads // n.shares
        row = row + tile.head % n.shares * n.share_rows
    return row, resident_head(tile, n), heads


@gluon.jit
def rows_left(C: gl.constexpr, c: gl.constexpr, tile):
    """Return the rows from the first row of warpgroup c to the end of the sequence.

    Call it just before the store: keeping two more registers spills eight others.
    """
    n = tile.nq if C.QUERIES_RESIDENT else tile.nq + tile.offset
    return n - tile.first - c * C.TOKENS


@gluon.jit
def plane_of(C: gl.constexpr, b, head, q_row, hq):
    """Return (plane, first row) of a query head in lse, delta and the sums of dq.

    Rows are padded to whole tiles. Packed sequences share a plane: sequence b begins at row
    ``(cu // ROW_TILE + b) ROW_TILE``, with room for its last tile.
    """
    plane = b * hq + head
    row = 0
    if C.VARLEN:
        plane = head
        row = (q_row // C.ROW_TILE + b) * C.ROW_TILE
    return plane, row


# --- the ordered sum of dQ ---------------------------------------------------------------------


class Steps(NamedTuple):
    """The streamed tiles of a pass: those that need a mask, those that need none, and others again.

    ``g`` is the head of the group.
    """

    g: Any
    first: Range
    full: Range
    last: Range


@gluon.jit
def steps_of_pass(C: gl.constexpr, UP: gl.constexpr, r, tile, full):
    """Return the Steps of pass r of a tile, upwards or downwards.

    Where tiles on both sides of the full ones need a mask there are two passes a head: the second
    has the last tiles as its first, and no others. So both are of one loop. With a loop each the
    code is longer by a quarter, and words spill.
    """
    g, end = r, full.end
    first, last = Range(tile.lo, full.begin), Range(full.end, tile.hi)
    if not UP:
        first, last = last, first
    if C.PASSES > 1:
        g = r // 2
        late = r % 2 != 0
        first = Range(gl.where(late, last.begin, first.begin), gl.where(late, last.end, first.end))
        end = gl.where(late, full.begin, end)
    return Steps(g, first, Range(full.begin, end), last)


@gluon.jit
def abreast(C: gl.constexpr, i, g, group):
    """Return (tile, head of the group) of step i: tile i of head g, or of all heads abreast."""
    if C.ABREAST:
        g = i % group
        i = i // group
    return i, g


@gluon.jit
def step_of(C: gl.constexpr, i, tile, group):
    """Return (tile of queries, head of the group) of step i of a tile of keys."""
    if C.ABREAST:
        m, g = abreast(C, i, 0, group)
    else:
        g = i // (tile.hi - tile.lo)
        m = i - g * (tile.hi - tile.lo)
    if C.UP:
        m = tile.lo + m
    else:
        m = tile.hi - 1 - m
    return m, g


@gluon.jit
def neighbour_range(C: gl.constexpr, tile, t, n):
    """Return (lo, hi): the tiles of queries of the neighbour of a tile of keys, maybe none.

    Bounds never decrease from one tile of keys to the next. So if the neighbour does not have a
    tile of queries, no earlier tile of keys has it.
    """
    first = tile.first + C.NEIGHBOUR * C.BLOCK_RESIDENT
    lo, hi = streamed_range(C, first, tile.b, tile.nq, tile.used, tile.offset, t, n)
    return lo, gl.where(first >= 0, hi, lo)


@gluon.jit
def steps_before(C: gl.constexpr, g, m, lo, hi, group):
    """Return the number of steps of the neighbour up to tile m of head g.

    Its tiles of queries are lo to hi - 1. The number is 0 if the neighbour does not have tile m:
    this tile of keys is then the first to add to it.
    """
    if C.UP:
        step = m - lo + 1
    else:
        step = hi - m
    if C.ABREAST:
        step = (step - 1) * group + g + 1
    else:
        step = g * (hi - lo) + step
    return gl.where((m >= lo) & (m < hi), step, 0)


# --- the host's side ---------------------------------------------------------------------------


def padded_rows(block: int, nq: int, total_q: int, batch: int, varlen: bool) -> int:
    """Return the rows of a plane. Rows past the last packed sequence have the last tile."""
    return (total_q // block + batch + 1) * block if varlen else -(-nq // block) * block


def counter_table(
    tiles: int, tokens: int, batch: int, heads: int, section: int, up: bool
) -> tuple[Tensor, Tensor]:
    """Return (rows of the order, their number) for tiles of ``tokens`` rows, taken from a counter.

    Sections of heads follow one another. Within a section the tiles of all its heads at one place
    come before those at the next place; the last place is first if ``up``.
    """
    parts = torch.arange(batch * heads).split(section)
    places = torch.arange(tiles).flip(0) if up else torch.arange(tiles)
    m = torch.cat([places.repeat_interleave(part.shape[0]) for part in parts])
    h = torch.cat([part.repeat(tiles) for part in parts])
    rows = table_rows(m * tokens, h, heads)
    return rows, torch.tensor([rows.shape[0]], dtype=torch.int32)


def complete_table(
    tiles: int, tokens: int, sections: list[int], heads: int, rounds: int, by_place: bool
) -> tuple[Tensor, Tensor]:
    """Return (rows of the order, their number) where a launch completes dq, taken from a counter.

    ``sections`` are numbers of heads, which follow one another. The first tiles of a section come
    before the others of the section before it, so that nothing waits for them. ``rounds`` places of
    each head round its sums, one section later. ``by_place``: the tiles of all heads of a section
    at one place come before those at the next.
    """
    parts = torch.arange(sum(sections)).split(sections)
    places = []

    def add(begin: int, end: int, part: Tensor) -> None:
        m = torch.arange(begin, end)
        if by_place:
            m, h = m.repeat_interleave(part.shape[0]), part.repeat(m.shape[0])
        else:
            m, h = m.repeat(part.shape[0]), part.repeat_interleave(m.shape[0])
        places.append(torch.stack([m, h]))

    for n, part in enumerate(parts):
        if n + 1 < len(parts):
            add(0, 1, parts[n + 1])
        add(min(n, 1), tiles, part)
        if n:
            add(tiles, tiles + rounds, parts[n - 1])
    add(tiles, tiles + rounds, parts[-1])
    m, h = torch.cat(places, 1)
    return table_rows(m * tokens, h, heads), torch.tensor([m.shape[0]], dtype=torch.int32)
