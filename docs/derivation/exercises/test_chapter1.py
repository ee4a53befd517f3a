"""Checks of chapter 1."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.mark.parametrize(("n", "d", "unit"), [(1, 1, 1), (512, 64, 2), (1000, 128, 4)])
def test_dense_bytes(answers: ModuleType, n: int, d: int, unit: int) -> None:
    """Six times N N, four times N D, and five columns of N."""
    assert answers.dense_bytes(n, d, unit) == unit * (6 * n * n + 4 * n * d + 5 * n)


@pytest.mark.parametrize(("rows", "tiles"), [(128, 8), (100, 11), (1000, 2), (1024, 1), (5000, 1)])
def test_tiled_bytes(answers: ModuleType, rows: int, tiles: int) -> None:
    """A last tile of a few rows reads as many keys as the others."""
    assert answers.tiled_bytes(1024, 64, rows, 2) == 2 * (2 + 2 * tiles) * 1024 * 64


def test_least_rows(answers: ModuleType) -> None:
    """The answer reaches the ridge, and 16 rows less do not."""

    def intensity(n: int, d: int, rows: int, unit: int) -> float:
        return 4 * n * n * d / (unit * (2 * n * d + -(-n // rows) * 2 * n * d))

    for n, d, unit, ridge in ((16384, 128, 2, 206.0), (16384, 64, 4, 12.5), (1024, 64, 2, 100.0)):
        rows = answers.least_rows(n, d, unit, ridge)
        assert rows % 16 == 0
        assert intensity(n, d, rows, unit) >= ridge
        assert rows == 16 or intensity(n, d, rows - 16, unit) < ridge


def test_least_rows_of_a_ridge_that_is_too_high(answers: ModuleType) -> None:
    """No tile of 128 positions has an intensity of 206."""
    assert answers.least_rows(128, 128, 2, 206.0) is None
