"""Errors are the same on all ranks and come before rows move; no rank waits without end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from . import agreement_programs
from .world import RankError, World

Worlds = Callable[[int], World]

#: by the argument that is wrong on one rank: the error of that rank
LOCAL = {
    "q": "q: got 127 rows on rank 0; want 128, as the layout has",
    "k": "k: got torch.float64; want the dtype of q, torch.float32",
    "bias": "bias: got shape [128, 3]; want one that broadcasts to [B, Hq, Nq, Nk] = "
    "[1, 2, 128, 384]",
    "causal": "causal: got 1; want True or False",
    "unexpected": "attention() got an unexpected keyword argument 'is_causal'; want causal=True "
    "(aligned bottom-right: the last query sees every key)",
    "strategy": "strategy: got 'rings'; want one of 'auto', 'keys', 'heads'",
    "backend": "backend: got 'hopper'; it cannot take this forward: hopper: it runs on cuda, the "
    "tensors are on cpu",
    "mask": "mask: Documents(ids=): got shape [1, 5]; want [384] or [1, 384]",
}


@pytest.mark.parametrize("name", LOCAL)
def test_an_error_of_one_rank_reaches_all(name: str, world: Worlds) -> None:
    own, *others = world(3).run(agreement_programs.refused, "local", name, 0)
    assert own.startswith(LOCAL[name])
    assert others == [f"rowmax.distributed: rank 0 refused this call: {own}"] * 2


@pytest.mark.parametrize("name", sorted(set(LOCAL) - {"backend"}))
def test_a_call_that_is_not_checked_again_hides_no_error(name: str, world: Worlds) -> None:
    for checks, text in world(3).run(agreement_programs.refused_later, name):
        assert checks == 2  # one of each strategy
        assert text.partition(":")[0] == LOCAL[name].partition(":")[0]


@pytest.mark.parametrize("name", LOCAL)
def test_an_error_of_all_ranks_is_their_own(name: str, world: Worlds) -> None:
    for rank, text in enumerate(world(3).run(agreement_programs.refused, "local", name, None)):
        assert text.partition(":")[0] == LOCAL[name].partition(":")[0], rank
        assert "refused this call" not in text


@pytest.mark.parametrize("name", agreement_programs._UNLIKE)
def test_arguments_that_differ_are_named_on_all_ranks(name: str, world: Worlds) -> None:
    texts = world(3).run(agreement_programs.refused, "unlike", name, 1)
    assert texts == [texts[0]] * 3
    assert texts[0].startswith("rowmax.distributed: ranks differ. ")
    assert f"{name}: got " in texts[0]
    assert " on ranks 0, 2 and " in texts[0]
    assert " on rank 1; want the same on every rank" in texts[0]


@pytest.mark.parametrize("strategy", ["keys", "queries", "heads"])
def test_a_named_backend_checks_the_whole_call(strategy: str, world: Worlds) -> None:
    """And its gradients, unless heads are distributed: by "queries" those of a part of the keys."""
    facts = ("torch", strategy == "queries", 64, 64, (1, 2, 64, 1))
    each = (strategy != "heads", False)
    want = [(*facts, False, False, False, wanted, False, False) for wanted in each]
    assert world(2).run(agreement_programs.named, strategy) == [want, want]


def test_other_functions_are_named(world: Worlds) -> None:
    texts = world(3).run(agreement_programs.other_functions)
    assert texts == [texts[0]] * 3
    want = "call: got forward on ranks 0, 2 and unshard along 1 on rank 1; want the same"
    assert texts[0].startswith(f"rowmax.distributed: ranks differ. {want}")


def test_a_call_after_an_error_is_right(world: Worlds) -> None:
    world(3).run(agreement_programs.refused, "unlike", "scale", 2)
    assert world(3).run(agreement_programs.refused, "unlike", "scale", None) == ["no error"] * 3


def test_gradients_that_differ(world: Worlds) -> None:
    texts = world(3).run(agreement_programs.unlike_gradients)
    assert texts == [texts[0]] * 3
    assert "requires_grad of k or v: got True on ranks 0, 2 and False on rank 1" in texts[0]


@pytest.mark.parametrize(
    ("way", "shape"),
    [("first call", ()), ("later call", ()), ("raises", ()), ("within", ()), ("within", (2, 2))],
)
def test_a_rank_that_ends_or_raises_ends_the_others(way: str, shape: tuple[int, ...]) -> None:
    """The others raise after the time limit of the group at the latest, here 4 seconds.

    One that raises between stages is a test of stages.
    """
    world = World(4 if shape else 3, timeout=4.0)
    try:
        began = time.monotonic()
        world.start(agreement_programs.killed, way, shape)
        for rank in range(world.size):
            if rank == 1:
                continue
            text = world.result(rank, wait=30.0)
            assert not isinstance(text, RankError), text
            assert text != "no error"
        assert time.monotonic() - began < 25.0
    finally:
        world.close()


@pytest.mark.parametrize(
    ("size", "way", "shape"), [(3, "collectives", ()), (3, "shared", ()), (4, "shared", (2, 2))]
)
def test_a_rank_that_is_late_changes_no_bit(
    size: int, way: str, shape: tuple[int, ...], world: Worlds
) -> None:
    assert all(world(size).run(agreement_programs.late, 15, way, shape))
