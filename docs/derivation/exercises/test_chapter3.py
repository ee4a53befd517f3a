"""Checks of chapter 3."""

from __future__ import annotations

import math
from itertools import permutations
from types import ModuleType

import pytest
import torch

INF = math.inf
PAIRS = [(3.0, 1.5), (-2.0, 4.0), (900.0, 1.0), (-INF, 0.0)]


def test_combine(answers: ModuleType) -> None:
    """Every order and grouping of four pairs gives the maximum and the sum."""
    total = sum(math.exp(m - 900.0) * z for m, z in PAIRS)
    for a, b, c, d in permutations(PAIRS):
        chain = answers.combine(answers.combine(answers.combine(a, b), c), d)
        tree = answers.combine(answers.combine(a, b), answers.combine(c, d))
        for m, z in (chain, tree):
            assert m == 900.0
            assert math.isclose(z, total, rel_tol=1e-14)


def test_combine_small_pairs(answers: ModuleType) -> None:
    """No term is lost where the maxima are near."""
    m, z = answers.combine((1.0, 2.0), (2.0, 3.0))
    assert m == 2.0
    assert math.isclose(z, 2.0 * math.exp(-1.0) + 3.0, rel_tol=1e-14)


def test_combine_empty_pairs(answers: ModuleType) -> None:
    """Nothing and nothing is nothing."""
    assert answers.combine((-INF, 0.0), (-INF, 0.0)) == (-INF, 0.0)


@pytest.mark.parametrize("block", [1, 7, 16, 50, 64])
def test_block_softmax(answers: ModuleType, block: int) -> None:
    """The weights are those of torch, also where first blocks are masked."""
    torch.manual_seed(0)
    x = 5 * torch.randn(6, 50, dtype=torch.float64)
    x[2, :30] = -INF
    x[3, 40:] = -INF
    x[4] += 1000.0
    got = answers.block_softmax(x, block)
    torch.testing.assert_close(got, torch.softmax(x, 1), rtol=1e-12, atol=0)


def test_block_softmax_of_an_empty_row(answers: ModuleType) -> None:
    """A row of minus infinity has no weights."""
    x = torch.full((2, 8), -INF)
    x[0, 5] = 1.0
    want = torch.zeros(2, 8)
    want[0, 5] = 1.0
    assert torch.equal(answers.block_softmax(x, 3), want)


def test_merge(answers: ModuleType) -> None:
    """Two parts of the keys give the attention over all, also where one or both are empty."""
    torch.manual_seed(0)
    scores = 3 * torch.randn(5, 20, dtype=torch.float64)
    scores[1, :8], scores[2, 8:], scores[3] = -INF, -INF, -INF
    scores[4] += 2000.0
    v = torch.randn(20, 3, dtype=torch.float64)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        lse = scores[:, keys].logsumexp(1)
        weights = torch.exp(scores[:, keys] - lse.masked_fill(lse == -INF, 0.0)[:, None])
        return weights @ v[keys], lse

    got = answers.merge(*part(slice(0, 8)), *part(slice(8, 20)))
    for mine, want in zip(got, part(slice(0, 20)), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)
