"""Routes: each query sees all keys of its band, among own rows or gathered ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmax.distributed import Layout
from rowmax.distributed.pieces import Sight
from rowmax.distributed.routes import joined, route
from rowmax.rules.band import any_range

CAUSAL = Sight(None, 0)
LIMITS = st.one_of(st.none(), st.integers(0, 500))


@given(n=st.integers(1, 1500), ranks=st.integers(1, 5), left=LIMITS, right=LIMITS, data=st.data())
def test_calls_have_all_keys_of_their_queries(
    n: int, ranks: int, left: int | None, right: int | None, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from([Layout.contiguous, Layout.zigzag]))
    layout, sight = kind(n, ranks), Sight(left, right)
    for rank in range(ranks):
        way = route(layout, layout, sight, rank)
        mine = layout.positions(rank).tolist()
        gathered: dict[int, int] = {}  # the position of each gathered row
        for other, ranges in enumerate(way.received):
            theirs = layout.positions(other).tolist()
            sent = route(layout, layout, sight, other).sent[rank]
            for (start, stop), (first, _) in zip(ranges, sent, strict=True):
                gathered |= {row: theirs[first + row - start] for row in range(start, stop)}
        assert sorted(gathered) == list(range(way.length))
        seen = []
        for part in way.parts:
            rows = range(part.rows.start, part.rows.stop)
            seen += rows
            assert [mine[row] for row in rows] == list(range(part.i.start, part.i.stop))
            keys = list(range(part.j.start, part.j.stop))
            if part.own is not None:
                assert mine[part.own] == keys
            else:
                at = range(part.gathered.start, part.gathered.stop)
                assert [gathered[row] for row in at] == keys
            for i in (part.i.start, part.i.stop - 1):
                low, high = any_range(i, i, 0, left, right, n)
                assert high <= low or (part.j.start <= low and high <= part.j.stop)
        assert sorted(seen) == list(range(len(mine)))


@pytest.mark.parametrize("layout", [Layout.zigzag(96, 3), Layout.zigzag(1024, 4)], ids=str)
def test_one_call_of_both_chunks_has_the_positions_of_each(layout: Layout) -> None:
    for rank in range(layout.ranks - 1):
        part = joined(layout, layout, CAUSAL, rank)
        assert part is not None
        assert part.gap is not None
        early = part.gap.queries
        rows = range(part.rows.start, part.rows.stop)
        aligned = [part.j.stop - len(rows) + x for x in rows]
        found = [x - part.gap.keys for x in aligned[:early]] + aligned[early:]
        assert found == layout.positions(rank).tolist()
        assert part.gathered.stop - part.gathered.start == part.j.stop - part.j.start
        for one in route(layout, layout, CAUSAL, rank).parts:
            assert part.j.start == one.j.start
            assert one.j.stop <= part.j.stop
    assert joined(layout, layout, CAUSAL, layout.ranks - 1) is None  # its chunks are one
    assert joined(layout, layout, Sight(40, 0), 0) is None
    assert joined(layout, layout, Sight(None, None), 0) is None


@pytest.mark.parametrize(("left", "own"), [(1023, 15360), (100, 16256), (9000, 0)])
def test_most_of_a_long_chunk_sees_own_keys_alone(left: int, own: int) -> None:
    """Unless the window is longer than half of the chunk."""
    layout = Layout.contiguous(65536, 4)
    for rank in (1, 2, 3):
        way = route(layout, layout, Sight(left, 0), rank)
        alone = [part.rows for part in way.parts if part.own is not None]
        assert sum(rows.stop - rows.start for rows in alone) == own
        # keys before the chunk from a whole block on, and own ones that the same queries see
        assert way.length == (16384 - own) + -(-left // 64) * 64
