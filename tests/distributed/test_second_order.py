"""Data parallelism of a loss with tangents and second derivatives."""

from __future__ import annotations

from typing import Any

import pytest

from . import second_order
from .world import RankError


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("tangents", [False, True], ids=["penalty", "tangents"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_is_that_of_one_process(world: Any, kind: str, tangents: bool) -> None:
    want = second_order.losses(0, "one", tangents, 1)
    for got in world(2).run(second_order.losses, kind, tangents, 2):
        assert got == pytest.approx(want, rel=1e-5)
    assert want[-1] < want[0]


def test_fsdp_that_frees_weights_between_two_backwards_raises(world: Any) -> None:
    """torch frees the weights after the first backward; the second must not read them."""
    with pytest.raises(RankError, match="out of bounds for storage of size 0"):
        world(2).run(second_order.losses, "fsdp, freed", False, 2)
