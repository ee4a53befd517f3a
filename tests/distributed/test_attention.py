"""Attention across ranks is that of one device: the table of cases, dropout, dtypes, options."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch

from rowmax.distributed.strategies import STRATEGIES
from rowmax.testing import (
    CASES,
    COVERING,
    Answer,
    Case,
    complaints,
    make,
)

from . import attention_programs, programs
from .references import reference
from .world import World

Worlds = Callable[[int], World]
SIZES = (2, 3, 4)
#: each case at two places of this list, one after the other
PLACES = tuple(product(SIZES, programs.LAYOUTS))
_next = cycle(PLACES)
COVERING_DENSE = [case for case in COVERING if not case.packed]
_ALSO = ("empty", "lengths", "documents", "window", "rows-nq=1-", "bias", "gqa", "mqa", "strides")
DENSE = [c for c in CASES if not c.packed and c not in COVERING_DENSE and c.name.startswith(_ALSO)]
#: chunks whose keys begin after the first one, end before the last one, or are none
CHUNKS = [
    Case("sink-window", b=1, nq=400, d=16, left=40, right=9, sink=True, dropout=0.2, alibi=True),
    Case("sink-window-longer-keys", nq=200, nk=500, hk=2, d=16, left=70, causal=True, sink=True),
    Case("sink-nothing-seen", nq=300, d=16, right=-150, sink=True, bias="1hqk"),
    Case("nothing-seen", nq=500, nk=200, d=16, left=30, right=-5, bias="b11k", documents="queries"),
    Case("prefix-window", nq=400, d=16, prefix=(0.4, 0.1), left=64, sink=True, lengths=(0.9, 0.5)),
]
TABLE = [(case, *next(_next)) for case in (*DENSE, *COVERING_DENSE)]
TABLE += [(case, *place) for case in CHUNKS for place in PLACES[::3]]
DOUBLE = [(case, *next(_next)) for case in COVERING_DENSE]
HEADS = [(case, *next(_next)) for case in COVERING_DENSE]
BY_QUERIES = [case for case in (*COVERING_DENSE, *CHUNKS) if case.align != "lengths"]
QUERIES = [(case, *next(_next)) for case in BY_QUERIES]
HALF = [
    (case, dtype, *next(_next))
    for dtype in (torch.float16, torch.bfloat16)
    for case in COVERING_DENSE[::3]
]


def _answer(
    world: World, case: Case, dtype: torch.dtype, kind: str, **overrides: Any
) -> tuple[Answer, list[Answer]]:
    parts = world.run(programs.own_answer, case, dtype, kind, world.size, overrides)
    queries, keys = programs.layouts(case, kind, world.size)
    return programs.whole_answer(make(case, dtype=dtype), queries, keys, parts), parts


def _check(world: World, case: Case, dtype: torch.dtype, kind: str, **overrides: Any) -> None:
    got, _ = _answer(world, case, dtype, kind, **overrides)
    wrong = complaints(got, reference(case, dtype))
    assert not wrong, "\n".join(wrong)


def _name(x: Any) -> str:
    return str(x)


@pytest.mark.parametrize(("case", "size", "kind"), TABLE, ids=_name)
def test_float32(case: Case, size: int, kind: str, world: Worlds) -> None:
    _check(world(size), case, torch.float32, kind, backend="torch")


@pytest.mark.parametrize(("case", "size", "kind"), DOUBLE, ids=_name)
def test_float64(case: Case, size: int, kind: str, world: Worlds) -> None:
    _check(world(size), case, torch.float64, kind, backend="torch")


@pytest.mark.parametrize(("case", "size", "kind"), HEADS, ids=_name)
def test_heads(case: Case, size: int, kind: str, world: Worlds) -> None:
    _check(world(size), case, torch.float32, kind, backend="torch", strategy="heads")


@pytest.mark.parametrize(("case", "size", "kind"), QUERIES, ids=_name)
def test_queries(case: Case, size: int, kind: str, world: Worlds) -> None:
    dtype = torch.float64 if size == 3 else torch.float32
    _check(world(size), case, dtype, kind, backend="torch", strategy="queries")


@pytest.mark.parametrize(("case", "dtype", "size", "kind"), HALF, ids=_name)
def test_half(case: Case, dtype: torch.dtype, size: int, kind: str, world: Worlds) -> None:
    _check(world(size), case, dtype, kind, backend="torch")
    if case in BY_QUERIES:
        _check(world(size), case, dtype, kind, backend="torch", strategy="queries")


FEATURES = Case(
    "features", b=2, nq=200, hk=2, d=16, left=90, causal=True, documents="sorted", sink=True,
    alibi=True, bias="1hqk", dropout=0.2,
)  # fmt: skip


def test_the_chosen_backend(world: Worlds) -> None:
    """Without a name the backend is that of the device, as on one."""
    _check(world(2), Case("plain", nq=200, hk=2), torch.float32, "zigzag")


def test_one_rank_is_one_device(world: Worlds) -> None:
    """Equal to the bit, and without any collective."""
    for case in (FEATURES, *COVERING_DENSE[:3]):
        assert world(1).run(attention_programs.one_rank, case) == [True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_knows_that_its_keys_are_a_part(strategy: str, world: Worlds) -> None:
    """Then no gradient is one of all keys in closed form, as that of a bias with one column."""
    case = Case("column", b=1, nq=200, d=16, bias="11q1")
    for known in world(2).run(attention_programs.parts_known, case, 2, strategy):
        assert known
        assert set(known) == {strategy == "queries"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "kind"), PLACES, ids=_name)
def test_dropout_keeps_the_set_of_one_device(
    size: int, kind: str, strategy: str, world: Worlds
) -> None:
    """With values that are a unit matrix, out is the weights: those of dropped pairs are 0."""
    case = Case("kept", b=2, nq=190, nk=230, hk=2, d=8, dv=230, dropout=0.4)
    call = attention_programs.with_unit_values(make(case))
    want = call(backend="torch")[0]
    assert 0.3 < (want == 0).float().mean() < 0.5
    parts = world(size).run(attention_programs.kept, case, kind, size, strategy)
    queries, _ = programs.layouts(case, kind, size)
    for rank, part in enumerate(parts):
        assert torch.equal(part, want[:, queries.positions(rank)] != 0)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("zigzag", "keys"), ("uneven", "keys"), ("zigzag", "heads"), ("uneven", "queries")],
)
def test_repeats_are_equal_to_the_bit(kind: str, strategy: str, world: Worlds) -> None:
    more = {"backend": "torch", "deterministic": True, "strategy": strategy}
    first, again = (_answer(world(3), FEATURES, torch.float32, kind, **more)[1] for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.out, b.out)
        for name, t in a.gradients.items():
            assert torch.equal(t, b.gradients[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicated_gradients_are_shares_or_sums(strategy: str, world: Worlds) -> None:
    case = Case("shared", nq=150, hk=2, d=16, causal=True, sink=True, alibi=True, bias="1h1k")
    want = reference(case, torch.float32)
    more = {"backend": "torch", "strategy": strategy}
    shares, sums = (
        _answer(world(3), case, torch.float32, "zigzag", reduce_replicated=flag, **more)[1]
        for flag in (False, True)
    )
    for name in ("sink", "alibi", "bias"):
        total = sum(part.gradients[name] for part in shares)
        for part in sums:
            assert torch.equal(part.gradients[name], sums[0].gradients[name])
            torch.testing.assert_close(part.gradients[name], total, rtol=1e-5, atol=1e-5)
            exact = want.ref.gradients[name].to(total.dtype)
            torch.testing.assert_close(part.gradients[name], exact, rtol=1e-4, atol=1e-4)
        whole = sums[0].gradients[name]
        assert not all(torch.allclose(p.gradients[name], whole, rtol=1e-2) for p in shares)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_own_rows_of_bias_are_not_summed(strategy: str, world: Worlds) -> None:
    """A rank with one query gives a bias of one row, too: other ranks say that rows are own."""
    case = Case("own", nq=150, bias="1hqk", d=16)
    more = {"backend": "torch", "reduce_replicated": True, "strategy": strategy}
    got, _ = _answer(world(3), case, torch.float32, "single", **more)
    assert not complaints(got, reference(case, torch.float32))


def test_a_seed_of_none_is_that_of_the_first_rank(world: Worlds) -> None:
    """Ranks draw different seeds; the results are those of one device with the first one's."""
    parts = world(3).run(attention_programs.drawn_seed, 3)
    assert len({int(seed) for seed, _, _ in parts}) == 3
    for _, whole, rows in parts:
        torch.testing.assert_close(rows, whole)


def test_some_gradients_alone(world: Worlds) -> None:
    """Each gradient is the same, whichever others are wanted."""
    for grads in (("q",), ("v",), ("k", "sink"), ("bias",)):
        case = Case("alone", nq=150, hk=2, d=16, causal=True, sink=True, bias="1hqk", grads=grads)
        _check(world(2), case, torch.float32, "zigzag", backend="torch")


@pytest.mark.parametrize("way", ["shared", "collectives"])
def test_calls_of_a_kind_are_equal_whether_a_mode_sees_them_or_not(way: str, world: Worlds) -> None:
    """The dispatcher is left out where nothing observes a call; plans are made once."""
    for found in world(2).run(attention_programs.observed, way):
        names = ["rowmax::distributed_forward", "rowmax::distributed_backward"]
        plain, seen = ([], [True, True]), (names, [False, False])
        assert found == [plain, plain, seen, plain, ([], [True]), seen]


@pytest.mark.parametrize("way", ["shared", "collectives"])
def test_calls_train_after_inference(way: str, world: Worlds) -> None:
    """Memory that stays between calls is no tensor of inference mode."""
    assert all(all(one) for one in world(2).run(attention_programs.after_inference, way))


def test_only_rows_that_are_seen_move(world: Worlds) -> None:
    """A window of 64 keys over 4 ranks of 512 rows: 64 keys of the rank before, and 64 own ones.

    Queries that see them are a call; the others of a rank see own keys, which are not gathered.
    """
    assert world(4).run(attention_programs.received_rows, 2048, 64) == [0, 128, 128, 128]


@pytest.mark.parametrize("mesh", ["mesh", "group", "default"])
def test_compiled_in_one_graph(mesh: str, world: Worlds) -> None:
    for frames in world(2).run(attention_programs.compiled, mesh):
        assert frames == 1


def test_checkpoints_train_alike(world: Worlds) -> None:
    assert all(world(2).run(attention_programs.checkpointed))


@pytest.mark.parametrize("name", ["second", "forward mode"])
def test_derivatives_that_are_not_there(name: str, world: Worlds) -> None:
    for text in world(2).run(attention_programs.refused_derivative, name):
        assert text.startswith("rowmax.distributed: attention across ranks has first derivatives")


def test_no_cotangent_on_one_rank_hangs_no_other(world: Worlds) -> None:
    """A rank whose loss reads lse alone, or multiplies by zero, takes part in the backward."""
    assert world(2).run(attention_programs.loss_of_one) == [True, True]


def test_groups_without_names_in_torch(world: Worlds) -> None:
    """A torch that finds no group by its name leaves it to those of earlier calls."""
    assert world(2).run(attention_programs.without_names) == ["no error"] * 2
