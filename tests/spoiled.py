"""Keys and values that no query sees, made infinite or no number: nothing may change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rowmax.problem import Problem, Tensors


def padding_matters(
    problem: Problem,
    tensors: Tensors,
    forward: Callable[[Problem, Tensors], tuple[Tensor, Tensor]],
    got: tuple[Tensor, Tensor],
) -> str | None:
    """A complaint if keys and values past prefix lengths, or of another packed sequence, reach
    what ``got`` says of the rest."""
    k, v = tensors.k.clone(), tensors.v.clone()
    end = problem.total_q
    if problem.prefix and not problem.varlen:
        assert tensors.lengths is not None
        for b, n in enumerate(tensors.lengths.tolist()):
            k[b, max(n, 0) :], v[b, max(n, 0) :] = torch.inf, torch.nan
    elif problem.varlen and problem.batch > 1:
        assert tensors.cu_seqlens_q is not None
        assert tensors.cu_seqlens_k is not None
        end, begin = int(tensors.cu_seqlens_q[-2]), int(tensors.cu_seqlens_k[-2])
        k[:, begin:], v[:, begin:] = torch.nan, torch.inf
    else:
        return None
    out, lse = forward(problem, tensors._replace(k=k, v=v))
    same = torch.equal(out[:, :end], got[0][:, :end]) and torch.equal(
        lse[..., :end], got[1][..., :end]
    )
    return None if same else "what is past the end of a sequence reaches it"
