"""The host's side of the backward: its launches, one after the other.

Before: with a bias, what its lse lost when it was rounded (triton/row_sums.py); lse and delta of
every row, and zeros in what is added to. Then dbias, of a bias that
sequences or heads share (shared_bias.py); and all gradients at once, or of wide heads dq, and dk
with dv (wide.py, pair.py). After, where dq was added up in float32: dq, rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....call.problem import Gradients, Problem, Tensors, Wanted
from ...triton.preprocess import row_sums
from .. import packed
from ..documents import tile_spans
from ..lib.tma import aligned as taken
from ..lib.tma import is_aligned as takes
from ..lib.tma import placed
from .biases import kind_of, made_of, room_for, without_repeats
from .bundles import DbiasPointers, Pointers, RowPointers
from .plans import PLANS, Plan, Work, key_of, plan_of


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The wanted gradients of a problem that ``supports`` has passed, none that it ``lacks``."""
    q, k, v, bias = tensors[:4]
    if not (any(wanted) and out.numel() and q.numel() and k.numel() and problem.batch):
        return of_nothing(tensors, dlse, wanted)
    if bias is not None:
        kind = kind_of(problem)
        if kind == "tile" and not takes(bias):
            if not wanted.bias:
                problem, bias = without_repeats(problem, bias)
                kind = kind_of(problem)
            if kind == "tile":
                bias = taken(bias)
        if kind == "row":
            bias = bias.contiguous()
        if bias is not tensors.bias:
            tensors = tensors._replace(bias=bias)
    key = key_of(problem, tensors, dout, wanted.bias)
    plan = PLANS.get(key)
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
        q, k, v, dout = (taken(t) for t in (q, k, v, dout))
        tensors = tensors._replace(q=q, k=k, v=v)
        plan = plan_of(problem, tensors, dout, wanted.bias)
    else:
        try:  # noqa: SIM105  (suppress takes longer)
            PLANS.move_to_end(key)
        except KeyError:  # another thread has let go of it: it serves this call all the same
            pass
    given = (problem, tensors, out, lse, dout, dlse)
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return launch(plan, *given, wanted)
    return launch(plan, *given, wanted)


def of_nothing(tensors: Tensors, dlse: Tensor | None, wanted: Wanted) -> Gradients:
    """The gradients of a call without rows, keys or sequences: zeros, but for a sink's, which is
    then the lse of its rows."""
    found = Gradients(
        *(
            x.new_zeros(x.shape) if want and x is not None else None
            for want, x in zip(wanted, tensors[: len(wanted)], strict=True)
        )
    )
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
) -> Gradients:
    """The wanted gradients of tensors that the copy engine takes."""
    q, k, v = tensors[:3]
    orders: list[packed.Order] = []
    if problem.varlen:
        orders, tensors = in_order(plan, problem, tensors)
    # what makes one of dk and dv makes both, and what makes all gradients these as well; and what
    # makes dbias on its way
    dq = q.new_empty(q.shape) if wanted.q or plan.dbias == "stored" else None
    both = plan.together or wanted.k or wanted.v or plan.dbias == "row"
    dk = q.new_empty(k.shape) if both else None
    dv = q.new_empty(v.shape) if both else None
    dbias = None if tensors.bias is None else room_for(plan.dbias, problem, tensors.bias, lse)
    made = (dq, dk, dv, dbias)
    t, dsink = prepared(plan, problem, tensors, out, lse, dout, dlse, wanted, made)
    if t.scaled is not None:
        dout = t.scaled
    if plan.shared is not None:
        of_shared_bias(plan.shared, problem, tensors, dout, t, dbias)
    if plan.together:
        together(plan, problem, tensors, dout, t, orders, dbias)
        if dq is not None:
            of_sums = RowPointers(sums=t.sums, dq=dq, cu_q=t.cu_q)
            lengths = tensors.lengths
            lengths = None if lengths is None else lengths.contiguous()
            of_dbias = DbiasPointers(dbias, tensors.k, dq, lengths)
            plan.after((), of_sums if plan.config.DQ else of_dbias, plan.of_after)
    else:
        apart(plan, problem, tensors, dout, t, orders, dbias)
    dq, dk, dv = (x if w else None for x, w in zip((dq, dk, dv), wanted[:3], strict=True))
    return Gradients(dq, dk, dv, made_of(dbias, tensors.bias), dsink)


def in_order(plan: Plan, problem: Problem, tensors: Tensors) -> tuple[list[packed.Order], Tensors]:
    """The order of the packed tiles of each work, and offsets in range for all launches to read."""
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    totals = (problem.total_q, problem.total_k)
    orders = []
    for work in plan.works:
        if work.config.KIND == "dq":
            order = packed.order(cu_q, cu_k, totals, work.config.BLOCK_K)
            cu_q, cu_k = order.cu, order.other
        else:
            order = packed.order(cu_k, cu_q, totals[::-1], work.config.BLOCK_K)
            cu_k, cu_q = order.cu, order.other
        orders.append(order)
    return orders, tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def prepared(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    made: tuple[Tensor | None, ...],
) -> tuple[RowPointers, Tensor | None]:
    """(what the launch before has filled, dsink). ``made`` will hold dq, dk, dv and dbias."""
    C = plan.config
    dq, dk, dv, dbias = made
    parts = sink = sums = turns = counters = None
    if plan.together:
        dq = None  # the launch after writes all of it
        sums = lse.new_empty(plan.sums) if C.DQ else None
    if C.ORDERED:
        turns = lse.new_empty(plan.turns, dtype=torch.int32)
    if C.DRAWN:
        counters = lse.new_empty(16, dtype=torch.int32)
    if tensors.sink is not None and (wanted.sink or plan.dbias == "column"):
        sink = tensors.sink.contiguous()
        parts = lse.new_empty(plan.tiles) if wanted.sink else None
    t = RowPointers(
        out.contiguous(),
        dout,
        lse.contiguous(),
        None if dlse is None else dlse.contiguous(),
        sink,
        lse.new_empty(plan.stats),
        parts,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        sums,
        turns,
        counters,
        dq,
        dk,
        dv,
        dbias if plan.dbias == "column" else None,
        row_sums(problem, tensors, lse),
        dout.new_empty_strided(dout.shape, dout.stride()) if problem.natural else None,
    )
    plan.before((), t._replace(sums=None) if C.FRESH else t, plan.of_rows)
    if parts is None or sink is None:
        return t, None
    return t, parts.view(-1, problem.hq, plan.stats[2] // C.BLOCK_Q).sum((0, 2)).to(sink.dtype)


def together(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    orders: Sequence[packed.Order] = (),
    dbias: Tensor | None = None,
) -> None:
    """dk, dv and the sums of dq in one launch; dbias as well, where it stores that."""
    work = plan.works[0]
    q, k, v, bias = tensors[:4]
    copies = placed(work.copies, (q, dout, t.stats, k, v, t.sums, bias, dbias))
    to = (t.dk, t.dv, dbias if work.config.DROW else None)
    work.launch(copies, pointers(work, problem, tensors, t, to, 0, orders), work.last)


def of_shared_bias(
    work: Work,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    dbias: Tensor | None,
) -> None:
    """dbias, summed over the sequences and heads that share the bias."""
    q, k, v, bias = tensors[:4]
    copies = placed(work.copies, (q, dout, k, v, t.stats, bias, dbias))
    work.launch(copies, pointers(work, problem, tensors, t, (None, None, None), 0, ()), work.last)


def apart(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    orders: Sequence[packed.Order] = (),
    dbias: Tensor | None = None,
) -> None:
    """dq, maybe with dbias, and dk with dv, as far as they are wanted, in a launch each."""
    q, k, v = tensors[:3]
    made = {"dq": (t.dq, None), "pair": (t.dk, t.dv)}
    for n, work in enumerate(plan.works):
        to = made[work.config.KIND]
        if to[0] is None:
            continue
        both = (q, dout), (k, v)
        stays, passes = both if work.config.KIND == "dq" else both[::-1]
        copies = placed(work.copies, (*stays, *passes, t.stats, tensors.bias))
        C = work.config
        to = (*to, dbias if C.DBIAS or C.DROW else None)
        work.launch(copies, pointers(work, problem, tensors, t, to, n, orders), work.last)


def pointers(
    work: Work,
    problem: Problem,
    tensors: Tensors,
    t: RowPointers,
    made: tuple[Tensor | None, Tensor | None, Tensor | None],
    nth: int,
    orders: Sequence[packed.Order],
) -> Pointers:
    """Of the nth work, which fills what is ``made``: dk or dq, dv, and dbias if not by copies."""
    _, _, _, bias, _, alibi, _, q_ids, k_ids, lengths, cu_q, cu_k, _ = tensors
    C, table, ends, counter, spans = work.config, work.table, work.ends, None, None
    if orders:
        counter, ends, table = orders[nth][:3]
    elif C.DRAWN:
        assert t.counters is not None
        counter = t.counters[nth:] if nth else t.counters
    if q_ids is not None and k_ids is not None:
        q_ids, k_ids = q_ids.contiguous(), k_ids.contiguous()
        stays, passes = (q_ids, k_ids) if C.QUERIES_DOWN else (k_ids, q_ids)
        spans = tile_spans(stays, passes, C.BLOCK_K, C.BLOCK_Q, problem.batch)
    if C.COLUMN and bias is not None:
        bias = bias.expand(-1, -1, problem.nq, -1).contiguous()
    elif not (C.ROW or (C.BIAS and C.KIND == "dq")):
        bias = None
    out, dv, dbias = made
    return Pointers(
        out,
        dv,
        t.stats if C.KIND == "dq" else None,
        table,
        ends,
        counter,
        t.turns,
        cu_q,
        cu_k,
        None if lengths is None else lengths.contiguous(),
        spans,
        q_ids,
        k_ids,
        None if alibi is None else alibi.contiguous(),
        bias,
        dbias,
    )
