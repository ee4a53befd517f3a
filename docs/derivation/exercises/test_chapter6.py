"""Checks of chapter 6."""

from __future__ import annotations

import math
from itertools import product
from types import ModuleType

import pytest
import torch

import rowmax
from rowmax.rules import dropout


@pytest.mark.parametrize(("left", "right"), [(100, 0), (5, 0), (3, 9), (30, -12), (-2, 15)])
@pytest.mark.parametrize(("offset", "prefix"), [(0, 0), (0, 13), (6, 20), (-6, 3)])
def test_tile_kind(answers: ModuleType, left: int, right: int, offset: int, prefix: int) -> None:
    """Every tile has the kind that its pairs have."""
    n, size = 36, 8
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = (j >= i + offset - left) & ((j <= i + offset + right) | (j < prefix))
    for i0, j0 in product(range(0, n, size), repeat=2):
        pairs = seen[i0 : i0 + size, j0 : j0 + size]
        tile = answers.Tile(i0, i0 + len(pairs) - 1, j0, j0 + pairs.shape[1] - 1)
        found = answers.tile_kind(tile, offset, left, right, prefix)
        assert found == int(pairs.any()) + int(pairs.all())


@pytest.mark.parametrize("sink", [0.4, 90.0, -math.inf])
def test_with_sink(answers: ModuleType, sink: float) -> None:
    """The rows are those of rowmax's dense reference, also those without keys."""
    torch.manual_seed(0)
    q = torch.randn(1, 9, 1, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64) for _ in "kv")
    logit = torch.tensor([sink], dtype=torch.float64)
    calls = [
        rowmax.attention(q, k, v, causal=True, sink=s, backend="reference", return_lse=True)
        for s in (None, logit)
    ]
    (out, lse), (want, want_lse) = ((out[0, :, 0], lse[0, 0]) for out, lse in calls)
    assert (lse == -math.inf).sum() == 4
    found, found_lse = answers.with_sink(out, lse, logit[0])
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(found_lse, want_lse)


@pytest.mark.parametrize(("i0", "i1", "j0", "j1"), [(0, 3, 0, 63), (5, 7, 40, 200), (2, 2, 17, 19)])
def test_kept(answers: ModuleType, i0: int, i1: int, j0: int, j1: int) -> None:
    """The decisions are those of rowmax, of one call a counter."""
    key, threshold, calls = (123, 45), 20000, []

    def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
        calls.append(counter)
        words = dropout.philox(tuple(torch.tensor(c) for c in counter), key)
        return tuple(int(word) for word in words)

    found = answers.kept(philox, key, answers.Tile(i0, i1, j0, j1), threshold)
    rows, cols = torch.arange(i0, i1 + 1)[:, None], torch.arange(j0, j1 + 1)
    seed, zero = torch.tensor(key[0] + (key[1] << 32)), torch.tensor(0)
    assert found == dropout.keep_tile(seed, zero, zero, rows, cols, threshold).tolist()
    assert (
        len(calls)
        == len(set(calls))
        == len(rows) * len({8 * (j // 64) + j % 8 for j in cols.tolist()})
    )
