"""The backward of the tangent: the numbers of rows, then kernels as those of ``backward.py``.

The gradients of an input and of its tangent come from one kernel, which computes those that are
wanted. No sum has more than one program.
"""

from __future__ import annotations

from torch import Tensor

from ...call.inputs import Cotangents, Gradients, Results, Tangents, Wanted, WantedSecond
from ...call.problem import Problem, Tensors, zero_gradients
from .. import preprocess
from ..kernel_args import aligned, prepared
from ..launch import launch
from ..tiles import Tiles
from .backward import Given, bias_gradients, bias_memory, bias_sum, head_gradients
from .tangent import named
from .tangent_dbias import TANGENT_DBIAS
from .tangent_dheads import TANGENT_DHEADS
from .tangent_dkdv import TANGENT_DK, TANGENT_DKDV, TANGENT_DV
from .tangent_dq import TANGENT_DQ
from .tangent_rows import TANGENT_ROWS

#: bytes of the widest head for which one kernel holds the sums of keys: two sums, or more
TWO_UP_TO, ALL_UP_TO = 256, 128
#: the gradients of an input and of its tangent, by the marks of their names
_MARKS = ("d", "dt")
_NEITHER = (None, None)
#: gradients by name, None for those that are not wanted
Memory = dict[str, Tensor | None]


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
        first, second = (zero_gradients(problem, tensors, want) for want in wanted)
        return first, second
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
    tsink = along.pop("tsink")
    sinks = {"sink": tensors.sink, "tsink": tsink} if both.sink else {}
    names, read = ("lse2", "delta", "tdelta"), made | rows | lse_rows
    numbers, dsinks = preprocess.row_vectors(
        TANGENT_ROWS, problem, tensors, read, names, sinks, tiles
    )
    given = Given(problem, tensors, tiles, {**along, **rows, **numbers, "tlse": made["tlse"]})
    how = bias_sum(problem) if both.bias else None
    sums = bias_memory(given, how, _MARKS)
    of_k, of_v = key_gradients(given, wanted, sums if how == "cols" else {})
    of_q = _wanted_memory("q", tensors, wanted)
    of_bias = sums if how in ("direct", "rows") else {}
    if of_bias or any(_present(of_q)):
        launch(TANGENT_DQ, problem, tensors, tiles, {**given.read, **of_q, **of_bias})
    found = (
        *(x.values() for x in (of_q, of_k, of_v)),
        bias_gradients(given, how, sums, TANGENT_DBIAS) or _NEITHER,
        dsinks or _NEITHER,
        head_gradients(given, TANGENT_DHEADS, _MARKS) if both.heads else _NEITHER,
    )
    first, second = zip(*found, strict=True)
    return _kept(first, wanted.inputs), _kept(second, wanted.tangents)


def key_gradients(
    given: Given, wanted: WantedSecond, sums: dict[str, Tensor]
) -> tuple[Memory, Memory]:
    """Return ((dk, dtk), (dv, dtv)); ``sums`` are those of the bias over queries, if any."""
    problem, tensors, tiles, read = given
    of_k, of_v = (_wanted_memory(name, tensors, wanted) for name in "kv")
    want_k, want_v = any(_present(of_k)) or bool(sums), any(_present(of_v))
    if tensors.k.numel() or tensors.v.numel():
        count = sum((*_present(of_k), *_present(of_v)))
        width = max(problem.d, problem.dv) * problem.dtype.itemsize
        if want_k and want_v and width <= (TWO_UP_TO if count == 2 else ALL_UP_TO):
            launch(TANGENT_DKDV, problem, tensors, tiles, {**read, **of_k, **of_v, **sums})
        else:
            if want_k:
                launch(TANGENT_DK, problem, tensors, tiles, {**read, **of_k, **sums})
            if want_v:
                launch(TANGENT_DV, problem, tensors, tiles, {**read, **of_v})
    return of_k, of_v


def _wanted_memory(name: str, tensors: Tensors, wanted: WantedSecond) -> Memory:
    """Return memory for the gradients of an input and of its tangent, None if not wanted."""
    like = getattr(tensors, name)
    pairs = zip(_MARKS, wanted, strict=True)
    return {
        mark + name: tensors.q.new_empty(like.shape) if getattr(want, name) else None
        for mark, want in pairs
    }


def _present(made: Memory) -> list[bool]:
    """Return True for each tensor that there is."""
    return [x is not None for x in made.values()]


def _kept(found: tuple[Tensor | None, ...], wanted: Wanted) -> Gradients:
    """Return the wanted ones of the gradients that were computed."""
    return Gradients(*(x if w else None for x, w in zip(found, wanted, strict=True)))
