"""A call of which each rank has its rows, and the answer of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Rank
from rowmax import distributed as rd
from rowmax.distributed import Layout
from rowmax.testing import Answer, Call, cotangents

from .programs import has_rows, own_call

#: (factor of q, k and v, 1 by default) -> the answer of own rows
Repeated = Callable[..., Answer]
Given = tuple[Tensor, Tensor | None]


def prepared(
    rank: Rank,
    call: Call,
    layouts: tuple[Layout, Layout],
    more: dict[str, Any],
    given: Given | None = None,
) -> Repeated:
    """Return a function of a factor of q, k and v, 1 by default, that returns own rows' answer.

    ``given``: the cotangents of out and lse of the whole.
    """
    queries, keys = layouts
    i, j = (one.positions(rank.rank, rank.device) for one in layouts)
    dout, dlse = cotangents(call) if given is None else given
    options: dict[str, Any] = {"layout": queries, "k_layout": keys, "return_lse": True, **more}
    if call.case.packed:
        q, k, v, cu_q, cu_k, *_ = call.inputs
        named = {**call.keywords, "q": q[i], "k": k[j], "v": v[j]}
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        grads = [dout[i]]
    else:
        (q, k, v), keywords = own_call(call, queries, keys, rank.rank)
        named = {**keywords, "q": q, "k": k, "v": v}
        grads = [dout[:, i]]
    grads += [] if dlse is None else [dlse[..., i]]

    def answer(factor: float = 1.0) -> Answer:
        scaled = dict(named)
        if factor != 1.0:  # a product has other strides
            scaled |= {name: factor * named[name] for name in "qkv"}
        leaves = {name: scaled[name].detach().requires_grad_() for name in call.leaves}
        function: Any = rd.attention_varlen if call.case.packed else rd.attention
        outputs = function(**{**scaled, **leaves}, **options)
        got: Any = ()
        if leaves:
            got = torch.autograd.grad(outputs[: len(grads)], list(leaves.values()), grads)
        out, lse = (t.detach() for t in outputs)
        return Answer(out, lse, dict(zip(leaves, got, strict=True)))

    return answer


def joined(
    call: Call, layouts: tuple[Layout, Layout], rank: int, own: Answer, reduced: bool = False
) -> Answer:
    """Return the answer of the whole: rows from their ranks, and sums of shares.

    ``reduced``: the gradients of replicated inputs are sums already (``reduce_replicated``), and
    those of the last rank count.
    """
    queries, _ = layouts
    i, j = (one.positions(rank, own.out.device) for one in layouts)
    q, v = call.inputs[0], call.inputs[2]
    wide = torch.promote_types(q.dtype, torch.float32)

    def total(shape: Any, rows: Any, part: Tensor) -> Tensor:
        found = torch.zeros(shape, dtype=wide, device=part.device)
        if rows is not None:
            found[rows] = part.to(wide)
        elif not reduced or rank == queries.ranks - 1:
            found += part
        dist.all_reduce(found)
        return found.to(part.dtype)

    first = () if call.case.packed else (slice(None),)
    out = total((*q.shape[:-1], v.shape[-1]), (*first, i), own.out)
    lse = total((*q.shape[:-3], q.shape[-2], q.shape[-3]), (..., i), own.lse)
    gradients = {}
    for name, leaf in call.leaves.items():
        rows: Any = None
        if name in "qkv":
            rows = (*first, i if name == "q" else j)
        elif name == "bias" and has_rows(leaf, queries.n):
            rows = (..., i, slice(None))
        gradients[name] = total(leaf.shape, rows, own.gradients[name]).to(leaf.dtype)
    return Answer(out, lse, gradients)
