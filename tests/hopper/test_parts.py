"""Parts of the keys: over how many blocks a Hopper forward splits the keys of a tile."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from rowmax.call.inputs import Gap
from rowmax.call.problem import Problem
from rowmax.testing import Case
from tests import drawn

host = importlib.import_module("rowmax.gpu.hopper.host")
hopper = importlib.import_module("rowmax.gpu.hopper")
parts = importlib.import_module("rowmax.gpu.hopper.forward_parts")

CHUNK: dict[str, Any] = {"b": 1, "nq": 256, "nk": 8192, "hq": 8, "hk": 1, "d": 128, "causal": True}
LATENT: dict[str, Any] = {"b": 1, "nq": 1, "nk": 8192, "hq": 128, "hk": 1, "d": 576, "dv": 512}


def problem(**case: Any) -> Problem:
    return drawn.problem_of(Case("", **case), "bfloat16")


def chosen(**case: Any) -> int:
    return parts.parts_of(problem(**case), 132)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_few_tiles_are_split_over_all_processors(width: int) -> None:
    few = CHUNK | {"d": width}
    assert chosen(**few) == 8  # 16 tiles
    assert chosen(**few | {"nq": 512}) == 4
    assert chosen(**few | {"nq": 2048}) == 1
    assert parts.parts_of(problem(**few), 16) == 1


def test_a_latent_cache_is_split() -> None:
    assert 32 <= chosen(**LATENT) <= 64
    assert chosen(**LATENT | {"b": 32}) == 2
    assert chosen(**LATENT | {"nk": 256}) == 1  # merging would take longer


def test_a_tile_has_keys_in_every_part() -> None:
    """Full tiles are not masked, so none may stand for an empty part. Those of a prefix are."""
    square = problem(b=1, nq=1024, hq=2, d=128, causal=True)
    assert list(parts.parts_to_choose(square, 132)) == [1]
    ahead = problem(b=1, nq=256, nk=640, hq=2, d=128, causal=True)
    assert list(parts.parts_to_choose(ahead, 132)) == [1, 2, 3, 4]
    narrow = problem(b=1, nq=64, nk=4096, hq=2, d=128, left=100, right=0)
    assert max(parts.parts_to_choose(narrow, 132)) == 2
    prefix = problem(b=1, nq=256, nk=640, hq=2, d=128, causal=True, lengths=(0.5,))
    assert list(parts.parts_to_choose(prefix, 132)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "other",
    [
        {"bias": "1hqk"},
        {"documents": "sorted"},
        {"d": 400, "dv": 328, "bias": "1h1k"},
        {"d": 64, "dv": 400},
        {"sequences": ((256, 8192),)},
    ],
    ids=str,
)
def test_calls_that_are_not_split(other: dict[str, Any]) -> None:
    assert list(parts.parts_to_choose(problem(**CHUNK | other), 132)) == [1]


@pytest.mark.parametrize("none", ["batch", "nq", "nk", "hq"])
def test_a_call_of_nothing_is_not_split(none: str) -> None:
    assert parts.parts_of(problem(**CHUNK)._replace(**{none: 0}), 132) == 1


def test_queries_before_a_gap_are_not_split() -> None:
    call = problem(**CHUNK)
    assert parts.parts_of(call._replace(gap=Gap(128, 64)), 132) == 1


def test_few_queries_of_many_keys_are_taken_from_triton() -> None:
    one = {"b": 1, "nq": 1, "hq": 32, "hk": 8, "d": 128}
    assert not parts.takes_few(problem(**one, nk=32768))
    assert parts.takes_few(problem(**one, nk=65536))
    assert parts.takes_few(problem(**one | {"nq": 16}, nk=4096))
    assert not parts.takes_few(problem(**one | {"nq": 16}, nk=2048))
    assert not parts.takes_few(problem(**one | {"nq": 16}, nk=4096, bias="1h1k"))
    assert not parts.takes_few(problem(**one | {"nq": 16}, nk=4096, lengths=(0.5,)))
    assert parts.takes_few(problem(**LATENT | {"nk": 512}, lengths=(0.5,)))
    few = problem(**one, nk=32768)
    assert hopper.defers(few, "forward") == "few queries: triton reads their keys in 32 parts"
    assert hopper.defers(problem(**one, nk=65536), "forward") is None


def test_explain_states_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "processors", lambda _: 132)
    note = "the keys of a tile in 8 parts, which a launch merges"
    assert host.note_of_parts(problem(**CHUNK)) == note
    assert host.note_of_parts(problem(**CHUNK | {"nq": 2048})) is None
    long = problem(b=1, nq=256, nk=1 << 17, hq=8, hk=1, d=64)
    assert host.note_of_tile(long) is None  # parts have tiles of two warpgroups
    assert host.note_of_maxima(long) is None
