"""The head terms of a row, and the gradients of their parameters, as loops that Numba compiles.

The text of a function is written for the terms of ``inputs.HEAD_TERMS``. Each term is a loop over
the columns of a row, behind a test that the call has it.
"""

from __future__ import annotations

from textwrap import indent
from typing import Any

import numpy as np

from ..call.inputs import HEAD_TERMS, HeadTerm
from ..rules import score
from ..rules.score import ScoreTerms
from ..rules.softmax import LOG2E
from .functions import STRICT, SUMS, array, inner
from .rules import formula_of, of_texts

_BENT = {name: term for name, term in HEAD_TERMS.items() if not term.added}
_ADDED = {name: term for name, term in HEAD_TERMS.items() if term.added}
_score, _product, _gradient, _tangent = map(
    of_texts, (score.score, score.product_gradient, score.head_gradient, score.score_tangent)
)


@inner
def parameter(call, number, h, like):
    """Return parameter ``number``, from 1 on, of head h, in the units of the scores."""
    unit = 1.0 if call.natural else LOG2E
    at = (number - 1) * call.hq + h
    return like.dtype.type(array(call.heads.address, call.hq * number, like)[at] * unit)


@inner
def tangent_of_parameter(call, number, h, like):
    """Return the tangent of parameter ``number``, from 1 on, of head h, natural."""
    return array(call.theads.address, call.hq * number, like)[(number - 1) * call.hq + h]


#: the functions that the loops call
_space: dict[str, Any] = {"np": np, "array": array}
_space |= {"parameter": parameter, "tangent_of_parameter": tangent_of_parameter}


def _terms(term: HeadTerm, names: dict[str, Any]) -> ScoreTerms:
    """Return the parameters of one term, and its distance, from the names of a formula."""
    wanted = (*term.parameters, *(("distance",) if term.distance else ()))
    return ScoreTerms(**{name: names[name] for name in wanted})


def _declare(kind: str, name: str, term: HeadTerm, first: tuple[str, ...], function: Any) -> str:
    """Compile a formula of ``first``, the parameters and the distance; return the text of a call.

    The numbers of ``first`` are those of column j of arrays of these names.
    """
    more = (*term.parameters, *(("distance",) if term.distance else ()))
    called = f"{kind}_{name}"
    _space[called] = formula_of(called, (*first, *more), function)
    return f"{called}({', '.join((*(f'{x}[j]' for x in first), *more))})"


def _loop(name: str, term: HeadTerm, like: str, body: str, of: str = "parameter") -> str:
    """Return the text of a loop over columns, with the parameters of a term or their tangents."""
    lines = [f"if call.head_{term.parameters[0]}:"]
    lines += [f"    {p} = {of}(call, call.head_{p}, h, {like})" for p in term.parameters]
    lines += [f"    for j in range({like}.size):"]
    if term.distance:
        lines += [f"        distance = {like}.dtype.type(abs(at - j))"]
    return "\n".join([*lines, indent(body, " " * 8)])


def _function(name: str, arguments: str, parts: list[str], fastmath: Any) -> Any:
    """Compile a function with these parts."""
    body = indent("\n".join(parts) or "pass", "    ")
    exec(f"def {name}({arguments}):\n{body}\n", _space)
    return inner(fastmath=fastmath)(_space[name])


def _added(name: str, term: HeadTerm) -> str:
    call = _declare("add", name, term, ("row",), lambda **n: _score(n["row"], _terms(term, n))[0])
    return _loop(name, term, "row", f"row[j] = {call}")


def _added_tangents(name: str, term: HeadTerm) -> str:
    def tangent(**n: Any) -> Any:
        terms = _terms(term, n)  # the rule reads the distance of p and the parameters of tp
        return _tangent(n["row"], None, ScoreTerms(distance=terms.distance), terms)

    call = _declare("tangent", name, term, ("row",), tangent)
    return _loop(name, term, "row", f"row[j] = {call}", "tangent_of_parameter")


def _bent(name: str, term: HeadTerm) -> str:
    call = _declare("bend", name, term, ("row",), lambda **n: _score(n["row"], _terms(term, n)))
    text = f"s, z = {call}\nrow[j] = s\nif y.size:\n    y[j] = z"
    return _loop(name, term, "row", text)


def _through(name: str, term: HeadTerm) -> str:
    call = _declare(
        "through", name, term, ("ds", "y"), lambda **n: _product(n["ds"], n["y"], _terms(term, n))
    )
    return _loop(name, term, "ds", f"ds[j] = ds[j] if ds[j] == 0 else {call}")


def _gradients(name: str, term: HeadTerm) -> str:
    parts = []
    for p in term.parameters:
        call = _declare(
            f"gradient_{p}", name, term, ("ds", "x", "y"),
            lambda p=p, **n: _gradient(
                n["ds"], n["x"], n["y"], _terms(term, n)._replace(scale=1), p
            ),
        )  # fmt: skip
        loop = _loop(name, term, "ds", f"if ds[j] != 0:\n    total += {call}")
        at = f"p * to.p + s * to.b + (call.head_{p} - 1) * to.t + h"
        to = f"array(to.address + 8 * ({at}), 1, np.float64)"
        store = f"    {to}[0] += total"
        parts += ["total = ds.dtype.type(0)", loop, store]
    return "\n".join(parts)


def _of_all(name: str, arguments: str, part: Any, terms: dict[str, HeadTerm], fast: Any) -> Any:
    """Compile the function with a part for each term."""
    return _function(name, arguments, [part(n, term) for n, term in terms.items()], fast)


#: add the terms after the bias to a row; its column 0 is ``at`` keys away
add_heads = _of_all("add_heads", "row, call, h, at", _added, _ADDED, STRICT)
#: add the tangents of these terms to a row of tangents, natural
add_head_tangents = _of_all(
    "add_head_tangents", "row, call, h, at", _added_tangents, _ADDED, STRICT
)
#: replace a row of ``scale q.k`` by its functions; keep y, if wanted
bend_by_heads = _of_all("bend_by_heads", "row, y, call, h", _bent, _BENT, STRICT)
#: replace dS by dX where a function of the product has bent it
through_heads = _of_all("through_heads", "ds, y, call, h", _through, _BENT, STRICT)
#: add a row's part to the gradients of the parameters of head h, in ``to``
add_to_dheads = _of_all(
    "add_to_dheads", "ds, x, y, call, to, s, h, at, p", _gradients, HEAD_TERMS, SUMS
)
