"""The gradients of every key of every call have a place of their own, and each place is added."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from rowmax.distributed import Layout, pushes
from rowmax.distributed.pieces import Sight
from rowmax.distributed.routes import route
from rowmax.distributed.slots import UNIT, Memory, slots_of

CPU = torch.device("cpu")
DOCUMENTS = "0,90,91,400,700,1000"
#: (layout, limits) of 1000 positions
KINDS = [
    (Layout.zigzag(1000, 4), Sight(None, 0)),
    (Layout.zigzag(1000, 3), Sight(None, None)),
    (Layout.contiguous(1000, 4), Sight(130, 0)),
    (Layout(((), ((0, 300), (600, 1000)), ((300, 600),))), Sight(70, 20)),
    (Layout.zigzag(1000, 4), Sight(None, 0, DOCUMENTS)),
    (Layout.contiguous(1000, 2), Sight(None, None, DOCUMENTS)),
    (Layout.zigzag(1000, 2), Sight(100, 0, DOCUMENTS)),
]


def positions_of(layout: Layout, rank: int) -> list[int]:
    return [x for start, stop in layout.owned[rank] for x in range(start, stop)]


@pytest.mark.parametrize(("layout", "sight"), KINDS, ids=str)
def test_each_key_of_a_call_has_one_place(layout: Layout, sight: Sight) -> None:
    slots, taken = slots_of(layout, layout, sight), set()
    for source in slots.ranks:
        for n, part in enumerate(route(layout, layout, sight, source).parts):
            seen = []
            alone = slots.alone_of_call(source, n)
            for rank, slot in [*slots.of_call(source, n), *((source, slot) for slot in alone)]:
                (start, stop), rows = slot.keys, range(*slot.rows)
                assert stop - start == len(rows)
                seen += range(start, stop)
                if slot in alone:
                    assert slot.first == rows.start
                else:
                    taken |= {(rank, slot.first + x) for x in range(len(rows))}
                if part.packing is None:  # keys are positions from the first one of the call on
                    held = positions_of(layout, rank)
                    assert [held[x] for x in rows] == [part.j.start + x for x in range(start, stop)]
            assert sorted(seen) == list(range(slots.parts[source][n]))
    assert taken == {(rank, x) for rank, n in enumerate(slots.rows) for x in range(n)}


@pytest.mark.parametrize(("layout", "sight"), KINDS, ids=str)
def test_every_place_is_added_to_the_row_of_its_key(layout: Layout, sight: Sight) -> None:
    slots = slots_of(layout, layout, sight)
    for rank in slots.ranks:
        want: list[list[int]] = [[] for _ in range(layout.lengths[rank])]
        for group in slots.groups[rank]:
            assert len({slot.source for slot in group}) == 1
            for slot in group:
                for x, row in enumerate(range(*slot.rows)):
                    want[row].append(slot.first + x)
        table = slots.summands(rank, CPU)
        assert table.shape[0] >= len(slots.groups[rank])
        columns = table.flatten(0, 1).T.tolist()
        assert [[x for x in column if x >= 0] for column in columns] == want
        alone = [x for slot in slots.alone[rank] for x in range(*slot.rows)]
        assert [x for x, column in enumerate(columns) if -2 in column] == sorted(alone)
        assert all(columns[x][0] == -2 for x in alone)


@pytest.mark.parametrize(("layout", "sight"), KINDS, ids=str)
def test_rows_are_alone_that_one_call_of_their_rank_sees(layout: Layout, sight: Sight) -> None:
    slots = slots_of(layout, layout, sight)
    for rank in slots.ranks:
        calls: list[list[int]] = [[] for _ in range(layout.lengths[rank])]
        for source in slots.ranks:
            for n in range(len(slots.parts[source])):
                every = [slot for held, slot in slots.of_call(source, n) if held == rank]
                every += slots.alone_of_call(source, n) if source == rank else []
                for slot in every:
                    for row in range(*slot.rows):
                        calls[row].append(source)
        alone = {x for slot in slots.alone[rank] for x in range(*slot.rows)}
        assert alone == {row for row, sources in enumerate(calls) if sources == [rank]}


def test_few_rows_of_a_window_are_sums() -> None:
    layout = Layout.contiguous(4096, 4)
    slots = slots_of(layout, layout, Sight(128, 0))
    assert all(rows <= 2 * (2 * 128 + 64) for rows in slots.rows)


def test_places_are_those_of_slots_in_the_memory_of_all_ranks() -> None:
    """Rows of k, then rows of v, of every rank; addresses are bytes and may come in any order."""
    layout, sight = KINDS[0]
    slots, random_ = slots_of(layout, layout, sight), random.Random(1)
    batch, widths = 2, (8, 12)
    size = max(slots.rows) * batch * sum(widths) * 4
    starts = random_.sample(range(0, 40 * size, size), 4)
    memory = Memory(tuple(starts), batch, widths)
    assert starts[memory.lowest] == min(starts)
    assert memory.lowest != 0
    for source in slots.ranks:
        for part, n in enumerate(slots.parts[source]):
            tables = slots.places(source, part, memory, CPU)
            for (rank, slot), b in (
                (one, b) for one in slots.of_call(source, part) for b in (0, 1)
            ):
                begin = starts[rank]
                for table, width in zip(tables, widths, strict=True):
                    for x, key in enumerate(range(*slot.keys)):
                        assert int(table[b * n + key]) >= 0
                        place = min(starts) + 4 * UNIT * int(table[b * n + key])
                        assert place == begin + 4 * width * ((slot.first + x) * batch + b)
                    begin += 4 * width * slots.rows[rank] * batch
            for slot, b in ((one, b) for one in slots.alone_of_call(source, part) for b in (0, 1)):
                for table, width in zip(tables, widths, strict=True):
                    for key, row in zip(range(*slot.keys), range(*slot.rows), strict=True):
                        place = UNIT * (-1 - int(table[b * n + key]))
                        assert place == (b * layout.lengths[source] + row) * width


def test_without_triton_no_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rowmax.gpu.slot_sums", None)
    t = torch.full((1, 2, 1, 8), 3.0)
    assert not pushes._by_kernel(t, torch.zeros(1, 1, 2, dtype=torch.int32), t)
    assert torch.equal(t, torch.full_like(t, 3.0))
