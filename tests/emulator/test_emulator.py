"""Faults of a kernel show on the emulator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from . import assembly, memory, products, threads, values
from .memory import Barriers, Descriptor, Shared, mbarrier
from .threads import Stuck

SOURCE = np.arange(64, dtype=np.float32).reshape(8, 8)

Partition = Callable[[Any, Any], None]


def run(*partitions: Partition) -> None:
    """Run a kernel of partitions that share two barriers and a buffer."""

    def kernel() -> None:
        barriers = Barriers(2)
        for n in range(2):
            mbarrier.init(barriers.index(n), 1)
        buffer = Shared(np.full((8, 8), np.nan, np.float32), values.float32)
        threads.warp_specialize([(one, (barriers, buffer)) for one in partitions], [], [])

    threads.run_blocks(kernel, 1)


def copy(barriers: Any, buffer: Any) -> None:
    full = barriers.index(0)
    mbarrier.expect(full, SOURCE.nbytes)
    memory.tma_load(Descriptor(SOURCE, [8, 8]), [0, 0], full, buffer)
    mbarrier.wait(full, 0)


def ones(x: float = 1.0) -> values.Tensor:
    return values.Tensor(np.full((8, 8), x))


def test_a_copy_has_landed_after_the_wait() -> None:
    found = []

    def read(barriers: Any, buffer: Any) -> None:
        mbarrier.wait(barriers.index(0), 0)
        found.append(buffer.load(None).a)

    run(copy, read)
    np.testing.assert_array_equal(found[0], SOURCE)


def test_a_copy_is_nan_before_the_wait() -> None:
    found = []
    for _ in range(5):
        run(copy, lambda _, buffer: found.append(buffer.a.copy()))
    assert any(np.isnan(a).any() for a in found)


def test_a_missing_arrival_is_a_deadlock_at_once() -> None:
    with pytest.raises(Stuck, match="waits for a barrier, phase 0"):
        run(lambda *_: None, lambda barriers, _: mbarrier.wait(barriers.index(1), 0))


def test_partitions_that_wait_for_each_other_are_a_deadlock() -> None:
    def wait_then_arrive(first: int, second: int) -> Partition:
        def partition(barriers: Any, _: Any) -> None:
            mbarrier.wait(barriers.index(first), 0)
            mbarrier.arrive(barriers.index(second))

        return partition

    with pytest.raises(Stuck, match=r"waits for .*; .* waits for"):
        run(wait_then_arrive(0, 1), wait_then_arrive(1, 0))


def test_a_poll_without_progress_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LIMIT", 0.2)
    place = values.Pointer(np.zeros(1, np.int32))

    def poll(*_: Any) -> None:
        while True:
            assembly.load_acquire([place], None)

    with pytest.raises(Stuck, match="polls without progress"):
        run(poll)


def test_a_seed_gives_the_same_order_again() -> None:
    def order(seed: int) -> list[int]:
        found: list[int] = []

        def step(n: int) -> Partition:
            def partition(*_: Any) -> None:
                for _ in range(10):
                    threads.pause_sometimes()
                    found.append(n)

            return partition

        random.seed(seed)
        run(*(step(n) for n in range(3)))
        return found

    orders = [order(seed) for seed in range(8)]
    assert orders == [order(seed) for seed in range(8)]
    assert len({tuple(one) for one in orders}) == 8


def test_a_store_between_a_load_and_a_store_is_seen() -> None:
    """Threads that add to a number without an atomic lose additions; with one they lose none."""
    sums = {}
    for atomic in (False, True):
        place = values.Pointer(np.zeros(1, np.int32))

        def add(*_: Any, atomic: bool = atomic, place: values.Pointer = place) -> None:
            for _ in range(100):
                if atomic:
                    values.atomic(lambda before, x: before + x)(place, 1)
                else:
                    values.store(place, values.load(place).a + 1)

        run(add, add)
        sums[atomic] = int(place.memory[0])
    assert sums[True] == 200
    assert sums[False] < 200


def test_an_arrival_too_many_raises() -> None:
    with pytest.raises(AssertionError, match="too many arrivals"):
        run(lambda barriers, _: mbarrier.arrive(barriers.index(1), count=2))


def test_a_barrier_that_is_not_initialised_raises() -> None:
    with pytest.raises(AssertionError, match="before it is initialised"):
        run(lambda *_: mbarrier.arrive(Barriers(1).index(0)))


def test_a_copy_from_before_its_tensor_raises() -> None:
    def partition(barriers: Any, buffer: Any) -> None:
        mbarrier.expect(barriers.index(0), SOURCE.nbytes)
        memory.tma_load(Descriptor(SOURCE, [8, 8]), [-8, 0], barriers.index(0), buffer)
        mbarrier.wait(barriers.index(0), 0)

    with pytest.raises(AssertionError, match="from before its tensor"):
        run(partition)


def test_a_product_reads_its_operands_as_late_as_the_wait() -> None:
    found = []

    def multiply(_: Any, buffer: Any) -> None:
        buffer.a[...] = 1.0
        product = products.warpgroup_mma(ones(), buffer, ones(0.0), is_async=True)
        buffer.a[...] = np.nan  # before the wait
        found.append(products.warpgroup_mma_wait(0, deps=[product]).a)

    for _ in range(20):
        run(multiply)
    assert any(np.isnan(a).any() for a in found)


def test_a_product_raises_if_it_is_used_before_the_wait() -> None:
    def multiply(_: Any, buffer: Any) -> None:
        product = products.warpgroup_mma(ones(), buffer, ones(), is_async=True)
        products.warpgroup_mma_wait(1, deps=[product])

    with pytest.raises(AssertionError, match="before it was waited for"):
        run(multiply)


def test_a_product_without_a_wait_raises() -> None:
    def multiply(_: Any, buffer: Any) -> None:
        products.warpgroup_mma(ones(), buffer, ones(), is_async=True)

    with pytest.raises(AssertionError, match="a product was never waited for"):
        run(multiply)


def test_a_store_without_a_wait_raises() -> None:
    def store(_: Any, buffer: Any) -> None:
        memory.tma_store(Descriptor(SOURCE.copy(), [8, 8]), [0, 0], buffer)

    with pytest.raises(AssertionError, match="a copy was never waited for"):
        run(store)


def test_inline_assembly_without_a_declared_meaning_raises() -> None:
    x = ones(0.5)
    got = assembly.inline_asm("tanh.approx.f32   $0, $1;", "=f,f", [x], values.float32)
    np.testing.assert_array_equal(got.a, np.tanh(x.a))
    for text in ("tanh.approx.f32 $0, $1; nop;", "ex2.approx.f32 $0, $1;", ""):
        with pytest.raises(NotImplementedError, match="declares no meaning"):
            assembly.inline_asm(text, "=f,f", [x], values.float32)


def test_a_reference_moves_past_its_threshold_alone() -> None:
    """A row moves to its quad's maximum where that exceeds the reference by more than 8."""
    peak = values.Tensor(np.array([[1, 2, 8, 3], [1, 9, 2, 8]], np.float32))
    m = values.Tensor(np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(
        assembly.move([peak, m], None).a, np.array([[0] * 4, [9] * 4], np.float32)
    )
    np.testing.assert_array_equal(  # 8 ln 2 is 5.5
        assembly.move_natural([peak, m], None).a, np.array([[8] * 4, [9] * 4], np.float32)
    )
