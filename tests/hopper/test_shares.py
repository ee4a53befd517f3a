"""Shares of a group: how many blocks sum dk and dv of a tile of keys in a Hopper backward."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from rowmax.call.problem import Problem
from rowmax.testing import Case
from tests import drawn

plans = importlib.import_module("rowmax.gpu.hopper.backward_plan")
shares = importlib.import_module("rowmax.gpu.hopper.backward_shares")
tiles = importlib.import_module("rowmax.gpu.hopper.backward_tiles")


def problem(**case: Any) -> Problem:
    return drawn.problem_of(Case("", **case), "bfloat16")


def chosen(p: Problem, processors: int = 132) -> int:
    by_keys = [tile for tile in tiles.tiles_of(p, False) if not tile.QUERIES_RESIDENT]
    return shares.shares_of(p, by_keys[0], processors)


@pytest.mark.parametrize("width", [64, 128, 192, 256, 512])
def test_few_tiles_are_shared_by_all_processors(width: int) -> None:
    few = problem(b=1, nq=2048, hq=8, hk=1, d=width, causal=True)
    assert chosen(few) == 8
    assert chosen(few, 1) == 1 + (width == 128)  # 8 heads of 128 crowd the cache
    many = problem(b=8, nq=2048, hq=32, hk=8, d=width, causal=True)
    assert chosen(many) == 1


def test_a_bias_and_heads_of_their_own_are_not_shared() -> None:
    few = {"b": 1, "nq": 256, "hq": 8, "d": 64}
    assert chosen(problem(**few, hk=1)) == 8
    assert chosen(problem(**few, hk=1, bias="1hqk")) == 1
    assert chosen(problem(**few, hk=8)) == 1


def test_long_groups_under_a_diagonal_are_divided() -> None:
    """The cache has no room for all heads of a group; in order these go abreast."""
    long = {"b": 1, "nq": 16384, "hq": 32, "hk": 4, "d": 128}
    assert chosen(problem(**long, causal=True)) == 4
    assert chosen(problem(**long, causal=True, deterministic=True)) == 1
    assert chosen(problem(**long)) == 1


def test_explain_states_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "processors", lambda _: 132)
    few = problem(b=1, nq=8192, hq=8, hk=1, d=128, causal=True)
    note = "8 query heads of a kv head in 4 shares, parts that a launch adds"
    assert plans.note_of_shares(few) == note
    assert plans.note_of_shares(problem(b=8, nq=2048, hq=8, hk=8, d=128)) is None


def test_shares_divide_a_group_and_no_other_number_takes_less_time() -> None:
    draw = random.Random(0)
    several = 0
    for _ in range(60):
        hk, group = draw.randint(1, 4), draw.choice([2, 3, 4, 6, 7, 8])
        width = draw.choice([32, 64, 96, 128, 256])
        case: dict[str, Any] = {"hq": hk * group, "hk": hk, "d": width}
        if draw.random() < 0.3:
            case["sequences"] = tuple((n, n) for n in draw.choices(range(1, 3000), k=3))
        else:
            case |= {"b": draw.randint(1, 4), "nq": draw.randint(1, 4000)}
        p = problem(**case, causal=draw.random() < 0.5)
        found = chosen(p)
        assert p.group % found == 0
        tile = next(tile for tile in tiles.tiles_of(p, False) if not tile.QUERIES_RESIDENT)
        times = {n: shares._time(p, tile, n, 132) for n in shares.shares_to_choose(p)}
        assert times[found] == min(times.values())
        several += found > 1
    assert 10 < several < 60
