"""The machine is as unkind as it says: what is wrong in a kernel shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import machine
from .machine import Bars, Descriptor, Shared, Stuck, mbarrier


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIMIT", 0.5)


SOURCE = np.arange(64, dtype=np.float32).reshape(8, 8)


def two(first: Any, second: Any) -> None:
    """Run a kernel of two partitions over a barrier and a buffer."""

    def kernel() -> None:
        bars = Bars(2)
        for n in range(2):
            mbarrier.init(bars.index(n), 1)
        buffer = Shared(np.full((8, 8), np.nan, np.float32), machine.float32)
        machine.warp_specialize([(first, (bars, buffer)), (second, (bars, buffer))], [], [])

    machine.run(kernel, 1)


def copying(bars: Any, buffer: Any) -> None:
    bar = bars.index(0)
    mbarrier.expect(bar, SOURCE.nbytes)
    machine.tma_load(Descriptor(SOURCE, [8, 8]), [0, 0], bar, buffer)
    mbarrier.wait(bar, 0)


def test_what_was_waited_for_is_there() -> None:
    found = []

    def reading(bars: Any, buffer: Any) -> None:
        mbarrier.wait(bars.index(0), 0)
        found.append(buffer.load(None).a)

    two(copying, reading)
    np.testing.assert_array_equal(found[0], SOURCE)


def test_what_was_not_waited_for_is_nan() -> None:
    found = []

    def reading(bars: Any, buffer: Any) -> None:
        found.append(buffer.a.copy())

    for _ in range(5):
        two(copying, reading)
    assert any(np.isnan(a).any() for a in found)


def test_an_arrival_that_is_missing_is_a_hang() -> None:
    with pytest.raises(Stuck, match="waits for a barrier"):
        two(lambda *_: None, lambda bars, _: mbarrier.wait(bars.index(1), 0))


def test_an_arrival_too_many() -> None:
    def arriving(bars: Any, _: Any) -> None:
        mbarrier.arrive(bars.index(1), count=2)

    with pytest.raises(AssertionError, match="too many arrivals"):
        two(arriving, lambda *_: None)


def test_a_product_is_made_of_what_its_operands_hold_when_it_is_waited_for() -> None:
    found = []

    def multiplying(_: Any, buffer: Any) -> None:
        buffer.a[...] = 1.0
        a, zero = machine.Tensor(np.ones((8, 8))), machine.Tensor(np.zeros((8, 8)))
        product = machine.warpgroup_mma(a, buffer, zero, is_async=True)
        buffer.a[...] = np.nan  # let go of too early
        found.append(machine.warpgroup_mma_wait(0, deps=[product]).a)

    for _ in range(20):
        two(multiplying, lambda *_: None)
    assert any(np.isnan(a).any() for a in found)


def test_a_product_is_not_used_before_it_was_waited_for() -> None:
    def using(_: Any, buffer: Any) -> None:
        buffer.a[...] = 1.0
        a = machine.Tensor(np.ones((8, 8)))
        first = machine.warpgroup_mma(a, buffer, a, is_async=True)
        machine.warpgroup_mma_wait(1, deps=[first])

    with pytest.raises(AssertionError, match="before it was waited for"):
        two(using, lambda *_: None)


def test_a_store_that_nobody_waits_for() -> None:
    def storing(_: Any, buffer: Any) -> None:
        machine.tma_store(Descriptor(SOURCE.copy(), [8, 8]), [0, 0], buffer)

    with pytest.raises(AssertionError, match="never waited for"):
        two(storing, lambda *_: None)
