"""The backward: Delta, then dK and dV, then dQ, each written once.

With a bias the weights of rows whose lse is far from 0 are summed before (``preprocess.py``).

Programs that share a sum store parts, which are added in order (``key_parts.py``). So every
gradient is bitwise the same from run to run. The gradient of a bias that broadcasts is a sum. The
kernels that stream queries or keys sum over them. A kernel of its own, or torch on O(N) partial
sums, sums over the batch and heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...call.problem import Gradients, Problem, Tensors, Wanted, zero_gradients
from .. import preprocess, short_keys
from ..kernel_args import PARAMETER_ROWS, aligned, prepared
from ..launch import JobSpec, launch
from ..tiles import BOTH_UP_TO, Tiles
from . import short
from .backward_dbias import DBIAS
from .backward_dheads import DHEADS
from .backward_dkdv import DK, DKDV, DV
from .backward_dq import DQ
from .key_parts import launch_in_parts


class Given(NamedTuple):
    """The arguments of each kernel of gradients."""

    problem: Problem
    tensors: Tensors
    tiles: Tiles | None
    read: dict[str, Any]  # the tensors that all of them read, other than inputs, by name


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    tiles: Tiles | None = None,
) -> Gradients:
    """Return the wanted gradients; ``tiles`` overrides the tables."""
    short_tiles = short_keys.tiles_of(problem, wanted) if tiles is None else None
    if short_tiles is not None and lse.numel() and any(wanted):
        return short.backward(problem, tensors, out, lse, dout, dlse, wanted, short_tiles)
    tensors = prepared(tensors)
    out, dout = out.contiguous(), aligned(dout)
    if not lse.numel() or not any(wanted):
        return zero_gradients(problem, tensors, wanted)
    lse = lse.contiguous()
    read = {"dout": dout, "rest": preprocess.row_sums(problem, tensors, lse, tiles)}
    rows = {"out": out, "lse": lse, "dlse": None if dlse is None else dlse.contiguous()}
    sinks = {"sink": tensors.sink} if wanted.sink else {}
    vectors, dsink = preprocess.row_vectors(
        preprocess.DELTA, problem, tensors, read | rows, ("lse2", "delta"), sinks, tiles
    )
    read |= vectors
    given = Given(problem, tensors, tiles, read)
    how = bias_sum(problem) if wanted.bias else None
    sums = bias_memory(given, how)
    dq = dk = dv = None
    if wanted.k or wanted.v or how == "cols":
        dk, dv = key_gradients(given, sums if how == "cols" else {})
    if wanted.q or how in ("direct", "rows"):
        dq = tensors.q.new_empty(tensors.q.shape)
        of_bias = sums if how in ("direct", "rows") else {}
        launch(DQ, problem, tensors, tiles, {**read, "dq": dq, **of_bias})
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        *(bias_gradients(given, how, sums, DBIAS) or (None,)),
        dsink[0] if dsink else None,
        *(head_gradients(given, DHEADS) if wanted.heads else ()),
    )


def bias_sum(problem: Problem) -> str:
    """Return how the gradient of the bias is summed over its broadcast dimensions.

    "direct": there are none; "rows": over keys, "cols": over queries, by partial sums for each
    head and sequence; "tiles": over the batch or the heads alone.
    """
    assert problem.bias is not None
    b, h, i, j = problem.bias
    if j != problem.nk:
        return "rows"
    if i != problem.nq:
        return "cols"
    whole = b == problem.batch and h == problem.hq
    return "direct" if whole else "tiles"


def key_gradients(given: Given, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (dk, dv); ``sums`` are those of the bias over queries, if any."""
    problem, tensors, tiles, read = given
    dk, dv = (  # kernels round to the dtype that they store to
        t.new_empty(t.shape, dtype=problem.gradient_dtype(name, t))
        for name, t in (("k", tensors.k), ("v", tensors.v))
    )
    if dk.numel() and max(problem.d, problem.dv) > BOTH_UP_TO:
        launch_in_parts(DK, problem, tensors, tiles, {**read, "dk": dk, **sums}, read["delta"])
        launch_in_parts(DV, problem, tensors, tiles, {**read, "dv": dv}, read["delta"])
    elif dk.numel():
        made = {**read, "dk": dk, "dv": dv, **sums}
        launch_in_parts(DKDV, problem, tensors, tiles, made, read["delta"])
    return dk, dv


# --- gradients of the bias and of heads, and those of their tangents: by "d" and "dt" ------------


def bias_memory(
    given: Given, how: str | None, marks: tuple[str, ...] = ("d",)
) -> dict[str, Tensor]:
    """Return the memory that kernels write: gradients of the bias, or sums over keys or queries."""
    problem, tensors, _, read = given
    if how is None or tensors.bias is None:
        return {}
    if how in ("rows", "cols"):
        shape = (problem.batch, problem.hq, problem.nq if how == "rows" else problem.nk)
        return {f"{mark}bias_{how}": read["delta"].new_zeros(shape) for mark in marks}
    gaps = how == "direct" and (problem.masked or problem.varlen)  # tiles that no program visits
    new = tensors.bias.new_zeros if gaps else tensors.bias.new_empty
    return {f"{mark}bias": new(tensors.bias.shape) for mark in marks}


def bias_gradients(
    given: Given, how: str | None, sums: dict[str, Tensor], tiled: JobSpec
) -> tuple[Tensor, ...]:
    """Return the gradients of the bias from ``bias_memory``; ``tiled`` computes those by tiles."""
    problem, tensors, tiles, read = given
    if how in ("rows", "cols"):
        bias, axis = tensors.bias, 3 if how == "rows" else 2
        return tuple(_summed(x.unsqueeze(axis), bias) for x in sums.values())
    if how == "tiles" and next(iter(sums.values())).numel():
        launch(tiled, problem, tensors, tiles, {**read, **sums})
    return tuple(sums.values())


def _summed(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Return the partial sums ``[B, H, Nq|1, Nk|1]``, summed to the shape of the bias."""
    assert bias is not None
    over = [d for d in range(4) if bias.shape[d] == 1 and parts.shape[d] != 1]
    return (parts.sum(over, keepdim=True) if over else parts).to(bias.dtype)


def head_gradients(
    given: Given, spec: JobSpec, marks: tuple[str, ...] = ("d",)
) -> tuple[Tensor, ...]:
    """Return the gradients of the parameters of heads, ``[P, Hq]`` each."""
    problem, tensors, tiles, read = given
    assert tensors.heads is not None
    shape = (*problem.lse_shape, PARAMETER_ROWS)
    rows = {f"{mark}heads": read["delta"].new_empty(shape) for mark in marks}
    launch(spec, problem, tensors, tiles, {**read, **rows})
    count = tensors.heads.shape[0]
    return tuple(x.sum((0, 2)).T[:count].contiguous() for x in rows.values())
