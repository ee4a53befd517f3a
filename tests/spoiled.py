"""Keys and values that no query sees, made infinite or no number: nothing may change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rowmax.call.problem import Gradients, Problem, Tensors, Wanted


def padding_matters(
    problem: Problem,
    tensors: Tensors,
    forward: Callable[[Problem, Tensors], tuple[Tensor, Tensor]],
    got: tuple[Tensor, Tensor],
) -> str | None:
    """A complaint if keys and values past prefix lengths, or of another packed sequence, reach
    what ``got`` says of the rest."""
    found = spoiled(problem, tensors)
    if found is None:
        return None
    tensors, end, _ = found
    out, lse = forward(problem, tensors)
    same = torch.equal(out[:, :end], got[0][:, :end]) and torch.equal(
        lse[..., :end], got[1][..., :end]
    )
    return None if same else "what is past the end of a sequence reaches it"


def padding_matters_backward(
    problem: Problem,
    tensors: Tensors,
    saved: tuple[Tensor, ...],
    wanted: Wanted,
    backward: Callable[..., Gradients],
    got: Gradients,
    exact: Callable[[str], bool],
) -> str | None:
    """The same of gradients; ``saved`` are out, lse, dout and dlse. Those that are not ``exact``
    may differ as sums in another order do."""
    found = spoiled(problem, tensors)
    if found is None:
        return None
    tensors, end, begin = found
    out, lse, dout, dlse = (t.clone() for t in saved)
    q = tensors.q.clone()
    for t in (q, out, dout):
        t[:, end:] = torch.nan
    lse[..., end:], dlse[..., end:] = torch.nan, torch.nan
    again = backward(problem, tensors._replace(q=q), out, lse, dout, dlse, wanted)
    rows = {"q": end, "k": begin, "v": begin}
    if not problem.varlen:  # else the bias may have been that sequence's too
        rows["bias"] = None
    for name, some in rows.items():
        x, y = getattr(again, name), getattr(got, name)
        if x is None or y is None:
            continue
        x, y = x[:, :some].double(), y[:, :some].double()
        off, size = (x - y).norm().item(), y.norm().item()
        if not (torch.equal(x, y) if exact(name) else off <= 1e-2 * size + 1e-6 * y.numel() ** 0.5):
            return f"d{name}: what is past the end of a sequence reaches it"
    return None


def spoiled(problem: Problem, tensors: Tensors) -> tuple[Tensors, int, int] | None:
    """(tensors with keys and values past prefix lengths, or of the last packed sequence, spoiled;
    the rows of queries and of keys before those of that sequence), or None."""
    k, v = tensors.k.clone(), tensors.v.clone()
    end, begin = problem.total_q, problem.total_k
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
    return tensors._replace(k=k, v=v), end, begin
