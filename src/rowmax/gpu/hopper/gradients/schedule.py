"""Which tile of keys is worked on where and when, and which tiles of queries pass by it.

Where dQ is to be the same in every run (ORDERED), a tile of it takes what the tiles of keys of a
head add in the order in which those are drawn. Each follows one neighbour and waits for no other
(``pipeline.take_away``); who was drawn before is done or runs, so nobody waits for ever, however
many blocks there are. That nobody waits for long is left to the order:

- Under a diagonal, tiles of queries pass by from the diagonal on, and the last tile of keys is
  drawn first (UP). All of a head may begin at once: each begins two tiles before the one that it
  follows, and meets that one's first tile when it is two tiles on.
- In a window they pass by from the other end, and the first tile of keys is drawn first: the same
  picture upside down.
- Where all tiles of keys begin at the same tile of queries each has to begin a little after the
  one before, once, and keeps its distance from then on. Two heads at once halve that wait.
- Under a diagonal where heads share keys, UP would draw tiles of a whole group's length last, and
  tiles of keys that follow one another would be further apart from head to head of the group.
  There tiles pass by from the last to the diagonal, each of all heads before the next (ABREAST):
  all tiles of keys begin at the same one, and the longest are drawn first.

More heads at once would wait less still, but blocks that follow one another share what they bring
and add to, and too many heads do not fit in L2: every block then has to have it from memory.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.order import dense_table, table_rows


@gluon.jit
def draw(C: gl.constexpr, order):
    """(this block's first place in the order, its end).

    Drawn from a counter, the first place too: then every tile before a drawn one is done or in
    the hands of a block that runs, and a block may wait for it (``pipeline.take_away``).
    """
    table, ends, counter, heads, kv_heads, rows = order
    if C.DRAWN:
        n = gl.atomic_add(counter, 1)
        end = gl.load(ends)
        if C.VARLEN:
            end = end * heads
    else:
        n = gl.program_id(0)
        end = gl.load(ends + n)
    return n, end


@gluon.jit
def draw_next(C: gl.constexpr, n, order):
    table, ends, counter, heads, kv_heads, rows = order
    if C.DRAWN:
        n = gl.atomic_add(counter, 1)
    else:
        n = n + gl.num_programs(0)
    return n


@gluon.jit
def in_documents(C: gl.constexpr, lo, hi, first, b, n, spans):
    """Of tiles from lo to hi those that may share a document with the one at ``first`` of n."""
    if C.DOCUMENTS:
        tiles = (n + C.BLOCK_K - 1) // C.BLOCK_K
        m = gl.minimum(gl.maximum(first, 0) // C.BLOCK_K, tiles - 1)
        at = spans + 2 * (b * tiles + m)
        lo = gl.maximum(lo, gl.load(at))
        hi = gl.minimum(hi, gl.load(at + 1))
    return lo, hi


@gluon.jit
def band(C: gl.constexpr, first, b, nq, used, offset, sizes):
    """The tiles of queries ``lo <= m < hi`` that see some of a tile of keys from ``first`` on."""
    nq_, nk_, left, right, spans = sizes
    lo = 0
    end = nq
    if C.RIGHT:
        lo = gl.maximum(first - offset - right, 0) // C.BLOCK_Q
    if C.LEFT:
        last = gl.minimum(first + C.BLOCK_K, used) - 1
        end = gl.minimum(nq, last - offset + left + 1)
    hi = (gl.maximum(end, 0) + C.BLOCK_Q - 1) // C.BLOCK_Q
    lo, hi = in_documents(C, lo, hi, first, b, nk_, spans)
    return lo, gl.where(first < used, gl.maximum(hi, lo), lo)


@gluon.jit
def tile_of(C: gl.constexpr, row, sizes, seqs, lengths):
    """The tile of a row: (first key, kv head, sequence, query row, key row, nq, keys in use,
    offset, lo, hi). The last two bound the tiles of queries that it meets, of each head of its
    group; there may be none. ``nq + offset`` is the number of keys, in use or not.
    """
    first, head, b = row
    nq, nk, left, right, spans = sizes
    cu_k, cu_q, batch, lengths_ = seqs
    q_row, k_row = 0, 0
    if C.VARLEN:
        q_row = gl.load(cu_q + b)
        k_row = gl.load(cu_k + b)
        nq = gl.load(cu_q + b + 1) - q_row
        nk = gl.load(cu_k + b + 1) - k_row
    offset = nk - nq
    used = nk
    if C.PREFIX:
        used = gl.maximum(gl.minimum(nk, gl.load(lengths + b)), 0)
    lo, hi = band(C, first, b, nq, used, offset, sizes)
    return first, head, b, q_row, k_row, nq, used, offset, lo, hi


@gluon.jit
def counted(C: gl.constexpr, i, g, group):
    """(tile, head of the group) of a count of steps: i of head g, or i of all heads abreast."""
    if C.ABREAST:
        g = i % group
        i = i // group
    return i, g


@gluon.jit
def passing(C: gl.constexpr, i, lo, hi, group):
    """(tile of queries from lo to hi, head of the group) that is the i-th to pass by."""
    if C.ABREAST:
        m, g = counted(C, i, 0, group)
    else:
        g = i // (hi - lo)
        m = i - g * (hi - lo)
    if C.UP:
        m = lo + m
    else:
        m = hi - 1 - m
    return m, g


@gluon.jit
def full_tiles(C: gl.constexpr, first, tile, sizes):
    """Where the tiles ``lo <= m < hi`` change for 64 keys from ``first`` on: partial from z up,
    full from a to z, partial again below a."""
    key, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    nq_, nk_, left, right, spans = sizes
    last = first + C.TOKENS - 1
    a = lo
    z = hi
    if C.RIGHT:
        a = gl.maximum(last - offset - right + C.BLOCK_Q - 1, 0) // C.BLOCK_Q
    if C.RAGGED:
        a = gl.where(last < used, a, hi)
    if C.LEFT:
        z = gl.maximum(first - offset + left + 1, 0) // C.BLOCK_Q
    if C.DOCUMENTS:
        a = hi
    a = gl.minimum(gl.maximum(a, lo), hi)
    z = gl.minimum(gl.maximum(z, a), hi)
    return a, z


@gluon.jit
def neighbour_of(C: gl.constexpr, tile, sizes):
    """The tiles of queries that the tile of keys meets that this one follows; maybe none.

    Bounds do not fall from one tile of keys to the next, so that a tile of queries that this one
    meets and the neighbour does not is met by nobody before.
    """
    first, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    first += C.NEIGHBOUR * C.BLOCK_K
    before_lo, before_hi = band(C, first, b, nq, used, offset, sizes)
    return before_lo, gl.where(first >= 0, before_hi, before_lo)


@gluon.jit
def turns_before(C: gl.constexpr, g, m, before, group):
    """How many steps the neighbour has made when it has added to tile m of head g; 0 where it
    does not meet that tile: then this one is the first."""
    lo, hi = before
    if C.UP:
        step = m - lo + 1
    else:
        step = hi - m
    if C.ABREAST:
        step = (step - 1) * group + g + 1
    else:
        step = g * (hi - lo) + step
    return gl.where((m >= lo) & (m < hi), step, 0)


@gluon.jit
def query_tile_of(C: gl.constexpr, row, sizes, seqs, lengths):
    """The same of a tile of 128 queries: (first query, head, ...), and the tiles of BLOCK_Q keys
    that it meets."""
    first, head, b = row
    nq, nk, left, right, spans = sizes
    cu_q, cu_k, batch, lengths_ = seqs
    q_row, k_row = 0, 0
    if C.VARLEN:
        q_row = gl.load(cu_q + b)
        k_row = gl.load(cu_k + b)
        nq = gl.load(cu_q + b + 1) - q_row
        nk = gl.load(cu_k + b + 1) - k_row
    offset = nk - nq
    used = nk
    if C.PREFIX:
        used = gl.maximum(gl.minimum(nk, gl.load(lengths + b)), 0)
    lo = 0
    end = used
    if C.LEFT:
        lo = gl.maximum(first + offset - left, 0) // C.BLOCK_Q
    if C.RIGHT:
        last = gl.minimum(first + C.BLOCK_K, nq) - 1
        end = gl.minimum(used, last + offset + right + 1)
    hi = (gl.maximum(end, 0) + C.BLOCK_Q - 1) // C.BLOCK_Q
    lo, hi = in_documents(C, lo, hi, first, b, sizes[0], spans)
    return first, head, b, q_row, k_row, nq, used, offset, lo, gl.maximum(hi, lo)


@gluon.jit
def full_range(C: gl.constexpr, first, tile, sizes):
    """The tiles that are full for 64 rows from ``first`` on; partial ones lie on both sides."""
    row, head, b, q_row, k_row, nq, used, offset, lo, hi = tile
    nq_, nk_, left, right, spans = sizes
    if C.QUERIES_DOWN:
        a = lo
        z = hi
        if C.LEFT:
            last = first + C.TOKENS - 1 + offset
            a = gl.maximum(last - left + C.BLOCK_Q - 1, 0) // C.BLOCK_Q
        if C.RIGHT:
            z = gl.maximum(first + offset + right + 1, 0) // C.BLOCK_Q
        if C.RAGGED:
            z = gl.minimum(z, used // C.BLOCK_Q)
        if C.DOCUMENTS:
            a = hi
        a = gl.minimum(gl.maximum(a, lo), hi)
        z = gl.minimum(gl.maximum(z, a), hi)
    else:
        a, z = full_tiles(C, first, tile, sizes)
    return a, z


@gluon.jit
def plane_of(C: gl.constexpr, b, head, q_row, hq):
    """(plane, first row) of a query head in what is kept row by row: lse, delta and dq.

    Rows are padded to whole tiles. Packed sequences share a plane: sequence b begins at row
    ``(cu // BLOCK_Q + b) BLOCK_Q``, which leaves each of them room for its last tile.
    """
    plane = b * hq + head
    row = 0
    if C.VARLEN:
        plane = head
        row = (q_row // C.BLOCK_Q + b) * C.BLOCK_Q
    return plane, row


def padded_rows(block_q: int, nq: int, total_q: int, batch: int, varlen: bool) -> int:
    """The rows of a plane. What lies past the last packed sequence has the last of them."""
    return (total_q // block_q + batch + 1) * block_q if varlen else -(-nq // block_q) * block_q


def steps_of(
    block_q: int, block_k: int, nq: int, nk: int, left: int | None, right: int | None
) -> torch.Tensor:
    """How many tiles of queries each tile of keys meets."""
    first = torch.arange(0, nk, block_k)
    last = (first + block_k).clamp(max=nk) - 1
    offset = nk - nq
    lo = torch.zeros_like(first) if right is None else (first - offset - right).clamp(min=0)
    end = torch.full_like(first, nq) if left is None else (last - offset + left + 1).clamp(max=nq)
    lo = lo // block_q
    return ((end.clamp(min=0) + block_q - 1) // block_q - lo).clamp(min=0)


def order_of(
    steps: torch.Tensor,
    batch: int,
    heads: int,
    section: int,
    blocks: int,
    drawn: bool,
    up: bool = False,
    tokens: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, ends) as of ``dense_table`` for tiles of so many keys; how many there are, where they
    are drawn.

    Those are ordered by keys first, from the last if ``up``, and heads second, within sections.
    """
    if not drawn:
        return dense_table(steps, tokens, batch, heads, section, blocks)
    n = steps.shape[0]
    parts = torch.arange(batch * heads).split(section)
    keys = torch.arange(n).flip(0) if up else torch.arange(n)
    m = torch.cat([keys.repeat_interleave(part.shape[0]) for part in parts])
    h = torch.cat([part.repeat(n) for part in parts])
    rows = table_rows(m * tokens, h, heads)
    return rows, torch.tensor([rows.shape[0]], dtype=torch.int32)
