"""The rules as Numba compiles them: the numbers of the plain rules, in the dtype of the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmax.rules import band, dropout, score, softmax, tangent
from rowmax.rules.score import ScoreTerms

np = pytest.importorskip("numpy")
numba = pytest.importorskip("numba")
from rowmax.cpu import rules  # noqa: E402

FLOATS = {np.float32: 1e-5, np.float64: 1e-13}
NUMBERS = st.lists(st.floats(-8.0, 8.0, width=32), min_size=4, max_size=4)
WEIGHTS = st.one_of(st.just(0.0), st.floats(0.5, 8.0, width=32))
WORDS = st.integers(0, 2**32 - 1)

# each compiled rule, the plain one, and how many numbers they take
RULES = {
    "capped": (lambda x, cap: score.score(x, ScoreTerms(inner=1, cap=cap)), 2),
    "biased": (lambda x, bias: score.score(x, ScoreTerms(bias=bias))[0], 2),
    "through_softcap": (lambda ds, y: score.product_gradient(ds, y, ScoreTerms(inner=1)), 2),
    "moved": (softmax.moved, 2),
    "with_sink": (softmax.with_sink, 3),
    "score_gradient": (softmax.score_gradient, 3),
    "out_tangent": (tangent.out_tangent, 3),
}


@cache
def from_python(compiled: Any) -> Callable[..., Any]:
    """Return a function for calls from Python: compiled rules have none (``functions.inner``)."""
    return numba.njit(compiled.py_func)


def _checked(name: str, numbers: list[float], real: type) -> None:
    plain, count = RULES[name]
    given = [real(x) for x in numbers[:count]]
    got, want = from_python(getattr(rules, name))(*given), plain(*map(float, given))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        assert math.isclose(a, b, rel_tol=FLOATS[real], abs_tol=FLOATS[real]), (name, given)


@pytest.mark.parametrize("real", FLOATS)
@pytest.mark.parametrize("name", RULES)
@given(numbers=NUMBERS)
@settings(deadline=None)
def test_numbers(name: str, real: type, numbers: list[float]) -> None:
    _checked(name, numbers, real)


@pytest.mark.parametrize("real", FLOATS)
@given(weights=st.tuples(WEIGHTS, WEIGHTS), means=NUMBERS)
@settings(deadline=None)
def test_base_of_tangents(real: type, weights: tuple[float, float], means: list[float]) -> None:
    """The base is the mean of s' over all tiles, whatever it was before."""
    (l, tile_l), (mean, tile_mean, r, _) = weights, means
    given = [real(x) for x in (l, l * (mean - r), tile_l, tile_l * tile_mean, r)]
    got = from_python(rules.tangent_base)(*given)
    want = (l * mean + tile_l * tile_mean) / (l + tile_l) if l + tile_l else r
    assert math.isclose(got, want, rel_tol=FLOATS[real], abs_tol=8 * FLOATS[real])


@pytest.mark.parametrize("real", FLOATS)
def test_rows_that_have_seen_nothing(real: type) -> None:
    nothing = -math.inf
    _checked("moved", [nothing, nothing], real)
    _checked("moved", [nothing, 2.0], real)
    _checked("with_sink", [nothing, 0.0, nothing], real)
    _checked("with_sink", [nothing, 0.0, 3.0], real)
    _checked("with_sink", [3.0, 2.0, nothing], real)


@pytest.mark.parametrize("name", RULES)
def test_nothing_becomes_double(name: str) -> None:
    """A double in a loop of floats would halve its speed."""
    from numba import types

    compiled, count = getattr(rules, name), RULES[name][1]
    compiled.compile((types.float32,) * count)
    result = compiled.overloads[(types.float32,) * count].signature.return_type
    assert result == types.float32 or set(result.types) == {types.float32}


@given(st.lists(st.integers(-40, 40), min_size=5, max_size=5), st.integers(0, 60))
@settings(deadline=None)
def test_ranges(numbers: list[int], end: int) -> None:
    assert from_python(rules.any_range)(*numbers, end) == band.any_range(*numbers, end)


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
@settings(deadline=None)
def test_words(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    words = (tuple(map(np.uint64, x)) for x in (counter, key))
    got = from_python(rules.philox)(*words)
    assert tuple(map(int, got)) == dropout.philox_rounds(counter, key)
