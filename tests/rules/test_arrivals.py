"""Tiles of keys wait for their copies, and for no others."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rowmax.rules.arrivals import GRANULE, MOST_KEYS, Landing, needed, table


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    rows = draw(st.integers(1, 900))
    ends = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=6))})
    found = draw(st.permutations(list(pairwise(ends))))
    start = draw(st.integers(0, rows - 1))
    return list(found), start, draw(st.integers(start + 1, rows))


@given(copies())
def test_a_tile_waits_for_every_copy_of_its_keys_and_for_none_far_away(
    drawn: tuple[list[tuple[int, int]], int, int],
) -> None:
    each, start, stop = drawn
    numbers = needed([Landing(n, *pair) for n, pair in enumerate(each, 1)], start, stop)
    for first in range(stop - start):
        number = numbers[first // GRANULE]
        begin = start + first
        tile = range(begin, min(stop, begin + MOST_KEYS))
        waits = [n for n, (a, b) in enumerate(each, 1) if a < tile.stop and tile.start < b]
        assert number >= max(waits, default=0)
        near = range(begin - GRANULE, min(stop, begin + MOST_KEYS + 2 * GRANULE))
        allowed = [n for n, (a, b) in enumerate(each, 1) if a < near.stop and near.start < b]
        assert number <= max(allowed, default=0)


def test_tiles_of_keys_that_are_there_wait_for_nothing() -> None:
    assert needed([Landing(1, 640, 704)], 0, 704) == [0] * 6 + [1] * 5
    assert needed([], 0, 10) == [0]


def test_a_table_has_the_numbers_of_each_head() -> None:
    heads = [[Landing(1, 0, 70)], [Landing(2, 0, 30), Landing(3, 30, 70)]]
    assert table(heads, 0, 70) == [2, 1, 1, 3, 3]
    assert table(heads[:1], 0, 70) == [0, 1, 1]
