"""The rules of bands: against every pair, and the same in every language that runs them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowmax.rules import band, bound

SMALL = st.integers(-9, 9)
LIMIT = st.none() | SMALL


def sees(x: int, y: int, shift: int, back: int | None, ahead: int | None) -> bool:
    at = y - (x + shift)
    return (back is None or -back <= at) and (ahead is None or at <= ahead)


@given(
    st.integers(0, 9), st.integers(0, 5), SMALL, LIMIT, LIMIT, st.integers(0, 12), st.integers(1, 5)
)
def test_ranges_and_tiles_are_those_of_every_pair(
    x0: int, more: int, shift: int, back: int | None, ahead: int | None, end: int, block: int
) -> None:
    xs, given = range(x0, x0 + more + 1), (x0, x0 + more, shift, back, ahead, end)
    low, high = band.any_range(*given)
    low_all, high_all = band.all_range(*given)
    some = {y for y in range(end) if any(sees(x, y, shift, back, ahead) for x in xs)}
    every = {y for y in range(end) if all(sees(x, y, shift, back, ahead) for x in xs)}
    assert every == set(range(low_all, high_all))
    if back is None or ahead is None or back + ahead >= 0:  # else no x sees any y
        assert some == set(range(low, high))
    else:
        assert some == set()
    first, last = band.touched_tiles(low, high, block)
    full, full_end = band.filled_tiles(low_all, high_all, block, first, last)
    assert first <= full <= full_end <= last
    assert some <= set(range(first * block, last * block))
    assert set(range(full * block, full_end * block)) <= every


@given(st.integers(0, 9), st.integers(0, 5), SMALL, LIMIT, SMALL, st.integers(0, 12), SMALL)
def test_ranges_of_a_prefix_are_those_of_every_pair(
    x0: int, more: int, shift: int, left: int | None, right: int, end: int, prefix: int
) -> None:
    """From both sides: the keys in [0, end) that queries see, and the queries that see keys."""
    xs = range(x0, x0 + more + 1)

    def seen(i: int, j: int, shift: int) -> bool:
        at = j - (i + shift)
        return (left is None or -left <= at) and (at <= right or j < prefix)

    given = (x0, x0 + more, shift, left, right, end, prefix)
    every = {y for y in range(end) if all(seen(x, y, shift) for x in xs)}
    some = {y for y in range(end) if any(seen(x, y, shift) for x in xs)}
    assert every == set(range(*band.all_range(*given)))
    assert some <= set(range(*band.any_range(*given)))
    if left is None:
        assert some == set(range(*band.any_range(*given)))
    backs = (band.back_of_key(x, prefix, right, 40) for x in (xs[0], xs[-1]))
    one, all_of_them = (
        rule(x0, x0 + more, shift, back, left, end)
        for rule, back in zip((band.any_range, band.all_range), backs, strict=True)
    )
    every = {y for y in range(end) if all(seen(y, x, -shift) for x in xs)}
    some = {y for y in range(end) if any(seen(y, x, -shift) for x in xs)}
    assert every == set(range(*all_of_them))
    assert some <= set(range(*one))


def test_tensors_of_positions_have_the_ranges_of_their_rows() -> None:
    rule = bound(
        band.any_range,
        max=lambda x, y: x.clamp(min=y),
        min=lambda x, y: x.clamp(max=y),
    )
    rows = torch.arange(6)
    low, high = rule(rows, rows, 2, 3, 1, 7)
    expected = [band.any_range(i, i, 2, 3, 1, 7) for i in range(6)]
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == expected


def test_a_rule_is_bound_only_to_names_that_it_uses() -> None:
    with pytest.raises(NameError, match="any_range uses no tanh"):
        bound(band.any_range, tanh=abs)
