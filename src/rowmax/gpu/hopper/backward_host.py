"""Run the launches of a backward, from its plan (``backward_plan.py``).

The launches follow one another:

- ``row_sums``: the rounding error of lse, for natural scores (``gpu/preprocess.py``);
- ``prepare``: lse and delta of every row, and zeros where kernels add (``row_stats.py``);
- ``backward_dbias``: the gradient of a bias that sequences or heads share;
- ``backward``: dk, dv and float32 sums of dq; of wide heads ``backward_dq`` and ``backward_dkdv``,
  of wider ones three launches of ``backward_wide``;
- ``finish``: dq from its sums, unless ``backward`` rounds them (``backward_complete.py``); or
  ``dq_of_dbias``, where dS is in memory;
- ``sum_parts``: dk and dv of several shares of a group, from their parts;
- ``sum_parts``: the gradient of a bias of few tiles, from its parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.inputs import Places
from ...call.problem import Gradients, Problem, Tensors, Wanted, zero_gradients
from ..compiled import Span
from . import packed
from .backward_args import PartPointers, Pointers, ProductPointers, RowPointers
from .backward_bias import kind_of, new_dbias, sum_dbias
from .backward_plan import PLANS, Plan, Work, key_of, plan_of, wide_operands
from .backward_tiles import Config, DbiasConfig, DkdvConfig, DqConfig, FusedConfig, WideConfig
from .documents import tile_ranges, tile_spans
from .lib.tma import aligned, is_aligned

#: int32 words in front of the done steps; a kernel takes tiles by one of them
_COUNTERS = 16


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    places: Places | None = None,
) -> Gradients:
    """Return the wanted gradients of a problem that ``supports`` accepts."""
    q, k, v, bias = tensors[:4]
    if not (any(wanted) and out.numel() and q.numel() and k.numel() and problem.batch):
        return empty_gradients(problem, tensors, dlse, wanted)
    if bias is not None:
        problem, usable = aligned_bias(problem, bias, wanted.bias)
        if usable is not bias:
            tensors = tensors._replace(bias=usable)
    placed = places is not None
    key = key_of(problem, tensors, dout, wanted.bias, placed)
    plan = PLANS.get(key)
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
        q, k, v, dout = (aligned(t) for t in (q, k, v, dout))
        tensors = tensors._replace(q=q, k=k, v=v)
        plan = plan_of(problem, tensors, dout, wanted.bias, placed)
    else:
        try:  # noqa: SIM105  (suppress takes longer)
            PLANS.move_to_end(key)
        except KeyError:  # another thread has dropped it; this call still uses it
            pass
    given = (problem, tensors, out, lse, dout, dlse)
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return launch(plan, *given, wanted, places)
    return launch(plan, *given, wanted, places)


def without_repeats(p: Problem, bias: Tensor) -> tuple[Problem, Tensor]:
    """Return the bias with size 1 where its stride is 0, for a call without its gradient."""
    for n, (size, stride) in enumerate(zip(bias.shape, bias.stride(), strict=True)):
        if size > 1 and stride == 0:
            bias = bias.narrow(n, 0, 1)
    return p._replace(bias=tuple(bias.shape)), bias


def aligned_bias(p: Problem, bias: Tensor, gradient: bool) -> tuple[Problem, Tensor]:
    """Return the problem with a bias that kernels can read."""
    kind = kind_of(p)
    if kind == "tile" and not is_aligned(bias):
        if not gradient:
            p, bias = without_repeats(p, bias)
            kind = kind_of(p)
        if kind == "tile":
            bias = aligned(bias)
    return p, bias.contiguous() if kind == "row" else bias


def empty_gradients(
    problem: Problem, tensors: Tensors, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the gradients of a call without rows, keys or sequences.

    They are zeros, except the sink's: the lse of such a row is its sink.
    """
    found = zero_gradients(problem, tensors, wanted)
    if found.sink is not None and dlse is not None:
        found.sink.copy_(dlse.sum((0, 2)))
    return found


def launch(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    places: Places | None,
) -> Gradients:
    """Return the wanted gradients of aligned tensors."""
    q = tensors.q
    orders: list[packed.Order] = []
    if problem.varlen:
        orders, tensors = packed_orders(plan, problem, tensors)
    # a kernel computes dk and dv together; a dbias that it stores needs the kernel too
    complete = plan.fused is not None and plan.fused.COMPLETE
    dq = q.new_empty(q.shape) if wanted.q or plan.dbias == "stored" or complete else None
    both = plan.fused is not None or wanted.k or wanted.v or plan.dbias == "row"
    dtype = problem.gradient_dtype("k", q)
    dk = dv = dbias = None
    if both and places is None:
        dk, dv = (q.new_empty(t.shape, dtype=dtype) for t in (tensors.k, tensors.v))
    if tensors.bias is not None:
        dbias = new_dbias(plan.dbias, problem, tensors.bias, lse)
    made = with_shares(plan, Gradients(dq, dk, dv, dbias), lse)
    t, dsink = prepare(plan, problem, tensors, (out, lse, dout, dlse), wanted, made)
    if t.scaled is not None:
        dout = t.scaled
    parts = None
    if plan.total is not None:
        assert dbias is not None
        parts = lse.new_empty((plan.parts, *dbias.shape))
    if plan.shared is not None:
        run(plan.shared, problem, tensors, dout, t, made, parts=parts)
    if places is not None:
        made = made._replace(k=places.dk, v=places.dv)
    for n, work in enumerate(plan.works):
        order = orders[n] if orders else None
        run(work, problem, tensors, dout, t, made, n, order, places=places)
    if plan.fused and plan.after is not None and dq is not None:
        if plan.fused.DQ:
            args: Any = RowPointers(sums=t.sums, dq=dq, cu_q=t.cu_q)
        else:
            lengths = tensors.lengths
            lengths = None if lengths is None else lengths.contiguous()
            args = ProductPointers(dbias, tensors.k, dq, lengths)
        plan.after(args)
    needed = wanted.k or wanted.v
    if plan.of_shares is not None and needed and dk is not None and dv is not None:
        plan.of_shares(PartPointers(made.k, dk, made.v, dv))
    if plan.total is not None:
        plan.total(PartPointers(parts, dbias))
    found = (dq, dk, dv)
    dq, dk, dv = (x if w else None for x, w in zip(found, wanted[:3], strict=True))
    return Gradients(dq, dk, dv, sum_dbias(dbias, tensors.bias), dsink)


def with_shares(plan: Plan, made: Gradients, like: Tensor) -> Gradients:
    """Return ``made``, with memory for the parts of dk and dv if a group has several shares."""
    dk, dv = made.k, made.v
    if plan.shares == 1 or dk is None or dv is None:
        return made
    shares = like.new_empty(plan.shares * (dk.numel() + dv.numel()))
    return made._replace(k=shares, v=Span(shares, 4 * plan.shares * dk.numel()))


def packed_orders(
    plan: Plan, problem: Problem, tensors: Tensors
) -> tuple[list[packed.Order], Tensors]:
    """Return the order of the packed tiles of each work, and offsets in range for all launches."""
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    totals = (problem.total_q, problem.total_k)
    orders = []
    for work in plan.works:
        c = work.config
        if c.QUERIES_RESIDENT:
            order = packed.order(cu_q, cu_k, totals, c.BLOCK_RESIDENT)
            cu_q, cu_k = order.cu, order.other
        else:
            late = packed.Late(c.LATE_RUNS, plan.shares * problem.hk, work.launch.grid[0])
            order = packed.order(cu_k, cu_q, totals[::-1], c.BLOCK_RESIDENT, late=late)
            cu_k, cu_q = order.cu, order.other
        orders.append(order)
    return orders, tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def prepare(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
    wanted: Wanted,
    made: Gradients,
) -> tuple[RowPointers, Tensor | None]:
    """Launch ``row_stats.prepare`` on rows (out, lse, dout, dlse); return its pointers, and dsink.

    ``made`` will hold dq, dk, dv and dbias.
    """
    out, lse, dout, dlse = rows
    fused = plan.fused
    parts = sink = None
    if tensors.sink is not None and (wanted.sink or plan.dbias == "column"):
        sink = tensors.sink.contiguous()
        parts = lse.new_empty(plan.before.grid[0]) if wanted.sink else None
    floats = lse.new_empty(plan.stats + plan.sums)
    words = None
    if plan.done or plan.works[0].config.DRAWN:
        words = lse.new_empty(_COUNTERS + plan.done, dtype=torch.int32)
    t = RowPointers(
        out=out.contiguous(),
        dout=dout,
        lse=lse.contiguous(),
        dlse=None if dlse is None else dlse.contiguous(),
        sink=sink,
        stats=floats,
        dsink=parts,
        cu_q=tensors.cu_seqlens_q,
        cu_k=tensors.cu_seqlens_k,
        sums=Span(floats, 4 * plan.stats) if plan.sums else None,
        done=None if words is None or not plan.done else Span(words, 4 * _COUNTERS),
        counters=words if plan.works[0].config.DRAWN else None,
        dq=None if fused else made.q,  # else the launch after writes all of it
        dk=made.k,
        dv=made.v,
        dcolumn=made.bias if plan.dbias == "column" else None,
        rest=rest_of_lse(problem, tensors, lse),
        scaled=dout.new_empty_strided(dout.shape, dout.stride()) if problem.natural else None,
    )
    fresh = fused is not None and fused.FRESH
    plan.before(t._replace(sums=None) if fresh else t)
    if parts is None or sink is None:
        return t, None
    return t, parts.view(-1, problem.hq, plan.tiles).sum((0, 2)).to(sink.dtype)


def rest_of_lse(problem: Problem, tensors: Tensors, lse: Tensor) -> Tensor | None:
    """Return the rounding error of lse, None if scores are not natural."""
    if not problem.natural:
        return None
    from ..preprocess import row_sums

    return row_sums(problem, tensors, lse)


def run(
    work: Work,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    made: Gradients,
    nth: int = 0,
    order: packed.Order | None = None,
    parts: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Launch a work, unless it makes nothing of ``made``. ``nth`` is its counter."""
    q, k, v, bias = tensors[:4]
    c = work.config
    out, dv, dbias = made.k, made.v, None
    if isinstance(c, FusedConfig):
        twice = (q, q, dout, dout, t.stats, k, k, v, v, t.sums, t.sums)  # each in two parts
        operands = (*twice, bias, made.bias)
        dbias = made.bias if c.DROW else None
    elif isinstance(c, DqConfig):
        operands = (q, dout, k, v)
        out, dv, dbias = made.q, None, made.bias if c.DBIAS else None
    elif isinstance(c, DkdvConfig):
        operands = (k, v, q, dout, t.stats, bias)
        dbias = made.bias if c.DROW else None
    elif isinstance(c, WideConfig):
        operands = wide_operands(c, q, dout, k, v, t.stats)
        out, dv = getattr(made, c.GRADIENT), None
    else:
        operands = (q, dout, k, v, t.stats, bias, made.bias)
        out = dv = None
    if out is None and not isinstance(c, DbiasConfig):
        return
    args = pointers(work, problem, tensors, t, (out, dv, dbias, made.q), nth, order)
    if places is not None and not c.QUERIES_RESIDENT:
        args = args._replace(
            dk_rows=places.dk_rows,
            dv_rows=places.dv_rows,
            dk_alone=places.dk_alone,
            dv_alone=places.dv_alone,
        )
    work.launch(args if parts is None else args._replace(parts=parts), operands)


def reads_rows(c: Config) -> bool:
    """Return True if the kernel reads lse and delta of resident queries without TMA."""
    return isinstance(c, DqConfig) or (isinstance(c, WideConfig) and c.QUERIES_RESIDENT)


def pointers(
    work: Work,
    problem: Problem,
    tensors: Tensors,
    t: RowPointers,
    results: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    nth: int,
    order: packed.Order | None,
) -> Pointers:
    """Return the pointers of a work that fills ``results``: dk or dq, dv, uncopied dbias, dq."""
    bias, heads, lengths = tensors.bias, tensors.heads, tensors.lengths
    q_ids, k_ids = tensors.q_ids, tensors.k_ids
    c, table, ends = work.config, work.table, work.ends
    counter = spans = alike = q_range = k_range = None
    if order is not None:
        counter, ends, table = order[:3]
    elif c.DRAWN:
        assert t.counters is not None
        counter = Span(t.counters, 4 * nth) if nth else t.counters
    if q_ids is not None and k_ids is not None:
        q_ids, k_ids = q_ids.contiguous(), k_ids.contiguous()
        resident, streamed = (q_ids, k_ids) if c.QUERIES_RESIDENT else (k_ids, q_ids)
        if c.SPANS:
            sizes = c.BLOCK_RESIDENT // c.TOKENS, c.TOKENS, c.BLOCK_STREAMED
            spans, alike = tile_spans(resident, streamed, *sizes, problem.batch)
        else:
            sizes = c.BLOCK_RESIDENT, c.BLOCK_STREAMED
            q_range, k_range = map(tile_ranges, (q_ids, k_ids), sizes)
    if c.COLUMN and bias is not None:
        bias = bias.expand(-1, -1, problem.nq, -1).contiguous()
    elif not (c.ROW or (c.BIAS and isinstance(c, DqConfig))):
        bias = None
    out, dv, dbias, dq = results
    complete = isinstance(c, FusedConfig) and c.COMPLETE
    return Pointers(
        out=out,
        dv=dv,
        rows=t.stats if reads_rows(c) else None,
        table=table,
        ends=ends,
        counter=counter,
        done=t.done,
        cu_q=tensors.cu_seqlens_q,
        cu_k=tensors.cu_seqlens_k,
        lengths=None if lengths is None else lengths.contiguous(),
        spans=spans,
        alike=alike,
        q_range=q_range,
        k_range=k_range,
        q_ids=q_ids,
        k_ids=k_ids,
        alibi=None if heads is None else heads.contiguous(),
        seed=tensors.seed if c.DROPOUT else None,
        bias=bias,
        dbias=dbias,
        sums=t.sums if complete else None,
        dq=dq if complete else None,
    )
