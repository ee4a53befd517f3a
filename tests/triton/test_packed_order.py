"""The order of packed tiles, made in Triton's interpreter, against the same in Python."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import accumulate, pairwise, product

import pytest
import torch
from torch import Tensor

from rowmax.distributed import arrivals
from rowmax.distributed.pieces import Packing, Piece
from rowmax.gpu.hopper import documents, packed
from tests.hopper.packed_calls import in_range

pytestmark = pytest.mark.skipif(
    not documents._is_interpreted(), reason="needs TRITON_INTERPRET=1 before triton is imported"
)


def made(
    cu: Tensor, other: Tensor, totals: tuple[int, int], tokens: int, late: packed.Late
) -> packed.Order:
    """Return the order, made by the kernel in the interpreter, in memory that is not 0."""
    batch, most = cu.shape[0] - 1, totals[0] // tokens + cu.shape[0] - 1
    room = packed.HEADER + packed.WORDS * most
    words = torch.full([room + 2 * batch + 2], -7, dtype=torch.int32)
    t = packed.Pointers(words, cu, other)
    n = packed.Numbers(batch, most, *totals, kv_heads=late.kv_heads, blocks=late.blocks)
    packed._place[(batch + 1,)](t, n, packed.shape(tokens, late.runs))  # pyright: ignore
    cu, rest = words[room:][: batch + 1], words[room:][batch + 1 :]
    table = words[packed.HEADER : room].view(most, packed.WORDS)
    return packed.Order(words, words[1:], table, cu, rest)


def drawn(
    seed: int, sequences: tuple[int, ...]
) -> tuple[int, int, Tensor, tuple[int, int], list[list[int]]]:
    """Return (sequences, positions of a tile, offsets of both sides, totals, lengths).

    Empty ones, equal ones, and offsets out of order. The pairs of long ones are more than 2^32.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, tokens = rng.choice(sequences), rng.choice((16, 128))
    most = rng.choice((2, 40, 500)) if batch > 7 else rng.choice((3000, 200_000))
    sizes = torch.randint(0, most, (2, batch))
    if rng.random() < 0.3:
        sizes[:] = sizes[:, :1]
    offsets = torch.cat([torch.zeros(2, 1, dtype=torch.int64), sizes.cumsum(1)], 1).int()
    if rng.random() < 0.3:
        offsets += torch.randint(-30, 30, offsets.shape, dtype=torch.int32)
    totals = max(1, int(sizes[0].sum())), max(1, int(sizes[1].sum()))
    lengths = [[b - a for a, b in pairwise(row.tolist())] for row in in_range(offsets, totals)]
    return batch, tokens, offsets, totals, lengths


def place_of(found: packed.Order, b: int, own: list[int], others: list[int]) -> list[int]:
    """Return the first row and the length of a sequence, on both sides."""
    return [int(found.cu[b]), own[b], int(found.other[b]), others[b]]


def in_order(own: list[int], others: list[int]) -> list[int]:
    """Return the sequences, those with most pairs first."""
    return sorted(range(len(own)), key=lambda b: (-own[b] * others[b], -own[b], b))


@pytest.mark.parametrize("seed", range(8))
def test_sequences_with_most_pairs_come_first_float32(seed: int) -> None:
    """More sequences than a step of 64."""
    _, tokens, offsets, totals, (own, others) = drawn(seed, (1, 3, 64, 65, 130))
    found = made(*offsets, totals, tokens, packed.Late())
    assert torch.equal(torch.stack([found.cu, found.other]), in_range(offsets, totals))
    tiles = [b for b in in_order(own, others) for _ in range(-(-own[b] // tokens))]
    assert int(found.counter[0]) == 0
    assert int(found.ends[0]) == len(tiles)
    rows = [
        [b, tiles.index(b), 0, -(-own[b] // tokens), *place_of(found, b, own, others)]
        for b in tiles
    ]
    assert found.table[: len(tiles)].tolist() == rows
    if not tiles:
        assert found.table[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_copies_arrive_in_the_order_of_sequences_float32(seed: int) -> None:
    """Pieces of a distributed call: the first of the order has its keys first."""
    rng = random.Random(seed)
    queries = [rng.choice((1, 30, rng.randint(1, 300))) for _ in range(rng.choice((1, 9, 70)))]
    keys = [rng.choice((n, n + 100, rng.randint(1, 900))) for n in queries]
    pieces = [Piece(range(q), range(k)) for q, k in zip(queries, keys, strict=True)]
    packing = Packing(pieces, [0] * len(pieces), max(keys))
    cu, other = (torch.tensor([0, *accumulate(each)]) for each in (queries, keys))
    found = made(cu.int(), other.int(), (sum(queries), sum(keys)), 16, packed.Late())
    rows = found.table[: int(found.ends[0]), 0].tolist()
    first_keys = [int(other[b]) for b in dict.fromkeys(rows)]
    order = [arrivals._order(packing, row) for row in first_keys]
    assert len(order) == len(pieces)
    assert order == sorted(order)


def runs_of_tiles(
    own: list[int], others: list[int], tokens: int, late: packed.Late
) -> list[tuple[int, int, int]]:
    """Return (run, sequence, tile) of all tiles, in order.

    Tile m of the keys of a late sequence is in run r if more than a part ``2^-(r + 1)`` of the
    longest late tile's queries see it. Others are in run 0.
    """
    order, tiles, after = in_order(own, others), [], 0.0
    least = [min(pair) for pair in zip(own, others, strict=True)]
    late_ones = set()
    for b in reversed(order):
        if after * late.kv_heads < least[b] * late.blocks:
            late_ones.add(b)
        after += least[b] * (own[b] - least[b] / 2) / tokens
    longest = max((least[b] for b in late_ones), default=0)
    for b in order:
        for m in range(-(-own[b] // tokens)):
            seen = min(others[b], own[b] - m * tokens)
            parts = (r for r in range(late.runs - 1) if seen > longest >> (r + 1))
            tiles.append((next(parts, late.runs - 1) if b in late_ones else 0, order.index(b), m))
    return [(r, order[at], m) for r, at, m in sorted(tiles)]


@pytest.mark.parametrize("blocks", [1, 5, 132])
@pytest.mark.parametrize("seed", range(12))
def test_the_last_sequences_are_in_runs_float32(seed: int, blocks: int) -> None:
    _, tokens, offsets, totals, (own, others) = drawn(seed, (1, 2, 3, 7, 20, 63, 64))
    late = packed.Late(4, 2, blocks)
    found = made(*offsets, totals, tokens, late)
    assert torch.equal(torch.stack([found.cu, found.other]), in_range(offsets, totals))
    tiles = runs_of_tiles(own, others, tokens, late)
    assert int(found.counter[0]) == 0
    assert int(found.ends[0]) == len(tiles)
    of_run = defaultdict(list)
    for at, (r, b, m) in enumerate(tiles):
        of_run[r, b].append((at, m))
    for at, (r, b, m) in enumerate(tiles):
        (place, first), many = of_run[r, b][0], len(of_run[r, b])
        assert place + m - first == at
        row = [b, place, first, many, *place_of(found, b, own, others)]
        assert found.table[at].tolist() == row


def test_drawn_sequences_have_all_kinds_of_runs() -> None:
    """Some are late and some not, and some have tiles in every run."""
    kinds = set()
    for seed, blocks in product(range(12), (1, 5, 132)):
        _, tokens, _, _, lengths = drawn(seed, (1, 2, 3, 7, 20, 63, 64))
        tiles = runs_of_tiles(lengths[0], lengths[1], tokens, packed.Late(4, 2, blocks))
        of: defaultdict[int, set[int]] = defaultdict(set)
        for r, b, _ in tiles:
            of[b].add(r)
        kinds |= {len(runs) for runs in of.values()}
        kinds |= {"partly late"} if len({max(runs) > 0 for runs in of.values()}) == 2 else set()
    assert {1, 2, 3, 4, "partly late"} <= kinds
