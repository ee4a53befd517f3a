"""The backward: Delta, then dK and dV, then dQ, each written once by one program.

With a bias the weights of rows whose lse is far from 0 are summed before (``preprocess.py``).

No sum has more than one program, so that every gradient is bitwise the same from run to run. The
gradient of a bias that broadcasts is a sum. The kernels that stream queries or keys sum over them.
A kernel of its own, or torch on O(N) partial sums, sums over the batch and heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...call.problem import Gradients, Problem, Tensors, Wanted
from .. import preprocess, short_keys
from ..kernel_args import PARAMETER_ROWS, aligned, prepared
from ..launch import launch
from ..tiles import BOTH_UP_TO, Tiles
from . import short
from .backward_dbias import DBIAS
from .backward_dheads import DHEADS
from .backward_dkdv import DK, DKDV, DV
from .backward_dq import DQ

#: tensors that all kernels of gradients read, other than inputs
Read = dict[str, Any]


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
        return Gradients(
            **{
                name: x.new_zeros(x.shape, dtype=problem.gradient_dtype(name, x))
                for name, want in wanted._asdict().items()
                if want
                for x in [getattr(tensors, name)]
            }
        )
    lse = lse.contiguous()
    rest = preprocess.row_sums(problem, tensors, lse, tiles)
    lse2, delta, dsink = preprocess.delta(
        problem, tensors, out, lse, rest, dout, dlse, wanted.sink, tiles
    )
    read = {"dout": dout, "lse2": lse2, "rest": rest, "delta": delta}
    given = problem, tensors, tiles, read
    how = bias_sum(problem) if wanted.bias else None
    dq = dk = dv = dbias = None
    if wanted.k or wanted.v or how == "cols":
        dk, dv, dbias = key_gradients(*given, how)
    if wanted.q or how in ("direct", "rows"):
        dq, of_queries = query_gradients(*given, how)
        dbias = dbias if of_queries is None else of_queries
    if how == "tiles":
        dbias = bias_gradient(*given)
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        dbias,
        dsink,
        head_gradients(*given) if wanted.heads else None,
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


def key_gradients(
    problem: Problem, tensors: Tensors, tiles: Tiles | None, read: Read, how: str | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (dk, dv, dbias): dbias of a bias that broadcasts over queries, else None."""
    dk, dv = (  # kernels round to the dtype that they store to
        t.new_empty(t.shape, dtype=problem.gradient_dtype(name, t))
        for name, t in (("k", tensors.k), ("v", tensors.v))
    )
    cols = None
    if how == "cols":
        cols = read["delta"].new_zeros((problem.batch, problem.hq, problem.nk))
    if dk.numel() and max(problem.d, problem.dv) > BOTH_UP_TO:
        launch(DK, problem, tensors, tiles, {**read, "dk": dk, "dbias_cols": cols})
        launch(DV, problem, tensors, tiles, {**read, "dv": dv})
    elif dk.numel():
        launch(DKDV, problem, tensors, tiles, {**read, "dk": dk, "dv": dv, "dbias_cols": cols})
    return dk, dv, None if cols is None else summed(cols.unsqueeze(2), tensors.bias)


def query_gradients(
    problem: Problem, tensors: Tensors, tiles: Tiles | None, read: Read, how: str | None
) -> tuple[Tensor, Tensor | None]:
    """Return (dq, dbias): dbias of a bias that broadcasts over keys or nothing, else None."""
    q, bias = tensors.q, tensors.bias
    dq, dbias, rows = q.new_empty(q.shape), None, None
    if how == "direct":
        assert bias is not None
        gaps = problem.masked or problem.varlen  # tiles that no program visits
        dbias = bias.new_zeros(bias.shape) if gaps else bias.new_empty(bias.shape)
    elif how == "rows":
        rows = read["delta"].new_zeros((problem.batch, problem.hq, problem.nq))
    launch(DQ, problem, tensors, tiles, {**read, "dq": dq, "dbias": dbias, "dbias_rows": rows})
    return dq, dbias if rows is None else summed(rows.unsqueeze(3), bias)


def bias_gradient(problem: Problem, tensors: Tensors, tiles: Tiles | None, read: Read) -> Tensor:
    """Return dbias of a bias that broadcasts over the batch or the heads alone."""
    assert tensors.bias is not None
    dbias = tensors.bias.new_empty(tensors.bias.shape)
    if dbias.numel():
        launch(DBIAS, problem, tensors, tiles, {**read, "dbias": dbias})
    return dbias


def head_gradients(problem: Problem, tensors: Tensors, tiles: Tiles | None, read: Read) -> Tensor:
    """Return the gradient of the parameters of heads, ``[P, Hq]``."""
    assert tensors.heads is not None
    dheads = read["delta"].new_empty((*problem.lse_shape, PARAMETER_ROWS))
    launch(DHEADS, problem, tensors, tiles, {**read, "dheads": dheads})
    return dheads.sum((0, 2)).T[: tensors.heads.shape[0]].contiguous()


def summed(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Return the partial sums ``[B, H, Nq|1, Nk|1]``, summed to the shape of the bias."""
    assert bias is not None
    over = [d for d in range(4) if bias.shape[d] == 1 and parts.shape[d] != 1]
    return (parts.sum(over, keepdim=True) if over else parts).to(bias.dtype)
