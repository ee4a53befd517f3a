"""The order of packed tiles, made in Triton's interpreter, against the same in Python."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rowmax.gpu.hopper import documents, packed
from tests.hopper.packed_calls import in_range

pytestmark = pytest.mark.skipif(
    not documents._is_interpreted(), reason="needs TRITON_INTERPRET=1 before triton is imported"
)


def made(cu: Tensor, other: Tensor, totals: tuple[int, int], tokens: int) -> packed.Order:
    """Return the order, made by the kernel in the interpreter, in memory that is not 0."""
    batch, most = cu.shape[0] - 1, totals[0] // tokens + cu.shape[0] - 1
    words = torch.full([packed.HEADER + 3 * batch + most + 2], -7, dtype=torch.int32)
    t = packed.Pointers(words, cu, other)
    n = packed.Numbers(batch, most, *totals)
    packed._place[(batch + 1,)](t, n, packed.HEADER, tokens, packed._CHUNK)  # pyright: ignore
    ranged = words[packed.HEADER + batch + most :]
    cu, rest = ranged[: batch + 1], ranged[batch + 1 :]
    return packed.Order(words, words[1:], words[packed.HEADER :], cu, rest)


@pytest.mark.parametrize("seed", range(8))
def test_sequences_with_most_pairs_come_first_float32(seed: int) -> None:
    """More sequences than a step of 64, empty ones, equal ones, and offsets out of order.

    The pairs of long ones are more than 2^32.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, tokens = rng.choice((1, 3, 64, 65, 130)), rng.choice((16, 128))
    most = rng.choice((2, 40, 500)) if batch > 3 else 200_000
    sizes = torch.randint(0, most, (2, batch))
    offsets = torch.cat([torch.zeros(2, 1, dtype=torch.int64), sizes.cumsum(1)], 1).int()
    if rng.random() < 0.3:
        offsets += torch.randint(-30, 30, offsets.shape, dtype=torch.int32)
    totals = max(1, int(sizes[0].sum())), max(1, int(sizes[1].sum()))
    found = made(*offsets, totals, tokens)
    cu = in_range(offsets, totals)
    assert torch.equal(torch.stack([found.cu, found.other]), cu)
    own, others = ([b - a for a, b in pairwise(row.tolist())] for row in cu)
    order = sorted(range(batch), key=lambda b: (-own[b] * others[b], -own[b], b))
    tiles = [b for b in order for _ in range(-(-own[b] // tokens))]
    assert int(found.counter[0]) == 0
    assert int(found.ends[0]) == len(tiles)
    assert found.table[batch : batch + len(tiles)].tolist() == tiles
    for b in set(tiles):
        assert int(found.table[b]) == tiles.index(b)
