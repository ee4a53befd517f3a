"""The backend of CPUs: tile loops and matrix products, compiled by Numba."""

from __future__ import annotations

from torch import Tensor

from ..call.dispatch import supports_all_but_bent_tangents as supports
from ..call.problem import Gradients, Problem, Tensors, Wanted
from . import few_calls
from .backward import backward as backward_by_tiles
from .few_calls import record
from .forward import forward as forward_by_tiles
from .tangent import tangent
from .tangent_backward import tangent_backward

__all__ = ["backward", "forward", "record", "supports", "tangent", "tangent_backward"]


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    found = few_calls.forward(problem, tensors)
    if found is not None:
        return found
    few = few_calls.few_sequences(problem, tensors)
    out, lse = forward_by_tiles(problem, tensors, hidden=few)
    if few is None or few_calls.fill(problem, tensors, out, lse):
        return out, lse
    return forward_by_tiles(problem, tensors)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Return the wanted gradients."""
    given = problem, tensors, out, lse, dout, dlse, wanted
    found = few_calls.backward(*given)
    return backward_by_tiles(*given) if found is None else found
