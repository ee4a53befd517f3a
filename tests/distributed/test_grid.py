"""A mesh of two dimensions: heads over one, keys or queries over the other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from rowmax import distributed as rd
from rowmax.distributed import Layout
from rowmax.testing import COVERING, Answer, Case, complaints, make

from . import (
    agreement_programs,
    attention_programs,
    context_programs,
    programs,
    sharding_programs,
    shared_programs,
    varlen_programs,
)
from .references import reference
from .test_attention import CHUNKS, FEATURES
from .test_explain import rows
from .test_varlen import PACKED
from .world import World

Worlds = Callable[[int], World]
DENSE = [case for case in COVERING if not case.packed]
_next = cycle(programs.LAYOUTS)
KEYS = [(case, torch.float32, "keys", next(_next)) for case in (*DENSE, *CHUNKS)]
QUERIES = [
    (case, torch.float64, "queries", next(_next))
    for case in (*DENSE[::8], *CHUNKS)
    if case.align != "lengths"
]
HALF = [(case, torch.bfloat16, "keys", next(_next)) for case in DENSE[1::16]]
#: fewer heads of keys than ranks of the second dimension, unequal numbers, and a rank without one
HEADS = [
    Case("one kv head", nq=150, hq=4, hk=1, d=16, causal=True, bias="11qk", sink=True, alibi=True),
    Case("odd", nq=150, hq=3, hk=3, d=16, dv=24, bias="1hqk", dropout=0.3, allowed="11qk"),
    Case("three of one", nq=130, nk=190, hq=3, hk=1, d=16, left=40, right=3, bias="1h1k"),
    Case("one head", b=2, nq=130, hq=1, hk=1, d=16, lengths=(0.5, 0.9), sink=True, bias="11qk"),
]


def _parts(
    world: World,
    case: Case,
    dtype: torch.dtype,
    kind: str,
    shape: tuple[int, ...],
    stages: int = 1,
    **more: Any,
) -> list[Answer]:
    given = (case, dtype, kind, world.size, {"backend": "torch", **more}, stages, shape)
    return world.run(programs.own_answer, *given)


def _check(
    world: World, case: Case, dtype: torch.dtype, kind: str, *given: Any, **more: Any
) -> None:
    parts = _parts(world, case, dtype, kind, (2, 2), *given, **more)
    call = make(case, dtype=dtype)
    got = programs.whole_answer(call, *programs.layouts(case, kind, world.size), parts)
    wrong = complaints(got, reference(case, dtype))
    assert not wrong, "\n".join(wrong)


def _equal(first: list[Answer], again: list[Answer]) -> None:
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)
        for name, t in a.gradients.items():
            assert torch.equal(t, b.gradients[name]), name


@pytest.mark.parametrize(("case", "dtype", "strategy", "kind"), [*KEYS, *QUERIES, *HALF], ids=str)
def test_the_definition(
    case: Case, dtype: torch.dtype, strategy: str, kind: str, world: Worlds
) -> None:
    _check(world(4), case, dtype, kind, strategy=strategy)


@pytest.mark.parametrize("strategy", ["keys", "queries"])
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_numbers_of_heads(case: Case, strategy: str, world: Worlds) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _check(world(4), case, dtype, "zigzag", strategy=strategy)


@pytest.mark.parametrize(
    ("shape", "strategy", "same"),
    [
        ((2, 1), "auto", "keys"),
        ((2, 1), "queries", "queries"),
        ((1, 2), "auto", "heads"),
        ((1, 2), "queries", "heads"),
        ((1, 1), "auto", "keys"),
    ],
)
def test_one_rank_in_a_dimension(
    shape: tuple[int, ...], strategy: str, same: str, world: Worlds
) -> None:
    """Equal to the bit to the strategy of one dimension."""
    here, more = world(shape[0] * shape[1]), {"deterministic": True}
    got = _parts(here, FEATURES, torch.float32, "zigzag", shape, strategy=strategy, **more)
    _equal(got, _parts(here, FEATURES, torch.float32, "zigzag", (), strategy=same, **more))


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_repeats_are_equal_to_the_bit(strategy: str, world: Worlds) -> None:
    more = {"deterministic": True, "strategy": strategy}
    given = (world(4), FEATURES, torch.float32, "uneven", (2, 2))
    _equal(_parts(*given, **more), _parts(*given, **more))


def test_stages(world: Worlds) -> None:
    """Stages of own kv heads, with copies by collectives and through shared memory."""
    case = Case("stages", nq=170, hq=8, hk=4, d=16, left=90, causal=True, sink=True, bias="11qk")
    for dtype in (torch.float32, torch.bfloat16):
        _check(world(4), case, dtype, "zigzag", 2)
    more = {"deterministic": True}
    one, two = (
        _parts(world(4), FEATURES, torch.float32, "zigzag", (2, 2), n, **more) for n in (1, 2)
    )
    _equal(one, two)
    with_shared = (FEATURES, torch.float32, "zigzag", 4, {"backend": "torch", **more}, 2, (2, 2))
    found = world(4).run(shared_programs.shared_answer, *with_shared)
    assert all(uses > 4 for _, uses in found)
    _equal(two, [answer for answer, _ in found])


@pytest.mark.parametrize("strategy", ["keys", "queries"])
@pytest.mark.parametrize("kind", programs.LAYOUTS)
def test_dropout_keeps_the_set_of_one_device(kind: str, strategy: str, world: Worlds) -> None:
    case = Case("kept", b=2, nq=190, nk=230, hk=2, d=8, dv=230, dropout=0.4)
    want = attention_programs.with_unit_values(make(case))(backend="torch")[0]
    parts = world(4).run(attention_programs.kept, case, kind, 4, strategy, (2, 2))
    queries, _ = programs.layouts(case, kind, 4)
    for rank, part in enumerate(parts):
        assert torch.equal(part, want[:, queries.positions(rank)] != 0)


def test_a_seed_of_none_is_that_of_the_first_rank(world: Worlds) -> None:
    parts = world(4).run(attention_programs.drawn_seed, 4, (2, 2))
    assert len({int(seed) for seed, _, _ in parts}) == 4
    for _, whole, own in parts:
        torch.testing.assert_close(own, whole)


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_replicated_gradients_are_shares_or_sums(strategy: str, world: Worlds) -> None:
    case = Case("shared", nq=150, hk=2, d=16, causal=True, sink=True, alibi=True, bias="1h1k")
    want = reference(case, torch.float32).ref.gradients
    shares, sums = (
        _parts(
            *(world(4), case, torch.float32, "zigzag", (2, 2)),
            strategy=strategy,
            reduce_replicated=flag,
        )
        for flag in (False, True)
    )
    for name in ("sink", "alibi", "bias"):
        total = sum(part.gradients[name] for part in shares)
        exact = want[name].to(sums[0].gradients[name].dtype)
        for part in sums:
            assert torch.equal(part.gradients[name], sums[0].gradients[name])
            torch.testing.assert_close(part.gradients[name], total, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(part.gradients[name], exact, rtol=1e-4, atol=1e-4)


def test_own_rows_of_bias_are_not_summed(world: Worlds) -> None:
    """A rank with one query gives a bias of one row, too: other ranks say that rows are own."""
    for bias in ("1hqk", "11qk"):
        case = Case("own", nq=150, bias=bias, d=16)
        _check(world(4), case, torch.float32, "single", reduce_replicated=True)


@pytest.mark.parametrize(
    ("case", "kind"), list(zip(PACKED, cycle(("documents", "zigzag", "uneven")))), ids=str
)
def test_packed(case: Case, kind: str, world: Worlds) -> None:
    """Documents are one packed call of own heads, where one dimension has one."""
    call = make(case)
    queries, keys = varlen_programs.packed_layouts(call, kind, 4)
    found = world(4).run(varlen_programs.packed_answer, case, torch.float32, kind, 4, 1, (2, 2))
    parts = [answer for answer, _ in found]
    whole = programs.whole_answer(varlen_programs.one_sequence(call), queries, keys, parts)
    gradients = {n: t[0] if n in "qkv" else t for n, t in whole.gradients.items()}
    got = Answer(whole.out[0], whole.lse[0], gradients)
    wrong = complaints(got, reference(case, torch.float32))
    assert not wrong, "\n".join(wrong)
    if case.name in ("plain", "alibi") and kind != "uneven":
        assert [calls for _, calls in found] == [2] * 4


def test_rows_come_back(world: Worlds) -> None:
    assert all(world(4).run(sharding_programs.round_trips, "uneven", 4, (2, 2)))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_compiled_in_one_graph(shape: tuple[int, ...], world: Worlds) -> None:
    """Graphs hold names: here of the dimension with two ranks, else of both."""
    assert world(2).run(attention_programs.compiled, "grid", shape) == [1] * 2


def test_a_context(world: Worlds) -> None:
    world(4).run(context_programs.in_a_grid, 4)


@pytest.mark.parametrize("strategy", ["keys", "queries"])
@pytest.mark.parametrize("kind", ["plain", "window", "bias", "documents"])
def test_bytes_are_those_that_move(kind: str, strategy: str, world: Worlds) -> None:
    for parts in world(4).run(context_programs.explained, 4, strategy, kind, (2, 2)):
        for want, counted in parts:
            assert tuple(want) == counted
            assert sum(counted) > 0


def test_a_plan_without_processes() -> None:
    """Two hosts of eight: an eighth of the keys' heads crosses, and rows for heads within."""
    layout = Layout.zigzag(65536, 16)
    shard = 4096 * 8 * 2 * 128 * 2  # rows, kv heads, k and v, head size, bytes
    flat = rd.explain(*rows(4096, 32, 8), layout=layout, causal=True, strategy="keys")
    found = rd.explain(*rows(4096, 32, 8), mesh=(2, 8), layout=layout, causal=True)
    assert (found.strategy, found.imbalance) == ("heads x keys", 1.0)
    assert found.others.keys() == {"queries"}
    assert flat.forward.wire[0].received == 15 * shard
    # q, k, v to heads; out and lse to rows: seven of eight parts. Then keys of one head, of the
    # half that the other host has
    within = 4096 * (32 + 2 * 8) * 128 * 2 * 7 // 8 + 4096 * 32 * (128 * 2 + 4) * 7 // 8
    assert found.forward.wire[0].received == within + shard * 8 // 8
    assert found.forward.wire[0].received < flat.forward.wire[0].received
    assert found.loads is not None
    assert sum(found.loads) == 32 * 65536 * 65537 // 2
    one = rd.explain(*rows(4096, 32, 8), mesh=(1, 16), layout=layout, causal=True)
    assert one.strategy == "heads"
    assert one.others == {}
    with pytest.raises(ValueError, match=r"mesh: got \(2, 0\); want the sizes of a mesh"):
        rd.explain(*rows(4096), mesh=(2, 0), layout=layout)
    with pytest.raises(ValueError, match="layout: got 16 ranks; want those of the group, 8"):
        rd.explain(*rows(4096), mesh=(2, 4), layout=layout)


@pytest.mark.parametrize("name", ["q", "mask"])
def test_an_error_of_one_rank_reaches_all(name: str, world: Worlds) -> None:
    *others, own = world(4).run(agreement_programs.refused, "local", name, 3, (2, 2))
    assert own.startswith(f"{name}: ")
    assert others == [f"rowmax.distributed: rank 3 refused this call: {own}"] * 3


@pytest.mark.parametrize("name", ["scale", "sink", "dropout_p", "head terms", "dtype"])
def test_arguments_that_differ_are_named_on_all_ranks(name: str, world: Worlds) -> None:
    texts = world(4).run(agreement_programs.refused, "unlike", name, 2, (2, 2))
    assert texts == [texts[0]] * 4
    assert f"{name}: got " in texts[0]
    assert " on ranks 0, 1, 3 and " in texts[0]


def test_refusals(world: Worlds) -> None:
    second = "whose second one distributes heads; want 'auto', 'keys' or 'queries', for the first"
    for rank, found in enumerate(world(4).run(context_programs.refused_grids)):
        want = [
            f"ValueError: strategy: got 'heads' of a mesh of two dimensions, {second}",
            "ValueError: strategy: got 'rings'; want one of",
            "ValueError: strategy: got 'queries' (a rank's keys alone have no position aligned to "
            "the lengths); want 'auto' or 'keys'",
            "ValueError: layout: got 2 ranks; want those of the group, 4",
            "ValueError: mesh: got 3 dimensions; want one or two, such as mesh['heads'] or "
            "mesh['keys', 'heads']",
            "ValueError: mask: got shape [96, 96]; want one that broadcasts to",
            "NotImplementedError: rowmax.distributed: attention across ranks has first derivatives",
            "ValueError: layout: got 2 ranks; want those of the group, 4",
        ]
        for text, begin in zip(found, want, strict=True):
            assert text.startswith(begin), rank
