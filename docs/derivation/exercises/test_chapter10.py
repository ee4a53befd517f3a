"""Checks of chapter 10."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_waits(answers: ModuleType, stages: int) -> None:
    """Each wait blocks until the phase before has ended, and passes after it."""
    full, empty = [0] * stages, [0] * stages  # phases
    for n in range(5 * stages):
        buffer, consumer, producer = answers.waits(n, stages)
        assert buffer == n % stages
        assert empty[buffer] % 2 != producer  # free: never used, or released
        assert full[buffer] % 2 == consumer  # the copy is in flight
        full[buffer] += 1
        assert full[buffer] % 2 != consumer
        _, _, later = answers.waits(n + stages, stages)
        assert empty[buffer] % 2 == later  # in use
        empty[buffer] += 1


@pytest.mark.parametrize("times", [(2.0, 1.0, 2.0), (1.0, 3.0, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_finished(answers: ModuleType, steps: int, times: tuple[float, float, float]) -> None:
    """The times are those of a simulation of the two units."""
    scores, softmax, output = times
    unit = threads = 0.0
    for n in range(steps):
        unit = max(unit, threads) + scores
        threads = unit + softmax
        if n:
            unit += output
        threads = max(threads, unit)
    assert answers.finished(steps, *times, True) == threads + output
    assert answers.finished(steps, *times, False) == steps * sum(times)


@pytest.mark.parametrize(
    ("d", "stages", "registers", "want"),
    [
        (64, 2, 240, 240),
        (64, 3, 240, 240),
        (128, 2, 240, 192),
        (128, 3, 240, 128),
        (128, 2, 168, 96),
        (256, 2, 240, 80),
        (256, 1, 168, 16),
        (256, 1, 150, 0),
    ],
)
def test_most_keys(answers: ModuleType, d: int, stages: int, registers: int, want: int) -> None:
    """The tile fits, and one of 16 keys more does not."""
    assert answers.most_keys(d, stages, registers) == want
