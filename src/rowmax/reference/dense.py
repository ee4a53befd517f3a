"""Attention as it is defined: the whole score matrix, a line for each formula.

Every backend is held to this, computed in float64. It is differentiable by autograd, forward
and backward and as often as one likes. Memory is quadratic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.problem import Problem, Tensors, each_sequence
from ..rules import dropout, mask
from ..torch_compat import is_batched


def attention(
    problem: Problem, tensors: Tensors, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """(out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``), every step of it in ``dtype``."""
    if problem.varlen:
        parts = [attention(p, t, dtype) for _, _, p, t in each_sequence(problem, tensors)]
        if not parts:  # q holds nothing; its empty sum keeps autograd's thread
            zero = tensors.q.to(dtype).sum()
            return zero.expand(problem.out_shape), zero.expand(problem.lse_shape)
        outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
        return torch.cat(outs, 1), torch.cat(lses, 2)

    seen = mask.dense(problem, tensors)
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (tensors.q, tensors.k, tensors.v))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))

    s = problem.scale * _scores(q, k, seen)
    if problem.softcap > 0:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if tensors.bias is not None:
        s = s + tensors.bias.to(dtype)
    if tensors.alibi is not None:
        s = s - tensors.alibi.to(dtype)[:, None, None] * _distance(problem, tensors, q)
    s = s.masked_fill(~seen, -torch.inf)
    sink = None if tensors.sink is None else tensors.sink.to(dtype)[:, None].expand(s.shape[:3])

    m = s.amax(-1) if problem.nk else torch.full_like(q[..., 0], -torch.inf)
    m = m if sink is None else torch.maximum(m, sink)
    m = m.detach().masked_fill(m == -torch.inf, 0.0)  # a row of nothing
    weights = torch.exp(s - m[..., None])
    l = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink - m)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    lse = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    P = weights / l[..., None]
    if problem.dropout_threshold:
        P = P * dropout.dense(problem, tensors).to(dtype)
    return _average(P, v, seen).transpose(1, 2), lse


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """``q_i . k_j``. What a pair may not see has no part in it, not even as 0 times NaN."""
    if _finite(q) and _finite(k):
        return q @ k.transpose(2, 3)
    queries = torch.where(seen[..., None], q[:, :, :, None], 0)
    keys = torch.where(seen[..., None], k[:, :, None], 0)
    return (queries * keys).sum(-1)


def _average(P: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """``sum_j P_ij v_j`` over the keys that row i may see."""
    if _finite(v):
        return P @ v
    return (P[..., None] * torch.where(seen[..., None], v[:, :, None], 0)).sum(-2)


def _finite(t: Tensor) -> bool:
    """True if every value is known to be finite, which ``vmap`` lets nobody see."""
    return not is_batched(t) and bool(torch.isfinite(t).all())


def _distance(problem: Problem, tensors: Tensors, q: Tensor) -> Tensor:
    i = torch.arange(problem.nq, device=q.device, dtype=q.dtype)[:, None]
    j = torch.arange(problem.nk, device=q.device, dtype=q.dtype)[None, :]
    return (i + mask.offset(problem, tensors) - j).abs()
