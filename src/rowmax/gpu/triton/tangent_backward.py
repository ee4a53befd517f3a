"""The backward of the tangent: the numbers of rows, then kernels as those of ``backward.py``.

The gradients of an input and of its tangent come from one kernel, which computes those that are
wanted. No sum has more than one program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...call.inputs import Cotangents, Gradients, Results, Tangents, Wanted, WantedSecond
from ...call.problem import Problem, Tensors
from .. import preprocess
from ..kernel_args import PARAMETER_ROWS, aligned, prepared
from ..launch import launch
from ..tiles import Tiles
from .backward import bias_sum, summed
from .tangent import named
from .tangent_dbias import TANGENT_DBIAS
from .tangent_dheads import TANGENT_DHEADS
from .tangent_dkdv import TANGENT_DK, TANGENT_DKDV, TANGENT_DV
from .tangent_dq import TANGENT_DQ
from .tangent_rows import row_numbers

#: bytes of the widest head for which one kernel holds the sums of keys: two sums, or more
TWO_UP_TO, ALL_UP_TO = 256, 128
#: the gradients of an input and of its tangent
Both = tuple[Tensor | None, Tensor | None]
_NEITHER: Both = (None, None)


class Given(NamedTuple):
    """The arguments of each kernel of gradients."""

    problem: Problem
    tensors: Tensors
    tiles: Tiles | None
    read: dict[str, Any]  # the tensors other than inputs, by name


def tangent_backward(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: Results,
    cotangents: Cotangents,
    wanted: WantedSecond,
    tiles: Tiles | None = None,
) -> tuple[Gradients, Gradients]:
    """Return the wanted gradients of inputs and of tangents; ``tiles`` overrides the tables."""
    tensors = prepared(tensors)
    out = results.out
    if not results.lse.numel() or not any((*wanted.inputs, *wanted.tangents)):
        return _zeros(tensors, wanted.inputs), _zeros(tensors, wanted.tangents)
    e, a, g, at = cotangents
    made = {name: x.contiguous() for name, x in results._asdict().items()}
    rows = {
        "dout": None if e is None else aligned(e),
        "dtout": out.new_zeros(out.shape) if g is None else aligned(g),
        "rest": preprocess.row_sums(problem, tensors, made["lse"], tiles),
    }
    lse_rows = {"dlse": a, "dtlse": at}
    lse_rows = {name: None if x is None else x.contiguous() for name, x in lse_rows.items()}
    along = named(tangents)
    both = Wanted(*(x or y for x, y in zip(*wanted, strict=True)))
    numbers, dsink, dtsink = row_numbers(
        problem, tensors, along["tsink"], made | rows | lse_rows, both.sink, tiles
    )
    along.pop("tsink")
    given = Given(problem, tensors, tiles, {**along, **rows, **numbers, "tlse": made["tlse"]})
    how = bias_sum(problem) if both.bias else None
    dk, dtk, dv, dtv, dbias = key_gradients(given, wanted, how)
    dq, of_queries = query_gradients(given, wanted, how)
    dbias = bias_gradients(given) if how == "tiles" else of_queries or dbias or _NEITHER
    dheads = head_gradients(given) if both.heads else _NEITHER
    found = (dq, (dk, dtk), (dv, dtv), dbias, (dsink, dtsink), dheads)
    first, second = zip(*found, strict=True)
    return _kept(first, wanted.inputs), _kept(second, wanted.tangents)


def key_gradients(given: Given, wanted: WantedSecond, how: str | None) -> tuple[Any, ...]:
    """Return (dk, dtk, dv, dtv, those of a bias that broadcasts over queries or None)."""
    problem, tensors, tiles, read = given
    first, second = wanted
    k, v, q = tensors.k, tensors.v, tensors.q
    of_k = {"dk": first.k, "dtk": second.k}
    of_v = {"dv": first.v, "dtv": second.v}
    of_k = {name: q.new_empty(k.shape) if want else None for name, want in of_k.items()}
    of_v = {name: q.new_empty(v.shape) if want else None for name, want in of_v.items()}
    cols: dict[str, Tensor] = {}
    if how == "cols":
        shape = (problem.batch, problem.hq, problem.nk)
        cols = {name: read["delta"].new_zeros(shape) for name in ("dbias_cols", "dtbias_cols")}
    want_k, want_v = any(present(of_k)) or bool(cols), any(present(of_v))
    if k.numel() or v.numel():
        count = sum((*present(of_k), *present(of_v)))
        width = max(problem.d, problem.dv) * problem.dtype.itemsize
        if want_k and want_v and width <= (TWO_UP_TO if count == 2 else ALL_UP_TO):
            launch(TANGENT_DKDV, problem, tensors, tiles, {**read, **of_k, **of_v, **cols})
        else:
            if want_k:
                launch(TANGENT_DK, problem, tensors, tiles, {**read, **of_k, **cols})
            if want_v:
                launch(TANGENT_DV, problem, tensors, tiles, {**read, **of_v})
    dbias = tuple(summed(x.unsqueeze(2), tensors.bias) for x in cols.values()) or None
    return *of_k.values(), *of_v.values(), dbias


def present(made: dict[str, Tensor | None]) -> list[bool]:
    """Return True for each tensor that there is."""
    return [x is not None for x in made.values()]


def query_gradients(given: Given, wanted: WantedSecond, how: str | None) -> tuple[Both, Any]:
    """Return (those of q, those of a bias that broadcasts over keys or nothing, or None)."""
    problem, tensors, tiles, read = given
    q, bias = tensors.q, tensors.bias
    made: dict[str, Tensor | None] = {
        name: q.new_empty(q.shape) if want else None
        for name, want in (("dq", wanted.inputs.q), ("dtq", wanted.tangents.q))
    }
    of_bias: dict[str, Tensor] = {}
    if how == "direct":
        assert bias is not None
        gaps = problem.masked or problem.varlen  # tiles that no program visits
        new = bias.new_zeros if gaps else bias.new_empty
        of_bias = {name: new(bias.shape) for name in ("dbias", "dtbias")}
    elif how == "rows":
        shape = (problem.batch, problem.hq, problem.nq)
        of_bias = {x: read["delta"].new_zeros(shape) for x in ("dbias_rows", "dtbias_rows")}
    if of_bias or any(present(made)):
        launch(TANGENT_DQ, problem, tensors, tiles, {**read, **made, **of_bias})
    both = tuple(of_bias.values())
    if how == "rows":
        both = tuple(summed(x.unsqueeze(3), bias) for x in both)
    return (made["dq"], made["dtq"]), both or None


def bias_gradients(given: Given) -> Both:
    """Return those of a bias that broadcasts over the batch or the heads alone."""
    problem, tensors, tiles, read = given
    assert tensors.bias is not None
    dbias, dtbias = (tensors.bias.new_empty(tensors.bias.shape) for _ in range(2))
    if dbias.numel():
        made = {**read, "dbias": dbias, "dtbias": dtbias}
        launch(TANGENT_DBIAS, problem, tensors, tiles, made)
    return dbias, dtbias


def head_gradients(given: Given) -> Both:
    """Return those of the parameters of heads, ``[P, Hq]`` each."""
    problem, tensors, tiles, read = given
    assert tensors.heads is not None
    count = tensors.heads.shape[0]
    shape = (*problem.lse_shape, PARAMETER_ROWS)
    dheads, dtheads = (read["delta"].new_empty(shape) for _ in range(2))
    made = {**read, "dheads": dheads, "dtheads": dtheads}
    launch(TANGENT_DHEADS, problem, tensors, tiles, made)
    first, second = (x.sum((0, 2)).T[:count].contiguous() for x in (dheads, dtheads))
    return first, second


def _zeros(tensors: Tensors, wanted: Wanted) -> Gradients:
    """Return zeros for the wanted gradients."""
    both = zip(wanted, tensors, strict=False)
    return Gradients(*(x.new_zeros(x.shape) if w and x is not None else None for w, x in both))


def _kept(found: tuple[Tensor | None, ...], wanted: Wanted) -> Gradients:
    """Return the wanted ones of the gradients that were computed."""
    return Gradients(*(x if w else None for x, w in zip(found, wanted, strict=True)))
