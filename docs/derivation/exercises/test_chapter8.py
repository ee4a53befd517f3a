"""Checks of chapter 8."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch


@pytest.mark.parametrize(("size", "scale"), [(1.0, 0.3), (50.0, 1.0), (3e38, 1.0), (3e38, 2.0)])
def test_softmax2(answers: ModuleType, size: float, scale: float) -> None:
    """The weights are those of float64."""
    torch.manual_seed(0)
    products = size * (2 * torch.rand(5, 9) - 1)
    want = torch.softmax(scale * products.double(), 1).float()
    torch.testing.assert_close(answers.softmax2(products, scale), want, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e6, 1e9, torch.finfo(torch.float32).min])
def test_weights_from(answers: ModuleType, shift: float) -> None:
    """The rows sum to 1, and the weights are the softmax of the rounded scores."""
    torch.manual_seed(0)
    scores = torch.randn(4, 100) + shift
    scores[1, 3:] = scores[3] = -math.inf
    lse = scores.logsumexp(1)
    want = torch.softmax(scores.double(), 1).float()
    want[3] = 0.0
    found = answers.weights_from(scores, lse)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0]), rtol=1e-5, atol=0)


def test_lagging(answers: ModuleType) -> None:
    """The average is the softmax's, and the reference moves only where it must."""
    torch.manual_seed(0)
    v = torch.randn(64, 3)
    for step, moves in ((0.0, 1), (0.6, 4), (2.0, 8), (-1.0, 1)):
        x = torch.rand(64) + step * torch.arange(64)
        found, count = answers.lagging(x, v, 8)
        want = torch.softmax(x.double() * math.log(2), 0) @ v.double()
        torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-6)
        assert count == moves
