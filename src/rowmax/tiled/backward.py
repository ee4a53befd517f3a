"""The backward: the weights of each tile again, from lse, and the formulas of the gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.problem import FAR, Gradients, Problem, Tensors, Wanted, each_sequence
from .scores import (
    bias_tile,
    factor,
    folded,
    hidden,
    hide,
    kept,
    log_unit,
    power_,
    product,
    scores,
    tame,
    unfolded,
)
from .strips import Strip, strips


class _Rows(NamedTuple):
    """What a strip of rows brings to each of its tiles, ``[pairs, group * rows, ...]``."""

    q: Tensor  # times factor
    do: Tensor  # over the sum of the weights, as is delta (_normalized)
    lse: Tensor  # natural; +inf for a row that sees nothing
    shift: Tensor  # lse in the units of the scores, +inf where weights are to be 0
    delta: Tensor  # Delta - dLSE


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    sums = _zeros(problem, tensors, wanted)
    with torch.autocast(dout.device.type, enabled=False):
        if not problem.varlen:
            _add(problem, tensors, out, lse, dout, dlse, sums)
        else:
            for n, (rows, cols, one, parts) in enumerate(each_sequence(problem, tensors)):
                _add(
                    one,
                    parts,
                    out[:, rows],
                    lse[:, :, rows],
                    dout[:, rows],
                    None if dlse is None else dlse[:, :, rows],
                    _sums_of_sequence(sums, n, rows, cols, one),
                )
    return Gradients(
        **{
            name: g.to(getattr(tensors, name).dtype)
            for name, g in sums._asdict().items()
            if g is not None
        }
    )


def _zeros(problem: Problem, tensors: Tensors, wanted: Wanted) -> Gradients:
    """Where the wanted gradients are summed."""
    inputs = {name: getattr(tensors, name) for name, want in wanted._asdict().items() if want}
    return Gradients(
        **{
            name: torch.zeros(t.shape, dtype=_sum_dtype(problem, name, t), device=t.device)
            for name, t in inputs.items()
        }
    )


def _sum_dtype(problem: Problem, name: str, t: Tensor) -> torch.dtype:
    """The accumulator; t's own where each element is written once, as q and a whole bias are."""
    pairs = (problem.batch, problem.hq, problem.nq, problem.nk)
    once = name == "q" or (name == "bias" and t.shape == pairs)
    return t.dtype if once else problem.accumulator


def _sums_of_sequence(sums: Gradients, n: int, rows: slice, cols: slice, one: Problem) -> Gradients:
    """The views of the gradients that sequence n of a packed call adds to."""
    q, k, v, bias, sink = sums
    if bias is not None:
        assert one.bias is not None
        bias = bias if bias.shape[0] == 1 else bias[n : n + 1]
        bias = bias[:, :, : one.bias[2], : one.bias[3]]
    return Gradients(
        q=None if q is None else q[:, rows],
        k=None if k is None else k[:, cols],
        v=None if v is None else v[:, cols],
        bias=bias,
        sink=sink,
    )


def _add(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sums: Gradients,
) -> None:
    """Add the gradients of one dense call."""
    exact = problem.masked and not tame(problem, tensors, lse, dout, dlse)
    group = problem.group
    for strip in strips(problem, tensors):
        rows = _rows(problem, tensors, strip, out, lse, dout, dlse)
        rows = _normalized(problem, tensors, strip, exact, rows)
        if sums.sink is not None:
            _add_sink(problem, tensors, strip, rows, sums.sink)
        dQ = torch.zeros_like(rows.q)
        for cols, full in strip.tiles:
            _tile(problem, tensors, strip, cols, full, exact, rows, dQ, sums)
        if sums.q is not None:
            b, h, g, n = strip.size(group)
            dQ = dQ.mul_(problem.scale).view(b, h, g, n, -1)
            strip.rows_of(sums.q, group).copy_(dQ.permute(0, 3, 1, 2, 4))


def _rows(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> _Rows:
    dtype, group = problem.accumulator, problem.group
    e = strip.row_numbers(lse, group).unsqueeze(-1)
    e = folded(problem, strip, e)
    empty = e == -torch.inf  # nothing flows through these, whatever dout and dlse hold
    do = strip.queries(dout, group, dtype).masked_fill(empty, 0.0)
    delta = (do * strip.queries(out, group, dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= folded(problem, strip, strip.row_numbers(dlse, group).unsqueeze(-1))
    return _Rows(
        q=strip.queries(tensors.q, group, dtype) * factor(problem),
        do=do,
        lse=e.masked_fill(empty, torch.inf),
        shift=_infinite_up(e * log_unit(problem)),
        delta=delta.masked_fill(empty, 0.0),
    )


def _infinite_up(e: Tensor) -> Tensor:
    """-inf becomes +inf, which makes weights 0: a row of nothing, or of a sink that is too low for
    base 2."""
    return e.masked_fill(e == -torch.inf, torch.inf)


def _normalized(
    problem: Problem, tensors: Tensors, strip: Strip, exact: bool, rows: _Rows
) -> _Rows:
    """The rows with do and delta divided by the sum of their weights, ``exp(s - lse)``, where lse
    is so far from 0 (``FAR``) that its rounding lost it. All gradients are linear in the two."""
    far = (rows.lse.abs() >= FAR) & (rows.lse < torch.inf)
    if not problem.natural or not bool(far.any()):
        return rows
    total = torch.zeros_like(rows.lse)
    for cols, full in strip.tiles:
        k = strip.keys(tensors.k, cols, total.dtype)
        total += _weights(problem, tensors, strip, cols, full, exact, rows, k)[0].sum(-1, True)
    if tensors.sink is not None:
        total += _sink_weight(problem, tensors.sink, strip, rows)
    total = total.masked_fill(~far | (total == 0), 1.0)
    return rows._replace(do=rows.do / total, delta=rows.delta / total)


def _weights(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    cols: slice,
    full: bool,
    exact: bool,
    rows: _Rows,
    k: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the weights of a tile, the tanh of a softcap, what is to be kept out pair by pair)"""
    S, tanh = scores(problem, tensors, strip, cols, rows.q, k)
    unseen = None if full else hidden(problem, tensors, strip, cols)
    apart = folded(problem, strip, unseen) if unseen is not None and exact else None
    if unseen is not None and not exact:
        hide(problem, strip, S, unseen)
    P = power_(problem, S.sub_(rows.shift))
    if apart is not None:
        P.masked_fill_(apart, 0.0)
    return P, tanh, apart


def _tile(
    problem: Problem,
    tensors: Tensors,
    strip: Strip,
    cols: slice,
    full: bool,
    exact: bool,
    rows: _Rows,
    dQ: Tensor,
    sums: Gradients,
) -> None:
    """Add one tile's part to dQ and to the other gradients."""
    k = strip.keys(tensors.k, cols, dQ.dtype)
    P, tanh, apart = _weights(problem, tensors, strip, cols, full, exact, rows, k)
    apart_t = None if apart is None else apart.transpose(1, 2)
    R = kept(problem, tensors, strip, cols) if problem.dropout_threshold else None

    if sums.q is not None or sums.k is not None or sums.bias is not None:
        v = strip.keys(tensors.v, cols, dQ.dtype)
        dS = torch.bmm(rows.do, v.transpose(1, 2))
        if R is not None:
            dS.mul_(R)
        dS.sub_(rows.delta).mul_(P)
        if apart is not None:
            dS.masked_fill_(apart, 0.0)
        if sums.bias is not None:
            part = bias_tile(sums.bias, problem, strip, cols)
            part += unfolded(problem, strip, dS).flatten(1, 2).sum_to_size(part.shape)
        dX = dS if tanh is None else _through_softcap(dS, tanh, apart)
        if sums.q is not None:
            dQ += product(dX, k, apart)
        if sums.k is not None:
            # rows.q carries factor, of which scale is to stay
            rest = 1.0 / log_unit(problem) if tanh is None else problem.softcap
            _add_keys(strip, sums.k, cols, product(dX.transpose(1, 2), rows.q, apart_t) * rest)
    if sums.v is not None:
        PR = P if R is None else P.mul_(R)
        _add_keys(strip, sums.v, cols, product(PR.transpose(1, 2), rows.do, apart_t))


def _through_softcap(dS: Tensor, tanh: Tensor, apart: Tensor | None) -> Tensor:
    """dX = dS (1 - (t / c)^2)"""
    if apart is not None:
        tanh.masked_fill_(apart, 0.0)
    return tanh.square_().neg_().add_(1.0).mul_(dS)


def _add_keys(strip: Strip, sums: Tensor, cols: slice, part: Tensor) -> None:
    view = sums[strip.batch, cols, strip.heads].transpose(1, 2)
    view += part.view(view.shape)


def _add_sink(problem: Problem, tensors: Tensors, strip: Strip, rows: _Rows, sums: Tensor) -> None:
    """dsigma = sum of exp(sigma - LSE) (dLSE - Delta)"""
    assert tensors.sink is not None
    weight = _sink_weight(problem, tensors.sink, strip, rows)
    terms = (weight * rows.delta).view(strip.size(problem.group))
    sums[strip.q_heads(problem.group)] -= terms.sum((0, 3)).flatten()


def _sink_weight(problem: Problem, sink: Tensor, strip: Strip, rows: _Rows) -> Tensor:
    """``exp(sigma - lse)``"""
    sink = sink.detach().unflatten(0, (-1, problem.group))[strip.heads, :, None, None]
    return torch.exp(folded(problem, strip, sink.to(rows.lse.dtype)) - rows.lse)
