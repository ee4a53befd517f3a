"""Attention as it is defined: the whole score matrix, a line for each formula.

Of the rules it uses only dropout's generator: tests compare every rule and backend with it in
float64. It is differentiable by autograd, forward and backward, any number of times. Memory is
quadratic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.inputs import parameters_of
from ..call.problem import Problem, Tensors, each_sequence
from ..rules import dropout
from ..torch_compat import is_batched


def attention(
    problem: Problem, tensors: Tensors, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``), every step of it in ``dtype``."""
    if problem.varlen:
        parts = [attention(p, t, dtype) for _, _, p, t in each_sequence(problem, tensors)]
        if not parts:  # q is empty; adding its sum keeps the graph of autograd
            zero = tensors.q.to(dtype).sum()
            return zero.expand(problem.out_shape), zero.expand(problem.lse_shape)
        outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
        return torch.cat(outs, 1), torch.cat(lses, 2)

    i, j = _positions(problem, tensors)
    seen = _seen(problem, tensors, i, j)
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (tensors.q, tensors.k, tensors.v))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))

    rows = () if tensors.heads is None else tensors.heads.to(dtype)[:, :, None, None]  # [Hq, 1, 1]
    heads = dict(zip(parameters_of(problem.heads), rows, strict=True))
    s = problem.scale * _scores(q, k, seen)
    if problem.softcap > 0:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if tensors.bias is not None:
        s = s + tensors.bias.to(dtype)
    if "slope" in heads:
        shift = 0 if problem.positions is None else problem.positions.shift
        s = s - heads["slope"] * (i + shift - j).abs().to(dtype)
    s = s.masked_fill(~seen, -torch.inf)
    sink = None if tensors.sink is None else tensors.sink.to(dtype)[:, None].expand(s.shape[:3])

    m = s.amax(-1) if problem.nk else torch.full_like(q[..., 0], -torch.inf)
    m = m if sink is None else torch.maximum(m, sink)
    m = m.detach().masked_fill(m == -torch.inf, 0.0)  # a row that sees nothing
    weights = torch.exp(s - m[..., None])
    l = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink - m)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    lse = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    P = weights / l[..., None]
    if problem.dropout_threshold:
        P = P * dropout.dense(problem, tensors).to(dtype)
    return _average(P, v, seen).transpose(1, 2), lse


def _positions(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and of keys: the last query is at the last key.

    Aligned to the lengths, it is at the last key in use of its sequence.
    """
    i = torch.arange(problem.nq, device=tensors.q.device).view(1, 1, -1, 1)
    j = torch.arange(problem.nk, device=tensors.q.device).view(1, 1, 1, -1)
    if problem.align == "keys":
        return i + problem.nk - problem.nq, j
    assert tensors.lengths is not None
    used = tensors.lengths.to(torch.int64).clamp(0, problem.nk)
    return i + used[:, None, None, None] - problem.nq, j


def _seen(problem: Problem, tensors: Tensors, i: Tensor, j: Tensor) -> Tensor:
    """Return True where a pair may attend, ``[B|1, Hq|1, Nq, Nk]``."""
    seen = torch.ones_like(i - j, dtype=torch.bool)
    if problem.left is not None:
        seen = seen & (j >= i - problem.left)
    if problem.right is not None:
        before = j <= i + problem.right
        if tensors.prefix is not None:
            before = before | (j < tensors.prefix[:, None, None, None])
        seen = seen & before
    if tensors.lengths is not None:
        seen = seen & (j < tensors.lengths[:, None, None, None])
    if tensors.q_ids is not None and tensors.k_ids is not None:
        seen = seen & (tensors.q_ids[:, None, :, None] == tensors.k_ids[:, None, None, :])
    if tensors.allowed is not None:
        seen = seen & tensors.allowed
    return seen


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Return ``q_i . k_j``, 0 for a masked pair even if its numbers are NaN."""
    if _finite(q) and _finite(k):
        return _product(q, k.transpose(2, 3))
    queries = torch.where(seen[..., None], q[:, :, :, None], 0)
    keys = torch.where(seen[..., None], k[:, :, None], 0)
    return (queries * keys).sum(-1)


def _average(P: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return ``sum_j P_ij v_j`` over the keys that row i may see."""
    if _finite(v):
        return _product(P, v)
    return (P[..., None] * torch.where(seen[..., None], v[:, :, None], 0)).sum(-2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, its sums in float32 at least.

    PyTorch's float16 product on most CPUs is the same, and takes ten times as long.
    """
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return (a.float() @ b.float()).half()
    return a @ b


def _finite(t: Tensor) -> bool:
    """Return True if every value is known to be finite; under ``vmap`` none is known."""
    return not is_batched(t) and bool(torch.isfinite(t).all())
