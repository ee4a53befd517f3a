"""The backward: Delta, then dK and dV, then dQ, each written once by one program.

With a bias the weights of rows whose lse is far from 0 are summed before (``row_sums.py``).

Nothing is added to by more than one program, so that every gradient is bitwise the same from run
to run. Where a bias broadcasts, its gradient is a sum: over queries or keys within the kernels
that pass over them, over the batch and heads in a kernel of its own or by torch on O(N) partial
sums.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...call.problem import Gradients, Problem, Tensors, Wanted
from .bias_gradient import bias_gradient_kernel
from .bundles import (
    ROW_UNIT,
    Pointers,
    aligned,
    constants,
    contiguous_steps,
    dense_batch,
    numbers,
    pointers,
    precision_of,
    prepared,
    slots,
    steps,
    strides_of,
    together,
)
from .key_gradients import key_gradients_kernel
from .launch import Job, launch
from .maps import listed, order_steps, state_steps, tile_states, with_order
from .query_gradients import delta_kernel, query_gradients_kernel
from .row_sums import row_sums
from .tiles import BOTH_UP_TO, Tiles, columns, kind_of


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
    """The wanted gradients; ``tiles`` overrides the tables."""
    tensors = prepared(tensors)
    out, dout = out.contiguous(), aligned(dout)
    if not lse.numel() or not any(wanted):
        return Gradients(
            *(x.new_zeros(x.shape) if w else None for w, x in zip(wanted, tensors, strict=False))  # pyright: ignore
        )
    lse = lse.contiguous()
    rest = row_sums(problem, tensors, lse, tiles)
    lse2, delta, dsink = _delta(problem, tensors, out, lse, rest, dout, dlse, wanted.sink, tiles)
    t = pointers(tensors)._replace(dout=dout, lse2=lse2, rest=rest, delta=delta)
    how = bias_sum(problem) if wanted.bias else None
    dk = dv = cols = None
    if wanted.k or wanted.v or how == "cols":
        dk, dv, cols = _key_gradients(problem, tensors, t, how, tiles)
    dq = dbias = rows = None
    if wanted.q or how in ("direct", "rows"):
        dq, dbias, rows = _query_gradients(problem, tensors, t, how, tiles)
    if how == "tiles":
        dbias = _bias_gradient(problem, tensors, t, tiles)
    elif how == "rows" and rows is not None:
        dbias = _summed(rows.unsqueeze(3), tensors.bias)
    elif how == "cols" and cols is not None:
        dbias = _summed(cols.unsqueeze(2), tensors.bias)
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        dbias,
        dsink,
    )


def bias_sum(problem: Problem) -> str:
    """How the gradient of the bias is summed over what it broadcasts over.

    "direct": over nothing; "rows": over keys, "cols": over queries, with partial sums for each
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


def _summed(parts: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    over = [d for d in range(4) if bias.shape[d] == 1 and parts.shape[d] != 1]
    return (parts.sum(over, keepdim=True) if over else parts).to(bias.dtype)


# --- delta -------------------------------------------------------------------------------------


def _delta(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    want_sink: bool,
    tiles: Tiles | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(lse in the units of the scores, Delta - dlse, dsink)."""
    t = Pointers(tensors.q, None, None, out, lse, dout=dout, rest=rest)
    shape = (*lse.shape[:2], -(-problem.total_q // ROW_UNIT) * ROW_UNIT)
    t = t._replace(lse2=lse.new_empty(shape), delta=lse.new_empty(shape))
    t = t._replace(dlse=None if dlse is None else dlse.contiguous())
    parts: list[Tensor] = []

    def complete(job: Job, tensors: Tensors) -> Pointers:
        if not want_sink:
            return t
        shape = (dense_batch(problem), problem.hq, job.n.tiles)
        parts[:] = [out.new_empty(shape, dtype=torch.float32)]
        return t._replace(sink=tensors.sink, dsink=parts[0])

    launch("delta", problem, tensors, tiles, plan_delta, complete, dout)
    return t.lse2, t.delta, parts[0].sum((0, 2)) if parts else None


def plan_delta(problem: Problem, tensors: Tensors, tiles: Tiles, dout: Tensor) -> Job:
    given = {"out": contiguous_steps(problem.out_shape), "dout": steps(dout)}
    stride, fixed = strides_of(problem, tensors, given)
    n = numbers(problem, stride)._replace(tiles=-(-problem.total_q // tiles.block_q))
    c = constants(problem, tiles, fixed, precision_of(tensors))
    return Job(delta_kernel, n, c, tiles, heads=problem.hq * dense_batch(problem))


# --- dK and dV ---------------------------------------------------------------------------------


def _key_gradients(
    problem: Problem, tensors: Tensors, t: Pointers, how: str | None, tiles: Tiles | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    q = tensors.q
    dk, dv = q.new_empty(tensors.k.shape), q.new_empty(tensors.v.shape)
    cols = None
    if how == "cols":
        shape = (problem.batch, problem.hq, problem.nk)
        cols = q.new_zeros(shape, dtype=torch.float32)
    wide = max(problem.d, problem.dv) > BOTH_UP_TO
    passes = [("dk", dk, None), ("dv", None, dv)] if wide else [("key_gradients", dk, dv)]
    for name, one, other in passes if dk.numel() else ():
        to = t._replace(dk=one, dv=other, dbias_cols=None if name == "dv" else cols)

        def complete(job: Job, tensors: Tensors, to: Pointers = to) -> Pointers:
            return with_order(to, problem, tensors, job.tiles, over="queries")

        launch(name, problem, tensors, tiles, plan_key_gradients, complete, t.dout)
    return dk, dv, cols


def plan_key_gradients(problem: Problem, tensors: Tensors, tiles: Tiles, dout: Tensor) -> Job:
    found = {
        "dout": steps(dout),
        "dk": contiguous_steps(tensors.k.shape),
        "dv": contiguous_steps(tensors.v.shape),
    }
    stride, fixed = strides_of(problem, tensors, found)
    if listed(problem):
        stride = stride._replace(order=order_steps(problem, tensors, tiles, over="queries"))
    n = numbers(problem, stride)._replace(
        tiles=slots(problem, tiles.block_k, "keys"), together=together(problem, "keys")
    )
    c = constants(problem, tiles, fixed, precision_of(tensors))
    return Job(key_gradients_kernel, n, c, tiles, heads=problem.hk * dense_batch(problem))


# --- dQ ----------------------------------------------------------------------------------------


def _query_gradients(
    problem: Problem, tensors: Tensors, t: Pointers, how: str | None, tiles: Tiles | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q, bias = tensors.q, tensors.bias
    dq = q.new_empty(q.shape)
    dbias = rows = None
    if how == "direct":
        assert bias is not None
        gaps = problem.masked or problem.varlen  # tiles that no program visits
        dbias = bias.new_zeros(bias.shape) if gaps else bias.new_empty(bias.shape)
    if how == "rows":
        rows = q.new_zeros((problem.batch, problem.hq, problem.nq), dtype=torch.float32)
    to = t._replace(dq=dq, dbias=dbias, dbias_rows=rows)

    def complete(job: Job, tensors: Tensors) -> Pointers:
        return with_order(to, problem, tensors, job.tiles, over="keys")

    launch("query_gradients", problem, tensors, tiles, plan_query_gradients, complete, t.dout)
    return dq, dbias, rows


def plan_query_gradients(problem: Problem, tensors: Tensors, tiles: Tiles, dout: Tensor) -> Job:
    found = {"dout": steps(dout), "dq": contiguous_steps(tensors.q.shape)}
    stride, fixed = strides_of(problem, tensors, found)
    if listed(problem):
        stride = stride._replace(order=order_steps(problem, tensors, tiles, over="keys"))
    n = numbers(problem, stride)._replace(
        tiles=slots(problem, tiles.block_q, "queries"), together=together(problem, "queries")
    )
    c = constants(problem, tiles, fixed, precision_of(tensors))
    return Job(query_gradients_kernel, n, c, tiles, heads=problem.hq * dense_batch(problem))


# --- dbias -------------------------------------------------------------------------------------


def _bias_gradient(problem: Problem, tensors: Tensors, t: Pointers, tiles: Tiles | None) -> Tensor:
    bias = tensors.bias
    assert bias is not None
    dbias = bias.new_empty(bias.shape)
    to = t._replace(dbias=dbias)

    def complete(job: Job, tensors: Tensors) -> Pointers:
        if not listed(problem):
            return to
        return to._replace(states=tile_states(problem, tensors, job.tiles).contiguous())

    if dbias.numel():
        launch("bias_gradient", problem, tensors, tiles, plan_bias_gradient, complete, t.dout)
    return dbias


def plan_bias_gradient(problem: Problem, tensors: Tensors, tiles: Tiles, dout: Tensor) -> Job:
    assert problem.bias is not None
    stride, fixed = strides_of(problem, tensors, {"dout": steps(dout)})
    if listed(problem):
        stride = stride._replace(states=state_steps(problem, tensors, tiles))
    b, h, i, j = problem.bias
    n = numbers(problem, stride)._replace(
        tiles=-(-i // tiles.block_q) * -(-j // tiles.block_k), bias_batch=b
    )
    c = constants(problem, tiles, fixed, precision_of(tensors))
    width = tl.constexpr(columns(kind_of("bias_gradient", problem)))
    sharing = tl.constexpr(problem.hq // h)
    c = c._replace(BLOCK_D=width, BLOCK_DV=width, SHARING=sharing)
    return Job(bias_gradient_kernel, n, c, tiles, heads=b * h)
