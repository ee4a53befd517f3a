"""The rules as Numba compiles them.

A rule of positions or of 64-bit words is compiled as it stands. A rule of numbers runs once on
names and returns a formula as text, which is compiled. So an absent term costs nothing, and a
constant has the dtype of the first argument: with a Python number the arithmetic would be double.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from ..rules import band, bound, dropout, row_stats, score, softmax, tangent
from ..rules.score import ScoreTerms
from .functions import STRICT, exp2, inner, number, tanh


class _Formula:
    """The text of a number; operators return longer texts."""

    def __init__(self, text: str) -> None:
        self.text = text


def _text(x: object) -> str:
    return x.text if isinstance(x, _Formula) else f"number({x!r}, like)"


def _written(pattern: str) -> Callable[..., _Formula]:
    """Return a function that puts the texts of its arguments into the pattern."""
    return lambda *x: _Formula(pattern.format(*map(_text, x)))


for _name, _pattern in {
    "__add__": "({} + {})",
    "__sub__": "({} - {})",
    "__rsub__": "({1} - {0})",
    "__mul__": "({} * {})",
    "__truediv__": "({} / {})",
    "__eq__": "({} == {})",
    "__gt__": "({} > {})",
    "__lt__": "({} < {})",
    "__and__": "({} and {})",
}.items():
    setattr(_Formula, _name, _written(_pattern))

_FUNCTIONS = {
    "max": _written("max({}, {})"),
    "tanh": _written("tanh({})"),
    "exp2": _written("exp2({})"),
    "where": _written("({1} if {0} else {2})"),
}


def of_texts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule with functions of texts instead of numbers."""
    names = set(rule.__code__.co_names)
    return bound(rule, **{name: f for name, f in _FUNCTIONS.items() if name in names})


def formula(function: Callable[..., Any]) -> Any:
    """Compile the formula that the function returns for the names of its arguments."""
    names = tuple(inspect.signature(function).parameters)
    return formula_of(function.__name__, names, lambda **texts: function(*texts.values()))


def formula_of(name: str, arguments: tuple[str, ...], function: Callable[..., Any]) -> Any:
    """Compile the formula that the function, called by name, returns for these arguments."""
    results = function(**{argument: _Formula(argument) for argument in arguments})
    results = results if isinstance(results, tuple) else (results,)
    text = f"def {name}({', '.join(arguments)}):\n    like = {arguments[0]}\n"
    text += f"    return {', '.join(map(_text, results))}\n"
    space: dict[str, Any] = {"number": number, "tanh": tanh, "exp2": exp2, "inf": math.inf}
    exec(text, space | {"__name__": __name__}, space)
    return inner(fastmath=STRICT)(space[name])


any_range = inner(band.any_range)

_score = of_texts(score.score)


@formula
def capped(x, cap):
    """Return (s, y) of ``x = scale q.k / c`` under a softcap."""
    return _score(x, ScoreTerms(inner=1, cap=cap))


@formula
def biased(x, bias):
    """Return the score x plus a bias."""
    return _score(x, ScoreTerms(bias=bias))[0]


@formula
def through_softcap(ds, y):
    """Return dX of dS under a softcap."""
    return of_texts(score.product_gradient)(ds, y, ScoreTerms(inner=1))


_score_tangent = of_texts(score.score_tangent)


@formula
def scaled_tangent(tx, scale):
    """Return s' of x' without a softcap, before the terms after it."""
    return _score_tangent(tx, None, ScoreTerms(scale=scale), ScoreTerms())


@formula
def capped_tangent(tx, y, cap):
    """Return s' of x' under a softcap, before the terms after it."""
    return _score_tangent(tx, y, ScoreTerms(inner=1, cap=cap), ScoreTerms())


@formula
def curved_by_softcap(ds, dts, tx, y):
    """Return (dX, dX') of dS and dS' under a softcap."""
    terms = ScoreTerms(inner=1)
    dx = of_texts(score.product_curvature)(ds, dts, tx, y, terms)
    return dx, of_texts(score.product_gradient)(dts, y, terms)


moved = formula(of_texts(softmax.moved))
with_sink = formula(of_texts(softmax.with_sink))
score_gradient = formula(of_texts(softmax.score_gradient))
natural_weight = formula(of_texts(row_stats.natural_weight))
without_weights = formula(of_texts(row_stats.without_weights))
sink_in_tangent = formula(of_texts(tangent.sink_in_tangent))
out_tangent = formula(of_texts(tangent.out_tangent))
tangent_base = formula(of_texts(tangent.tangent_base))
score_gradients = formula(of_texts(tangent.score_gradients))


@njit(inline="always")
def _multiply(a, b):
    product = np.uint64(a) * np.uint64(b)
    return product >> np.uint64(32), product & np.uint64(dropout.WORD)


# inlined, so that the compiler vectorises the eight calls of 64 keys
_round = njit(inline="always")(bound(dropout.philox_round, multiply=_multiply))
philox = njit(inline="always")(
    bound(
        dropout.philox_rounds,
        philox_round=_round,
        INCREMENT_0=np.uint64(dropout.INCREMENT_0),
        INCREMENT_1=np.uint64(dropout.INCREMENT_1),
        WORD=np.uint64(dropout.WORD),
    )
)
