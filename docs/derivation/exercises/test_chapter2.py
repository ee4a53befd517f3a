"""Checks of chapter 2."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

INF = math.inf
ROWS = [
    [3.0, 2.0, 5.0, 1.0],
    [7.0],
    [1000.0, 1001.0, 999.0],
    [-3e38, 3e38],
    [-INF, 0.5, -INF, 1.5],
    [-INF, -INF, 2.0],
]


def softmax(row: list[float]) -> torch.Tensor:
    """Return torch's softmax in float64."""
    return torch.softmax(torch.tensor(row, dtype=torch.float64), 0)


@pytest.mark.parametrize("row", ROWS)
def test_online_softmax(answers: ModuleType, row: list[float]) -> None:
    """The weights are those of torch."""
    got = torch.tensor(answers.online_softmax(row), dtype=torch.float64)
    torch.testing.assert_close(got, softmax(row), rtol=1e-14, atol=0)


def test_online_softmax_without_keys(answers: ModuleType) -> None:
    """A row of minus infinity has no weights."""
    assert answers.online_softmax([-INF, -INF]) == [0.0, 0.0]


@pytest.mark.parametrize("row", ROWS)
def test_online_average(answers: ModuleType, row: list[float]) -> None:
    """The average is the product of the weights and the values."""
    torch.manual_seed(0)
    v = torch.randn(len(row), 3, dtype=torch.float64)
    torch.testing.assert_close(answers.online_average(row, v), softmax(row) @ v)


def test_online_average_without_keys(answers: ModuleType) -> None:
    """The average of nothing is 0."""
    assert torch.equal(answers.online_average([-INF, -INF], torch.ones(2, 3)), torch.zeros(3))


@pytest.mark.parametrize("row", [[3.0, 2.0, 5.0, 1.0], [3.0, 2.0, 5.0], [0.0, 0.0, 600.0]])
def test_without_last(answers: ModuleType, row: list[float]) -> None:
    """The sum before the last score follows from the sum after it."""
    before, m = max(row[:-1]), max(row)
    l_before, l = (sum(math.exp(x - top) for x in part) for part, top in ((row[:-1], before), (row, m)))
    if row[-1] < 100:
        got = answers.without_last(m, l, row[-1], before)
        assert math.isclose(got, l_before, rel_tol=1e-12)
    else:  # the sum of the others is lost in rounding, though the factor is not 0
        assert answers.without_last(m, l, row[-1], before) == 0.0


def test_without_last_of_a_lost_sum(answers: ModuleType) -> None:
    """A factor of 0 has no inverse."""
    with pytest.raises(ValueError, match="m_before"):
        answers.without_last(1000.0, 1.0, 1000.0, 0.0)
