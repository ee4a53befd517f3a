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


def sums(row: list[float]) -> tuple[float, float]:
    """Return the maximum and the sum of a row."""
    m = max(row)
    return m, sum(math.exp(x - m) for x in row)


@pytest.mark.parametrize("row", [[3.0, 2.0, 5.0, 1.0], [3.0, 2.0, 5.0], [0.0, 4.0, 9.0]])
def test_without_last(answers: ModuleType, row: list[float]) -> None:
    """The sum before the last score follows from the sum after it."""
    before, want = sums(row[:-1])
    got = answers.without_last(*sums(row), row[-1], before)
    assert math.isclose(got, want, rel_tol=1e-11)


@pytest.mark.parametrize("last", [100.0, 1000.0])
def test_without_last_of_a_lost_sum(answers: ModuleType, last: float) -> None:
    """A sum that rounding lost cannot return."""
    with pytest.raises(ValueError, match="m_before"):
        answers.without_last(*sums([0.0, 0.0, last]), last, 0.0)
