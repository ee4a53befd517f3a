"""The order of tiles: the tile of each place, read by kernels and made by the host.

The order is data, made once for a shape and kept on the device: one row a tile, (first token,
head, sequence, 0). Block n takes rows n, n + blocks, n + 2 blocks, ... up to its own end. Packed
sequences have an order of their own, made on the device (packed.py): one row for the tiles of all
heads, with all that a tile needs to know of its sequence, so that a kernel waits for memory once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapreplace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .rules import any_range_of_tensors, key_tiles_of_tensors, touched_tiles_of_tensors


class Order(NamedTuple):
    """The places of tiles, taken in strides or, where there is a counter, one after the other."""

    table: Any
    ends: Any  # each block's end, or one end for all
    counter: Any
    heads: Any  # heads of the resident side
    kv_heads: Any
    streamed: Any  # streamed positions of a head that fill their share of the L2 cache


class Row(NamedTuple):
    """A row of the order, as a kernel loads it."""

    first: Any
    head: Any
    b: Any


class PackedRow(NamedTuple):
    """A row of the order of packed sequences: a Row, and where the sequence is."""

    first: Any
    head: Any
    b: Any
    row: Any  # the first row of the sequence, on the resident side
    length: Any
    other_row: Any  # the same on the streamed side
    other_length: Any


#: numbers of a row in memory: sequence, first place and first tile of its run, tiles of the run,
#: and the last four of PackedRow
WORDS = 8
_WORDS = gl.constexpr(WORDS)


class Tile(NamedTuple):
    """A resident tile, and the streamed tiles lo to hi - 1 that it needs, maybe none."""

    first: Any  # its first row within the sequence
    head: Any  # head of the resident side
    b: Any
    q_row: Any  # first row of a packed sequence, else 0
    k_row: Any
    nq: Any  # queries of the sequence
    used: Any  # its keys in use; ``nq + offset`` is the number of all its keys
    offset: Any  # the key position of query 0
    lo: Any
    hi: Any


@gluon.jit
def packed_row(C: gl.constexpr, n, order):
    """Return the PackedRow at place n of packed sequences (``packed.py``)."""
    heads = order.heads
    at = order.table + _WORDS * (n // heads)
    b = gl.load(at)
    begin = gl.load(at + 1)
    first = gl.load(at + 2)
    tiles = gl.load(at + 3)
    row = gl.load(at + 4)
    length = gl.load(at + 5)
    other_row = gl.load(at + 6)
    other_length = gl.load(at + 7)
    # as many heads in parallel as have room in the cache for keys and values
    many = order.streamed // gl.maximum(other_length, 1)
    many = gl.minimum(gl.maximum(many, 1), order.kv_heads)
    many = many * (heads // order.kv_heads)
    place = n - begin * heads
    section = place // (many * tiles)
    place = place - section * many * tiles
    head = section * many
    wide = gl.minimum(many, heads - head)
    m = place // wide
    head = head + place - m * wide
    m = first + m
    if C.LAST_FIRST:
        m = (length + C.TILE - 1) // C.TILE - 1 - m
    return PackedRow(m * C.TILE, head, b, row, length, other_row, other_length)


@gluon.jit
def row_at(C: gl.constexpr, n, order):
    """Return the row at place n."""
    if C.VARLEN:
        row = packed_row(C, n, order)
    else:
        at = order.table + 4 * n
        row = Row(gl.load(at), gl.load(at + 1), gl.load(at + 2))
    return row


@gluon.jit
def first_place(C: gl.constexpr, order, side: gl.constexpr = 0):
    """Return (the first place of this block, or of a side of it, in the order, its end)."""
    place = gl.program_id(0)
    if C.SIDES > 1:
        place = C.SIDES * place + side
    if C.VARLEN:
        end = gl.load(order.ends) * order.heads
    elif C.DRAWN:
        end = gl.load(order.ends)
    else:
        end = gl.load(order.ends + place)
    return place, end


@gluon.jit
def next_place(C: gl.constexpr, place, order):
    """Return the place after this one: from the counter, or a stride on."""
    if C.DRAWN:
        place = gl.num_programs(0) + gl.atomic_add(order.counter, 1)
    else:
        place = place + C.SIDES * gl.num_programs(0)
    return place


@gluon.jit
def row_ahead(C: gl.constexpr, place, end, order):
    """Return the row a stride on, loaded early; past the end it may be any row."""
    following = place + C.SIDES * gl.num_programs(0)
    following = gl.where(following < end, following, gl.program_id(0))
    return row_at(C, following, order)


# --- on the host -------------------------------------------------------------------------------

#: the cost of a tile without its key tiles, in key tiles
OVERHEAD = 1.0
#: the most tiles of a processor that are few
FEW_TILES = 4
#: the fewest tiles of a head whose last sections may be in octaves
LEAST_IN_OCTAVES = 16
#: the least work of a section whose blocks end together, in longest tiles of every block
LEAST_LAST = 0.9
#: the work in octaves, in longest tiles of every block
LATE_TILES = 3
#: the last sections whose tiles may fill blocks best
LAST_SECTIONS = (1, 2, 3, 4, 6)
#: blocks of which the last one ends later than it must by no more than this factor end together
EVEN = 1.015
#: the fewest tiles of a head that were measured, and the factor by which octaves end later, where
#: tiles fill blocks best. With a lesser one 0.92 to 1.02 of the speed was measured (an H200)
LEAST_FITTED, FITTED = 22, 1.03
#: the ends that ``best_fits`` tries, over the least that any order may have
FACTORS = (1.0, 1.003, 1.006, 1.01, 1.015, 1.02, 1.03, 1.05, 1.08)
#: half of the L2 cache, for keys and values of the heads in flight
SECTION_BYTES = 32 << 20
#: the same in the forward of a batch. Each half of the cache may have a copy, next to the queries
#: and the output: on an H100, sections of 32 MiB read K and V from memory for every query tile.
FORWARD_SECTION_BYTES = 8 << 20


def tile_count(tokens: int, block_k: int, nq: int, nk: int, left: int | None, right: int | None):
    """Return the number of key tiles of each query tile of ``tokens`` positions, top to bottom."""
    first = torch.arange(0, nq, tokens)
    last = (first + tokens).clamp(max=nq) - 1
    low, high = any_range_of_tensors(first, last, nk - nq, left, right, nk)
    lo, hi = key_tiles_of_tensors(low + 0 * first, high + 0 * first, block_k)
    return hi - lo


def touched_tile_count(
    blocks: tuple[int, int], resident: int, streamed: int, back: int | None, ahead: int | None
) -> Tensor:
    """Return the number of streamed tiles that each resident tile needs, maybe none.

    ``blocks`` are the rows of a resident and of a streamed tile; ``resident`` and ``streamed`` are
    the lengths of both sides, whose last positions are aligned.
    """
    first = torch.arange(0, resident, blocks[0])
    last = (first + blocks[0]).clamp(max=resident) - 1
    low, high = any_range_of_tensors(first, last, streamed - resident, back, ahead, streamed)
    lo, hi = touched_tiles_of_tensors(low + 0 * first, high + 0 * first, blocks[1])
    return hi - lo


def dense_table(
    counts: Tensor,
    tokens: int,
    batch: int,
    heads: int,
    sections: list[int],
    blocks: int,
    octaves: bool = False,
    near: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (rows, each block's end) for ``batch x heads`` heads with the same query tiles.

    ``counts`` are those of ``tile_count``. Where they differ, each tile is assigned to the block
    that is free first: the order of a counter, computed in advance. ``sections`` of heads follow
    one another, so that their streamed rows stay in the cache, each with its longest tiles first.
    Where counts do not differ, the tiles of a head run in parallel and share the cache.

    ``octaves``: where the last section would end late, the last heads follow in octaves of their
    counts if so blocks end sooner, or each of their tiles goes to the block that it fills best
    (``best_fits``). Launches that add to what other tiles add to were 0.91 to 1.07 times as fast by
    octaves.

    ``near``: each tile reads streamed rows near it, as in a window. Then the heads of a section go
    together even where counts do not differ.
    """
    n = counts.shape[0]
    head = torch.arange(batch * heads)
    if not near and bool((counts == counts[0]).all()):
        m, h = torch.arange(n).repeat(batch * heads), head.repeat_interleave(n)
        order = torch.arange(n * batch * heads)
        ends = order.new_tensor([len(order[i::blocks]) for i in range(blocks)])
        ends = torch.arange(blocks) + ends * blocks
        return table_rows(m[order] * tokens, h[order], heads), ends.int()
    parts = head.split(sections)
    late = late_sections(counts, sections, blocks) if octaves else 0
    longest = counts.argsort(descending=True, stable=True)
    pieces = [(longest, part) for part in parts]
    found = in_pieces(counts, pieces, blocks)
    if late:
        last = torch.cat(parts[-late:])
        pieces[-late:] = in_octaves(counts[longest], longest, last, sections[0])
        found = min(found, in_pieces(counts, pieces, blocks), key=lambda x: x.end)
    if octaves and n >= LEAST_FITTED and found.end > FITTED * found.least:
        fitted = fitted_last(counts, sections, blocks)
        found = fitted if FITTED * fitted.end < found.end else found
    rows, ends = places_of(found.block, blocks)
    table = torch.zeros(max(ends), 4, dtype=torch.int32)
    table[rows] = table_rows(found.m * tokens, found.head, heads)
    return table, torch.tensor(ends, dtype=torch.int32)


class Spread(NamedTuple):
    """Tiles, their heads, and the block of each; a block takes its tiles in this order."""

    m: Tensor
    head: Tensor
    block: list[int]
    end: float  # when the last block ends, in streamed tiles
    least: float  # the least end: the mean work of a block, or the longest tile


def in_pieces(
    counts: Tensor, pieces: list[tuple[Tensor, Tensor]], blocks: int, fitted: int = 0
) -> Spread:
    """Return the Spread of pieces (tiles, heads): each tile goes through all heads of its piece.

    Tiles go to the block that is free first, and so many last pieces to that which they fill best.
    """
    m = torch.cat([tiles.repeat_interleave(part.shape[0]) for tiles, part in pieces])
    head = torch.cat([part.repeat(tiles.shape[0]) for tiles, part in pieces])
    costs = (counts[m] + OVERHEAD).tolist()
    others = pieces[: len(pieces) - fitted]
    block = best_fits(costs, sum(len(tiles) * len(part) for tiles, part in others), blocks)
    least = max(sum(costs) / blocks, max(costs))
    return Spread(m, head, block, max(ends_of(costs, block, blocks)), least)


def fitted_last(counts: Tensor, sections: list[int], blocks: int) -> Spread:
    """Return the Spread whose last sections fill blocks best: as few as have blocks end together.

    Each section has its longest tiles first.
    """
    longest = counts.argsort(descending=True, stable=True)
    parts = torch.arange(sum(sections)).split(sections)
    found = in_pieces(counts, [(longest, part) for part in parts], blocks)
    for last in (n for n in LAST_SECTIONS if n <= len(parts)):
        if found.end > EVEN * found.least:
            pieces = [*parts[:-last], torch.cat(parts[-last:])]
            this = in_pieces(counts, [(longest, part) for part in pieces], blocks, 1)
            found = min(found, this, key=lambda x: x.end)
    return found


def even_sections(groups: int, many: int, group: int) -> list[int]:
    """Return the heads of each section of at most ``many`` groups of heads that read the same rows.

    Blocks would finish a short last section before the longest tiles of a block.
    """
    parts = torch.arange(groups).tensor_split(-(-groups // many))
    return [part.shape[0] * group for part in parts]


def sections_ending_first(
    counts: Tensor, groups: int, many: int, least: int, group: int, blocks: int
) -> list[int]:
    """Return the heads of each section: ``even_sections``, or others after which blocks end sooner.

    Blocks end together after a section whose work on every block is that of the longest tile:
    ``least`` groups of heads. If even ones have fewer, those compared have ``many`` groups each,
    after the rest.
    """
    even = even_sections(groups, many, group)
    if len(even) == 1 or min(even) >= least * group:
        return even
    full, rest = divmod(groups, many)
    last_full = [rest * group] * (rest > 0) + [many * group] * full
    return min(even, last_full, key=lambda sections: last_end(counts, sections, blocks))


def last_end(counts: Tensor, sections: list[int], blocks: int) -> float:
    """Return when the last block ends ``dense_table``, in streamed tiles."""
    costs = (counts + OVERHEAD).sort(descending=True).values
    every = torch.cat([costs.repeat_interleave(heads) for heads in sections]).tolist()
    return max(ends_of(every, first_free(every, blocks), blocks))


def heads_of_longest(counts: Tensor, blocks: int) -> float:
    """Return the number of heads whose tiles keep all blocks busy as long as the longest one."""
    longest = float(counts.max()) + OVERHEAD
    return longest * blocks / float((counts + OVERHEAD).sum())


def late_sections(counts: Tensor, sections: list[int], blocks: int) -> int:
    """Return the number of sections in octaves: 0 if the last one ends with the others.

    It ends late if all blocks finish it before a block finishes its longest tile. The tiles of
    few-tile heads read their streamed rows together; in two octaves they would read them twice
    (0.82 to 0.94 of the speed with 4 or 8 tiles a head).
    """
    longest = heads_of_longest(counts, blocks)
    if counts.shape[0] < LEAST_IN_OCTAVES or sections[-1] > LEAST_LAST * longest:
        return 0
    return math.ceil(LATE_TILES * longest / sections[0])


def in_octaves(
    counts: Tensor, tiles: Tensor, heads: Tensor, section: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tiles, heads) that follow one another; tiles are sorted, and ``counts`` are theirs.

    An octave has the tiles of more than half of its largest count. It goes through all heads in
    sections, and the next one, of half the length, has room for twice as many heads. So all heads
    have short tiles left at the end, and blocks end together.
    """
    most = int(counts[0])
    while tiles.shape[0]:
        here = (2 * counts > counts[0]) | (counts[0] == 0)
        for part in heads.split(section * (most // max(int(counts[0]), 1))):
            yield tiles[here], part
        counts, tiles = counts[~here], tiles[~here]


def strip_table(
    n: int, tokens: int, sizes: tuple[int, int], shared: tuple[int, int], blocks: int, sides: int
) -> tuple[Tensor, Tensor]:
    """Return (rows, the end of each side of each block) where a block keeps a bias for many tiles.

    A strip is a bias of one of n query tiles. ``sizes`` are (sequences, heads), ``shared`` those of
    the bias, 1 where they share it. Every block has as many tiles but the last, of one strip after
    another, and its sides take turns. The sequences of a strip begin further on with each strip:
    blocks that read the same keys then do so together.
    """
    (batch, heads), (own_b, own_h) = sizes, shared
    each = batch // own_b * (heads // own_h)
    plane, m, sharer = torch.meshgrid(
        torch.arange(own_b * own_h), torch.arange(n), torch.arange(each), indexing="ij"
    )
    most = -(-sharer.numel() // (blocks * sides)) * sides
    begin = (plane * n + m) * each % most
    plane, m, sharer = (x.flatten() for x in (plane, m, (sharer + begin) % each))
    b = plane // own_h + sharer // (heads // own_h)
    head = plane % own_h + sharer % (heads // own_h)
    rows = table_rows(m * tokens, b * heads + head, heads)
    columns = -(-len(rows) // most) * sides
    block, nth = torch.arange(len(rows)) // most, torch.arange(len(rows)) % most
    table = torch.zeros(most // sides * columns, 4, dtype=torch.int32)
    table[block * sides + nth % sides + nth // sides * columns] = rows
    counts = (len(rows) - torch.arange(columns) // sides * most).clamp(max=most) // sides
    return table, (torch.arange(columns) + counts * columns).int()


def table_rows(token: Tensor, head: Tensor, heads: int) -> Tensor:
    """Return rows (token, head, sequence, 0); the given heads count on through all sequences."""
    return torch.stack([token, head % heads, head // heads, torch.zeros_like(head)], 1).int()


def first_free(costs: list[float], blocks: int) -> list[int]:
    """Return the block of each tile: the one that is free first."""
    free = [(0.0, block) for block in range(blocks)]
    found = []
    for cost in costs:
        time, block = free[0]
        found.append(block)
        heapreplace(free, (time + cost, block))
    return found


def best_fits(costs: list[float], first: int, blocks: int) -> list[int]:
    """Return the block of each tile; those from ``first`` on, the longest first, fill blocks best.

    Each of those goes to the block that has the least room for it, until an end that all blocks
    have. The end is the least of a few for which that is possible: bin packing by best fit
    decreasing, with the bins given (MULTIFIT; Coffman, Garey and Johnson, "An application of
    bin-packing to multiprocessor scheduling", SIAM J. Comput. 7, 1978).
    """
    plain = first_free(costs, blocks)
    begin = ends_of(costs, plain[:first], blocks)
    least = max(sum(costs) / blocks, min(begin) + max(costs[first:], default=0.0), *begin)
    last = max(ends_of(costs, plain, blocks))
    for end in (factor * least for factor in FACTORS if factor * least < last):
        room = sorted((end - time, block) for block, time in enumerate(begin))
        fits = plain[:first]
        for cost in costs[first:]:
            at = bisect_left(room, (cost, -1))
            if at == blocks:
                break
            left, block = room.pop(at)
            fits.append(block)
            insort(room, (left - cost, block))
        if len(fits) == len(costs):
            return fits
    return plain


def ends_of(costs: list[float], block: list[int], blocks: int) -> list[float]:
    """Return when each block ends the first tiles, of which ``block`` has their blocks."""
    ends = [0.0] * blocks
    for cost, at in zip(costs, block, strict=False):
        ends[at] += cost
    return ends


def places_of(block: list[int], blocks: int) -> tuple[list[int], list[int]]:
    """Return the row of each tile of a block, and each block's end."""
    ends = list(range(blocks))
    rows = []
    for at in block:
        rows.append(ends[at])
        ends[at] += blocks
    return rows, ends
