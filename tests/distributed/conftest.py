"""Give tests the worlds of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .world import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """Return a function that returns the world of a size, started at its first use."""
    worlds: dict[int, World] = {}

    def of(size: int) -> World:
        if size not in worlds:
            worlds[size] = World(size)
        return worlds[size]

    yield of
    for one in worlds.values():
        one.close()
