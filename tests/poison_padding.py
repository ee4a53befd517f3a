"""Infinite or NaN keys and values in padding, of which the results must not depend."""

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
    """Return a sentence if poisoned padding changes the forward's results ``got``, or None."""
    found = poison_padding(problem, tensors)
    if found is None:
        return None
    tensors, end, _ = found
    out, lse = forward(problem, tensors)
    same = torch.equal(out[:, :end], got[0][:, :end]) and torch.equal(
        lse[..., :end], got[1][..., :end]
    )
    return None if same else "keys or values past the end of a sequence change it"


def padding_matters_backward(
    problem: Problem,
    tensors: Tensors,
    saved: tuple[Tensor, ...],
    wanted: Wanted,
    backward: Callable[..., Gradients],
    got: Gradients,
    exact: Callable[[str], bool],
) -> str | None:
    """Return a sentence if poisoned padding changes the gradients ``got``, or None.

    ``saved`` are out, lse, dout and dlse. Gradients that are not ``exact`` may differ as sums in
    another order do.
    """
    found = poison_padding(problem, tensors)
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
    if not problem.varlen:  # else the poisoned sequence may share the bias
        rows["bias"] = None
    for name, some in rows.items():
        x, y = getattr(again, name), getattr(got, name)
        if x is None or y is None:
            continue
        x, y = x[:, :some].double(), y[:, :some].double()
        off, size = (x - y).norm().item(), y.norm().item()
        if not (torch.equal(x, y) if exact(name) else off <= 1e-2 * size + 1e-6 * y.numel() ** 0.5):
            return f"d{name}: rows past the end of a sequence change it"
    return None


def poison_padding(problem: Problem, tensors: Tensors) -> tuple[Tensors, int, int] | None:
    """Return tensors with infinite or NaN keys and values in padding, or None without padding.

    Padding is what follows each prefix length, or the last packed sequence. The result also has
    the number of queries and of keys before that sequence.
    """
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
