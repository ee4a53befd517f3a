"""Random calls across ranks are right; the search over them finds what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.ranks import Rank
from rowmax.distributed import Layout
from rowmax.testing import Answer, Case
from tests.drawn import Drawn

from . import drawn
from .world import World

Worlds = Callable[[int], World]
BUDGET = 8000
CPU = torch.device("cpu")
PLAIN = drawn.Spread(
    Drawn(Case("plain", b=1, nq=60, nk=90, hq=2, hk=1, d=16), "float32", 5),
    "0:7,30:60/7:30",
    "0:90/",
    "keys",
    backend="torch",
)


def some(ranks: int, seeds: range) -> list[drawn.Spread]:
    """Return a few calls of each seed."""
    found = []
    for seed in seeds:
        dtype = drawn.DTYPES[seed % len(drawn.DTYPES)]
        found += list(islice(drawn.spreads(seed, ranks, dtype, ("torch",), BUDGET), 3))
    return found


def results(rank: int, ranks: int, calls: list[drawn.Spread]) -> list[str]:
    """Return the kind of each result; a call that is wrong with it."""
    own = Rank(rank, ranks, CPU, {})
    found = []
    for one in calls:
        kind, texts = drawn.judged(own, one)
        found.append(f"wrong: {texts} {one.as_json()}" if kind == "wrong" else kind)
    return found


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(8)), (3, range(100, 106)), (4, range(4))])
def test_drawn_calls_are_right(ranks: int, seeds: range, world: Worlds) -> None:
    found, *others = world(ranks).run(results, ranks, some(ranks, seeds))
    assert all(other == found for other in others)
    kinds = Counter(found)
    assert set(kinds) <= {"right", "refused"}
    assert kinds["refused"] <= len(found) // 4


def with_a_mistake(rank: int, ranks: int) -> list[str]:
    """Return what is wrong with a call whose last rank has other rows."""
    real = drawn.prepared

    def mistaken(*given: Any) -> Callable[..., Answer]:
        answer = real(*given)

        def other(factor: float = 1.0) -> Answer:
            own = answer(factor)
            return replace(own, out=own.out + (rank == ranks - 1))

        return other

    with mock.patch.object(drawn, "prepared", mistaken):
        return drawn.wrong(Rank(rank, ranks, CPU, {}), PLAIN)


def test_a_mistake_of_one_rank_is_found(world: Worlds) -> None:
    for texts in world(2).run(with_a_mistake, 2):
        assert len(texts) == 1
        assert texts[0].startswith("out:")


def test_no_sequences_are_a_call(world: Worlds) -> None:
    case = Case("none", sequences=(), causal=True, hk=2, d=16)
    one = drawn.Spread(Drawn(case, "float32", 0), "/", "/", "keys", backend="torch")
    assert world(2).run(results, 2, [one]) == [["right"]] * 2


def test_a_call_is_made_again_from_its_text() -> None:
    calls = some(4, range(20, 40))
    assert [drawn.spread_of(one.as_json()) for one in calls] == calls
    # layouts are equal by their texts alone
    for one in calls:
        assert [x.n for x in one.layouts] == drawn.rows_of(one.drawn.case)
        assert all(x.ranks == 4 for x in one.layouts)


def test_every_way_of_sharing_is_drawn() -> None:
    calls = some(4, range(60))
    for name, want in (
        ("strategy", {"auto", "keys", "heads", "queries"}),
        ("heads", {1, 2}),
        ("stages", {1, 2, 3}),
        ("apart", {False, True}),
        ("reduced", {False, True}),
        ("way", {"", "shared", "collectives"}),
    ):
        assert {getattr(one, name) for one in calls} == want
    assert any(one.queries != one.keys for one in calls)
    assert any(one.drawn.case.packed for one in calls)
    assert any(0 in Layout.parse(one.queries).lengths for one in calls)
