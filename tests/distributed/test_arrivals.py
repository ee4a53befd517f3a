"""The order of copies that kernels wait for is whole, and calls without arrivals wait."""

from __future__ import annotations

import builtins
from itertools import accumulate, groupby, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rowmax import torch_compat
from rowmax.call import dispatch
from rowmax.call.dispatch import Prepared, choose, prepared
from rowmax.call.inputs import Arrivals, Gap, Options, Tensors
from rowmax.call.problem import problem_of
from rowmax.distributed import arrivals
from rowmax.distributed.arrivals import come_by_heads, ordered
from rowmax.distributed.layout import Layout
from rowmax.distributed.moves import MOST_IN_PLACE, in_place, moves_of
from rowmax.distributed.pieces import Sight
from rowmax.distributed.routes import route
from rowmax.rules.arrivals import GRANULE

from .test_slots import KINDS

HEADS = 3
SHORT, LONG = 256, 1 << 16  # bytes of a row of a head


@pytest.mark.parametrize(("kind", "row"), [*product(KINDS, (SHORT, LONG))], ids=str)
def test_every_row_of_others_comes_once_for_each_head(kind: tuple[Layout, Sight], row: int) -> None:
    layout, sight = kind
    by_heads = come_by_heads(layout, layout, sight, HEADS, row)
    assert by_heads == (row == LONG and not sight.documents)
    for rank in range(layout.ranks):
        found = ordered(layout, layout, sight, rank, HEADS, row)
        moves = moves_of(layout, layout, sight, rank)
        want = [move.to + x for move in moves.first + moves.later for x in range(move.rows)]
        for head in range(HEADS) if by_heads else (None,):
            mine = [move for other, move in found.copies if other == head]
            rows = [move.to + x for move in mine for x in range(move.rows)]
            assert sorted(rows) == sorted(want)
            assert all(row * move.rows <= arrivals.MOST_BYTES for move in mine)


def positions(layout: Layout, sight: Sight, rank: int) -> dict[int, int]:
    """Return the positions of the rows that a rank gathers, of copies from shown rows."""
    own = [[x for a, b in each for x in range(a, b)] for each in layout.owned]
    ways = [route(layout, layout, sight, other) for other in range(layout.ranks)]
    shown = [[own[n][x] for a, b in way.shown for x in range(a, b)] for n, way in enumerate(ways)]
    moves = moves_of(layout, layout, sight, rank)
    found = {move.to + x: own[rank][move.origin + x] for move in moves.own
             for x in range(move.rows)}  # fmt: skip
    for move in moves.first + moves.later:
        found |= {move.to + x: shown[move.rank][move.origin + x] for x in range(move.rows)}
    return found


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if in_place(kind[0], *kind, SHORT)], ids=str
)
def test_rows_in_place_have_one_position(kind: tuple[Layout, Sight]) -> None:
    layout, sight = kind
    of = [positions(layout, sight, rank) for rank in range(layout.ranks)]
    for rank in range(layout.ranks):
        apart, moves = (moves_of(layout, layout, sight, rank, to) for to in (False, True))
        assert moves.own == apart.own
        for move, other in zip(moves.first + moves.later, apart.first + apart.later, strict=True):
            assert move._replace(origin=0) == other._replace(origin=0)
            for x in range(move.rows):
                assert of[rank][move.to + x] == of[move.rank][move.origin + x]


def test_which_rows_are_in_place() -> None:
    layout = Layout.zigzag(1 << 14, 4)
    assert in_place(layout, layout, Sight(None, 0), MOST_IN_PLACE >> 14)
    assert not in_place(layout, layout, Sight(None, 0), (MOST_IN_PLACE >> 14) + 1)
    window = Layout.contiguous(1 << 14, 4)  # ranks show keys that their own calls read elsewhere
    assert not in_place(window, window, Sight(100, 0), SHORT)
    assert in_place(window, window, Sight(None, None), SHORT)
    assert sum(in_place(one, one, sight, SHORT) for one, sight in KINDS) > 1


@pytest.mark.parametrize(("kind", "row"), [*product(KINDS, (SHORT, LONG))], ids=str)
def test_a_tile_waits_for_the_last_copy_of_its_rows(kind: tuple[Layout, Sight], row: int) -> None:
    layout, sight = kind
    for rank in range(layout.ranks):
        found = ordered(layout, layout, sight, rank, HEADS, row)
        parts = route(layout, layout, sight, rank).parts
        for part, (stride, *numbers) in zip(parts, found.tables, strict=True):
            if part.own is not None:
                assert not any(numbers)
                continue
            rows = range(part.gathered.start, part.gathered.stop)
            if part.packing is not None:
                rows = range(part.packing.rows)
            for count, (head, move) in enumerate(found.copies, 1):
                for x in {move.to, move.to + move.rows - 1} & set(rows):
                    at = (x - rows.start) // GRANULE
                    assert numbers[(head or 0) * stride + at] >= count


@pytest.mark.parametrize(("kind", "row"), [*product(KINDS, (SHORT, LONG))], ids=str)
def test_copies_of_a_head_but_the_first_are_counted_together(
    kind: tuple[Layout, Sight], row: int
) -> None:
    """No tile waits for a count that is never stored."""
    layout, sight = kind
    for rank in range(layout.ranks):
        found = ordered(layout, layout, sight, rank, HEADS, row)
        runs = [len(list(run)) for _, run in groupby(found.copies, lambda copy: copy.head)]
        ends = list(accumulate(runs))
        assert list(found.steps) == [*range(1, (ends or [1])[0]), *ends]
        assert {x for _, *numbers in found.tables for x in numbers} <= {0, *found.steps}


def test_keys_come_in_the_order_in_which_a_kernel_reads_them() -> None:
    """The last ones first under a causal mask, of one head after the other."""
    layout, sight = KINDS[0]
    for rank in range(layout.ranks):
        copies = ordered(layout, layout, sight, rank, HEADS, LONG).copies
        first = {move.to for move in moves_of(layout, layout, sight, rank).first}
        order = [(move.to not in first, head, -move.to) for head, move in copies]
        assert order == sorted(order)


def test_keys_of_one_call_come_head_by_head() -> None:
    """Those of the early chunk are not before the others, and the call waits for all it reads."""
    layout, sight = KINDS[0]
    for rank in range(layout.ranks - 1):
        found = ordered(layout, layout, sight, rank, HEADS, LONG, one=True)
        apart = ordered(layout, layout, sight, rank, HEADS, LONG)
        assert sorted(found.copies) == sorted(apart.copies)
        order = [(head, -move.to) for head, move in found.copies]
        assert order == sorted(order)
        ((stride, *numbers),) = found.tables
        for count, (head, move) in enumerate(found.copies, 1):
            assert numbers[(head or 0) * stride + move.to // GRANULE] >= count


def test_a_call_of_own_keys_waits_for_none() -> None:
    layout, sight = KINDS[0]
    count = torch.zeros(1, dtype=torch.int32)
    found = ordered(layout, layout, sight, 0, HEADS, SHORT)
    assert found.arrivals(0, count) is None
    got = found.arrivals(1, count)
    assert got is not None
    assert got.needed.tolist() == found.tables[1]


def test_without_the_store_of_a_stream_no_kernel_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any) -> Any:
        if name == "torch._C._distributed_c10d":
            raise ImportError(name)
        return real(name, *given)

    torch_compat.store_on_stream.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        assert torch_compat.store_on_stream() is None
    torch_compat.store_on_stream.cache_clear()


def test_a_forward_hands_arrivals_to_a_backend_that_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    tensors, options = Tensors(q, k, v), Options(0.3, backend="torch")
    job = prepared(tensors, options)
    assert not job.takes_arrivals
    want, seen = job.forward(tensors), []
    given = Arrivals(torch.zeros(1), torch.ones(2))

    def forward(problem: Any, tensors: Any, arrivals: Any = None) -> Any:
        seen.append(arrivals)
        return want

    backend = SimpleNamespace(forward=forward, takes_arrivals=lambda p: p.nq == 5)
    plan = choose(problem_of(tensors, options), "forward", "torch")._replace(first=backend)  # pyright: ignore
    monkeypatch.setattr(dispatch, "choose", lambda *_: plan)
    job = Prepared(options, problem_of(tensors, options))
    assert job.takes_arrivals
    assert job.forward(tensors, arrivals=given) is want
    assert job.forward(tensors) is want
    assert [one if one is None else one.needed is given.needed for one in seen] == [True, None]


def test_a_forward_hands_a_gap_to_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys that arrive or without, and to no call that has none."""
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    tensors, options = Tensors(q, k, v), Options(0.3, backend="torch")
    want, gap, seen = prepared(tensors, options).forward(tensors), Gap(2, 7), []
    given = Arrivals(torch.zeros(1), torch.ones(2))

    def forward(problem: Any, tensors: Any, arrivals: Any = None) -> Any:
        seen.append((problem.gap, arrivals is not None))
        return want

    backend = SimpleNamespace(forward=forward, takes_gap=lambda p: p.gap == gap)
    problem = problem_of(tensors, options)
    plan = choose(problem, "forward", "torch")._replace(first=backend)  # pyright: ignore
    monkeypatch.setattr(dispatch, "choose", lambda *_: plan)
    assert dispatch.takes_gap(problem._replace(gap=gap), None)
    assert not dispatch.takes_gap(problem._replace(gap=Gap(3, 7)), None)
    job = Prepared(options, problem)
    for _ in range(2):  # a call, and one like it
        for arriving in (given, None):
            assert job.forward(tensors, arrivals=arriving, gap=gap) is want
            assert job.forward(tensors, arrivals=arriving) is want
    assert seen == 2 * [(gap, True), (None, True), (gap, False), (None, False)]


@pytest.mark.parametrize("rows", ["none", "own"])
def test_calls_with_a_boolean_mask_keep_their_stages(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No backend that takes arrivals takes such a mask, and the whole call does not have it."""
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(1, 8, 2, 16))
    call: Any = SimpleNamespace(
        mask_rows=rows, tensors=(q, q, q), group=None, options=Options(0.3, backend="a test"),
        queries=KINDS[0][0], keys=KINDS[0][0], whole=lambda: None,
    )  # fmt: skip
    for name, value in (("shares_memory", True), ("problem_of", None), ("takes_arrivals", True)):
        monkeypatch.setattr(arrivals, name, lambda *_, value=value: value)
    monkeypatch.setattr(arrivals, "store_on_stream", lambda: print)
    q.shape = torch.Size(q.shape)
    assert arrivals.arrives(call) == (rows == "none")
