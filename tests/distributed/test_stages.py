"""Stages by kv heads: the results of one, copies under the calls, and the rule of their sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from rowmax.call.inputs import Options, Tensors
from rowmax.distributed import Layout
from rowmax.distributed.calls import Place, ShardedCall
from rowmax.distributed.groups import Group
from rowmax.distributed.pieces import Sight
from rowmax.distributed.routes import load_of
from rowmax.distributed.strategies.stages import may_hide, stage_sizes, stages_of
from rowmax.testing import Answer, Case, complaints, cotangents, expected, make

from . import programs, stage_programs
from .world import RankError, World

Worlds = Callable[[int], World]
CAUSAL = Sight(None, 0)
FEATURES = Case(
    "features", b=2, nq=170, hq=8, hk=4, d=16, left=90, causal=True, documents="sorted", sink=True,
    alibi=True, bias="1hqk", dropout=0.2,
)  # fmt: skip
CASES = [
    (FEATURES, 3, "zigzag"),
    (
        Case(
            "mask", nq=150, nk=190, hq=4, hk=4, d=16, allowed="1hqk", empty_rows=True, softcap=3.0
        ),
        2,
        "uneven",
    ),
    (Case("shared bias", b=2, nq=130, hq=8, hk=4, d=16, bias="11qk", sink=True), 3, "single"),
    (Case("row", nq=130, hq=4, d=16, bias="111k", causal=True, lengths=(0.7,)), 2, "contiguous"),
]


def _parts(
    world: World, case: Case, dtype: torch.dtype, kind: str, stages: int, **overrides: Any
) -> list[Answer]:
    given = (case, dtype, kind, world.size, {"backend": "torch", **overrides}, stages)
    return world.run(programs.own_answer, *given)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("case", "size", "kind"), CASES, ids=str)
def test_the_definition(case: Case, size: int, kind: str, stages: int, world: Worlds) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = make(case, dtype=dtype)
        parts = _parts(world(size), case, dtype, kind, stages)
        got = programs.whole_answer(call, *programs.layouts(case, kind, size), parts)
        wrong = complaints(got, expected(call, *cotangents(call)))
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_bits_of_one_stage(stages: int, world: Worlds) -> None:
    """Heads do not depend on each other: dropout, terms and own rows of a bias are the same.

    By our own kernels. torch's exponential rounds the last numbers of a tensor in another way than
    those before, at least with AVX2.
    """
    more = {"deterministic": True, "backend": "cpu"}
    one, several = (
        _parts(world(3), FEATURES, torch.float32, "zigzag", n, **more) for n in (1, stages)
    )
    for a, b in zip(one, several, strict=True):
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)
        for name, t in a.gradients.items():
            assert torch.equal(t, b.gradients[name]), name


def test_copies_begin_before_the_calls_that_hide_them(world: Worlds) -> None:
    two = ["call", "call"]  # a chunk each
    for forward, backward, text in world(2).run(stage_programs.staged, 3):
        assert text == "no error, no error"
        assert forward == [
            *("begin 0", "begin 1", "wait 0", *two),
            *("begin 2", "wait 1", *two),
            *("wait 2", *two),
        ]
        # copies 2, 4 and 5 return gradients, each during the calls of the next stage
        assert backward == [
            *("begin 0", "begin 1", "wait 0", *two, "begin 2"),
            *("begin 3", "wait 1", *two, "begin 4", "wait 2"),
            *("wait 3", *two, "begin 5", "wait 4", "wait 5"),
        ]


@pytest.mark.parametrize("fail", [1, 3, 6])
def test_no_copy_outlives_an_error(fail: int, world: Worlds) -> None:
    for forward, backward, text in world(2).run(stage_programs.staged, 3, fail):
        assert text == "a call that fails, a call that fails"
        for events in (forward, backward):
            begun, waited = (
                {e.split()[1] for e in events if e.startswith(word)} for word in ("begin", "wait")
            )
            assert events.count("call") == fail
            assert begun == waited
    for _, _, text in world(2).run(stage_programs.staged, 3):
        assert text == "no error, no error"


def test_an_error_of_one_rank_between_stages_ends_all() -> None:
    """The others raise after the time limit of the group, here 3 seconds."""
    world = World(3, timeout=3.0)
    try:
        began = time.monotonic()
        world.start(stage_programs.fails_alone)
        texts = [world.result(rank, wait=30.0) for rank in range(3)]
        assert texts[1] == "a call that fails"
        for rank in (0, 2):
            assert not isinstance(texts[rank], RankError), texts[rank]
            assert texts[rank] != "no error"
        assert time.monotonic() - began < 25.0
    finally:
        world.close()


def test_gradients_of_keys_are_rounded_once(world: Worlds) -> None:
    """With parts that are rounded before they are added, 58 of 100 elements are equal."""
    for share in world(2).run(stage_programs.equal_to_one_device):
        assert share > 0.99


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("growth", [1.0, 1.9, 3.5, 40.0])
@pytest.mark.parametrize("least", [1, 2, 3, 7])
def test_sizes_of_stages(least: int, growth: float, returns: bool) -> None:
    for heads in range(1, 65):
        sizes = stage_sizes(heads, least, growth, returns)
        assert sum(sizes) == heads
        assert min(sizes) >= min(least, heads)
        assert (len(sizes) == 1) == (heads < 2 * least)
        if len(sizes) == 1:
            continue
        assert min(sizes) == sizes[0] <= max(least, heads / 8)
        for before, after in pairwise(sizes):
            assert after < growth * before + sizes[0]
        if returns and heads >= 3 * sizes[0]:
            assert sizes[-1] == sizes[0]
        fewer = stage_sizes(heads, least, 2 * growth, returns)
        assert len(fewer) <= len(sizes)


def _stages(n: int, ranks: int, heads: tuple[int, int], **terms: Any) -> list[tuple[int, ...]]:
    """Return the stages of a causal forward and backward in bfloat16, with heads of 128."""
    layout = Layout.zigzag(n, ranks)
    q, k = (torch.empty(1, n // ranks, h, 128, dtype=torch.bfloat16, device="meta") for h in heads)
    place = Place("", layout.text, layout.text, "keys", False, False)
    given = (place, Tensors(q, k, k, **terms), Options(0.1, right=0), layout, layout)
    call = ShardedCall(*given, Group("", 0, ranks), mask_rows="none")
    return [tuple(map(len, stages_of(call, returns))) for returns in (False, True)]


def test_the_rule_of_stages() -> None:
    assert _stages(262144, 4, (32, 8)) == [(1, 7), (1, 6, 1)]
    # copies that take less time than the launches of more stages
    assert _stages(65536, 4, (32, 8)) == [(8,), (8,)]
    assert _stages(32768, 2, (32, 32)) == [(32,), (32,)]
    # the copies of as many kv heads as query heads take a fifth of the time of the products
    assert _stages(65536, 4, (32, 32)) == [(4, 28), (4, 13, 11, 4)]
    # pairs that the host cannot count: as many stages as pay for their launches
    ids = torch.empty(1, 262144, dtype=torch.int32, device="meta")
    assert _stages(262144, 4, (32, 8), q_ids=ids, k_ids=ids) == [(1, 7), (1, 2, 4, 1)]
    # a head leaves multiprocessors idle: more heads in a stage
    assert _stages(131072, 8, (16, 8)) == [(8,), (2, 4, 2)]
    assert _stages(16384, 8, (32, 8)) == [(8,), (8,)]
    assert _stages(65536, 4, (32, 1)) == [(1,), (1,)]


def test_only_copies_of_shared_memory_are_hidden_on_gpus() -> None:
    group, device = Group("", 0, 2), torch.device("cuda", 0)
    with programs.copies("shared"):
        assert may_hide(group, device)
    with programs.copies("collectives"):
        assert not may_hide(group, device)


def test_load_of_the_mean_rank() -> None:
    """Exact for a causal mask: half of all pairs, and the rows that others hold."""
    n = 4096
    for layout in (Layout.zigzag(n, 4), Layout.contiguous(n, 4)):
        load = load_of(layout, layout, CAUSAL)
        assert load.pairs == pytest.approx(n * (n + 1) / 2 / 4, rel=1e-3)
    assert load.chunk == n / 4
    assert load.rows == (0 + 1 + 2 + 3) / 4 * n / 4
    zigzag = load_of(Layout.zigzag(n, 4), Layout.zigzag(n, 4), Sight(None, None))
    assert zigzag.rows == 3 * n / 4
    assert zigzag.chunk == n / 7  # the two chunks of the last rank are one
    assert zigzag.pairs == n * n / 4
