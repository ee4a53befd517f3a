"""Shard and unshard: inverse, and each other's derivative."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from . import programs, sharding_programs
from .world import World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", programs.LAYOUTS)
def test_unshard_joins_what_shard_cuts(kind: str, size: int, world: Worlds) -> None:
    assert all(world(size).run(sharding_programs.round_trips, kind, size))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", programs.LAYOUTS)
def test_each_is_the_adjoint_of_the_other(kind: str, size: int, world: Worlds) -> None:
    """The sum over ranks of <shard(x), y> is <x, unshard(y)>, by derivatives in both modes too."""
    parts = world(size).run(sharding_programs.dot_products, kind, size)
    whole = {part.pop("whole") for part in parts}
    assert len(whole) == 1  # equal on every rank
    want = whole.pop()
    for name in ("shards", "tangents"):
        assert sum(part[name] for part in parts) == pytest.approx(want, rel=1e-12)
    for part in parts:
        assert part["gradient of shard"]
        assert part["gradient of unshard"]
        assert part["second derivative"]


def test_wrong_values(world: Worlds) -> None:
    parts = world(2).run(sharding_programs.wrong_shards)
    assert parts[0] == [
        "layout: got 3 ranks; want those of the group, 2",
        "x: got 7 rows; want 8, as the layout has",
        "x: got 7 rows on rank 0; want 4, as the layout has",
        "x: got list; want a tensor",
        "layout: got str; want a Layout",
        "dim: got 3; want an axis of x, which has 2",
        "mesh: got 3 dimensions; want one or two, such as mesh['heads'] or mesh['keys', 'heads']",
        "mesh: got str; want a DeviceMesh of one dimension or two, a ProcessGroup, or None for the "
        "default group",
    ]
    assert parts[1][:2] == parts[0][:2]


def test_ranks_with_other_sizes_raise_alike(world: Worlds) -> None:
    texts = world(2).run(sharding_programs.unlike_shards)
    assert texts[0] == texts[1]
    assert "x: got torch.float32 [3] without its rows on rank 0 and torch.float32 [4]" in texts[0]


def test_one_process_needs_no_launcher() -> None:
    """Without a group, the error says what to call."""
    from rowmax import distributed as rd

    with pytest.raises(ValueError, match="mesh: got None without a default group; want"):
        rd.shard(torch.zeros(1, 8), rd.Layout.zigzag(8, 1))
