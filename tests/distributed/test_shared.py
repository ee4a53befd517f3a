"""Copies through memory that ranks share: here of processes on one CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rowmax.testing import Case, complaints, cotangents, expected, make

from . import programs, shared_programs
from .test_stages import CASES
from .world import World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("case", "size", "kind"), CASES, ids=str)
def test_the_definition_and_the_bits_of_collectives(
    case: Case, size: int, kind: str, stages: int, world: Worlds
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = (case, dtype, kind, size, {"backend": "torch"}, stages)
        found = world(size).run(shared_programs.shared_answer, *given)
        parts, used = zip(*found, strict=True)
        # three to agree; unless one rank of two holds all rows, those of the forward and of the
        # backward, and gradients
        moves = size > 2 or 0 not in programs.layouts(case, kind, size)[0].lengths
        assert set(used) == {3 + moves * 3}
        call = make(case, dtype=dtype)
        got = programs.whole_answer(call, *programs.layouts(case, kind, size), parts)
        wrong = complaints(got, expected(call, *cotangents(call)))
        assert not wrong, "\n".join(wrong)
        for mine, theirs in zip(parts, world(size).run(programs.own_answer, *given), strict=True):
            assert torch.equal(mine.out, theirs.out)
            assert torch.equal(mine.lse, theirs.lse)
            for name, grad in mine.gradients.items():
                assert torch.equal(grad, theirs.gradients[name]), name


@pytest.mark.parametrize("stages", [1, 3])
def test_own_rows_that_are_copied_once_have_the_same_bits(stages: int, world: Worlds) -> None:
    """Rows of a rank, in the memory that others read, where it gathers those of others."""
    once, causal = 0, Case("causal", b=2, nq=170, hq=8, hk=4, d=16, causal=True)
    for case, size, kind in (*CASES, (causal, 4, "zigzag"), (causal, 3, "contiguous")):
        given = (case, torch.float32, kind, size, {"backend": "torch"}, stages)
        found = world(size).run(shared_programs.answer_apart, *given)
        theirs = world(size).run(programs.own_answer, *given)
        for (mine, used), other in zip(found, theirs, strict=True):
            once += used > 0
            for (name, a, _), (_, b, _) in zip(mine.items(), other.items(), strict=True):
                assert torch.equal(a, b), name
    assert once > 8


def test_ranks_meet_once_where_regions_take_turns(world: Worlds) -> None:
    """They meet before long uses, and before all uses once a graph has one."""
    short, long, later = [(1, 0), (0, 0)], [(0, 1), (0, 1)], [(0, 1), (0, 1)]
    want = [*short, *short, *long, *short, *later]
    assert world(2).run(shared_programs.meetings) == [want] * 2


def test_memory_of_a_graph_stays_when_it_grows(world: Worlds) -> None:
    assert world(2).run(shared_programs.memory_of_graphs) == [[1, 2]] * 2


@pytest.mark.parametrize(("case", "size", "kind"), CASES, ids=str)
def test_heads_that_arrive_one_after_the_other_have_the_same_bits(
    case: Case, size: int, kind: str, world: Worlds
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = (case, dtype, kind, size, {"backend": "torch"})
        found = world(size).run(shared_programs.answer_by_heads, *given)
        for (mine, used), theirs in zip(
            found, world(size).run(programs.own_answer, *given), strict=True
        ):
            alone = 0 in programs.layouts(case, kind, size)[0].lengths and size == 2
            assert used > 0 or alone
            assert torch.equal(mine.out, theirs.out)
            assert torch.equal(mine.lse, theirs.lse)
            for name, grad in mine.gradients.items():
                assert torch.equal(grad, theirs.gradients[name]), name


@pytest.mark.parametrize(("case", "size", "kind"), CASES, ids=str)
def test_forwards_that_take_arrivals_need_the_copies_that_come(
    case: Case, size: int, kind: str, world: Worlds
) -> None:
    """Their results have the bits of forwards that wait."""
    given = (case, torch.float32, kind, size, {"backend": "torch"})
    found = world(size).run(shared_programs.early_answer, *given)
    theirs = world(size).run(programs.own_answer, *given)
    for (mine, groups, seen), other in zip(found, theirs, strict=True):
        assert torch.equal(mine.out, other.out)
        assert torch.equal(mine.lse, other.lse)
        assert max(seen, default=0) == sum(groups)  # one call needs the last copy
    alone = size == 2 and 0 in programs.layouts(case, kind, size)[0].lengths
    assert any(groups for _, groups, _ in found) or alone


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("kind", ["zigzag", "uneven", "contiguous"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_both_chunks_of_a_rank_are_one_call(
    size: int, kind: str, counts: bool, world: Worlds
) -> None:
    """The results are those of a call of each chunk.

    Other masks have no gap, and neither has the last rank, whose chunks are one.
    """
    causal = Case("causal", b=2, nq=512, hq=4, hk=2, d=16, causal=True, sink=True, softcap=5.0)
    window = Case("window", b=1, nq=512, hq=4, hk=2, d=16, left=300, causal=True)
    biased = Case("biased", b=1, nq=512, hq=4, hk=2, d=16, causal=True, bias="1hqk")
    for case in (causal, window, biased):
        given = (case, torch.float32, kind, size, {"backend": "torch"})
        found = world(size).run(shared_programs.joined_answer, counts, *given)
        theirs = world(size).run(programs.own_answer, *given)
        for (mine, _), other in zip(found, theirs, strict=True):
            for (name, a, _), (_, b, _) in zip(mine.items(), other.items(), strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), name
        used = [bool(seen) for _, seen in found]
        if kind != "uneven" or case is not causal:
            gaps = case is causal and kind == "zigzag"
            assert used == [gaps and rank < size - 1 for rank in range(size)]


def test_chunks_are_calls_of_their_own_without_shared_memory(world: Worlds) -> None:
    case = Case("causal", b=2, nq=512, hq=4, hk=2, d=16, causal=True)
    given = (case, torch.float32, "zigzag", 3, {"backend": "torch"})
    found = world(3).run(shared_programs.joined_without_memory, *given)
    for (mine, seen), other in zip(found, world(3).run(programs.own_answer, *given), strict=True):
        assert not seen
        for (name, a, _), (_, b, _) in zip(mine.items(), other.items(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_sizes_that_change(size: int, world: Worlds) -> None:
    assert world(size).run(shared_programs.one_after_the_other, size, 7) == [0.0] * size


@pytest.mark.parametrize(
    ("trouble", "shares"),
    [("none", True), ("host", False), ("at once", False), ("later", False)],
)
def test_ranks_agree_where_memory_cannot_be_shared(
    trouble: str, shares: bool, world: Worlds
) -> None:
    assert world(2).run(shared_programs.shared_or_not, trouble) == [(shares, True, "")] * 2


def test_a_wrong_word(world: Worlds) -> None:
    found = world(2).run(shared_programs.shared_or_not, "word")
    want = "ROWMAX_DISTRIBUTED_COPIES: got 'shmem'; want one of 'shared', 'collectives'"
    assert found == [(False, False, want)] * 2
