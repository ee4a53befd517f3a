"""The dense definition as a backend, for comparison: its memory is quadratic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.functional import jvp

from ..call.inputs import Cotangents, Results, Tangents, WantedSecond
from ..call.problem import Gradients, Problem, Tensors, Wanted
from .dense import attention


def supports(problem: Problem, call: str) -> str | None:
    """Return None: the backend refuses nothing."""
    return None


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    with torch.autocast(problem.device, enabled=False):  # products in the definition's dtype
        out, lse = attention(problem, tensors, problem.accumulator)
    return out.to(problem.dtype).contiguous(), lse.contiguous()


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Return the gradients, by autograd through the definition."""
    with torch.enable_grad(), torch.autocast(problem.device, enabled=False):
        leaves = {
            name: x.detach().to(problem.gradient_dtype(name, x)).requires_grad_()
            for name, want in wanted._asdict().items()
            if want
            for x in [getattr(tensors, name)]
        }
        o, e = attention(problem, tensors._replace(**leaves), problem.accumulator)
        found = _grad((o, e), (dout, dlse), list(leaves.values()))  # lse does not depend on v
    return Gradients(**dict(zip(leaves, found, strict=True)))


def tangent(problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
    """Return the results and their tangents."""
    with torch.enable_grad(), torch.autocast(problem.device, enabled=False):
        out, lse, tout, tlse = (t.detach() for t in _along(problem, tensors, tangents))
    out, tout = (t.to(problem.dtype).contiguous() for t in (out, tout))
    return Results(out, lse.contiguous(), tout, tlse.contiguous())


def tangent_backward(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: Results,
    cotangents: Cotangents,
    wanted: WantedSecond,
) -> tuple[Gradients, Gradients]:
    """Return the gradients of the inputs and of the tangents, by autograd."""
    leaves: list[dict[str, Tensor]] = [
        {
            name: x.detach().requires_grad_()
            for name, want in part._asdict().items()
            if want
            for x in [_or_zeros(given, tensors, name)]
        }
        for part, given in zip(wanted, (tensors, tangents), strict=True)
    ]
    with torch.enable_grad(), torch.autocast(problem.device, enabled=False):
        first, second = leaves
        found = _along(problem, tensors._replace(**first), tangents._replace(**second))
        made = _grad(found, cotangents, [*first.values(), *second.values()])
    return (
        Gradients(**dict(zip(first, made, strict=False))),
        Gradients(**dict(zip(second, made[len(first) :], strict=True))),
    )


def _grad(
    results: Sequence[Tensor], cotangents: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the leaves from the results that have a cotangent, contiguous."""
    pairs = [
        (x, g.to(x.dtype))
        for x, g in zip(results, cotangents, strict=True)
        if g is not None and x.requires_grad
    ]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs and leaves:
        used, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(used, leaves, given, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g.contiguous()
        for g, x in zip(found, leaves, strict=True)
    ]


def _along(problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
    """Return the results and their tangents, differentiable.

    By reverse mode twice: a level of forward mode may be in use already, and torch has only one.
    """
    given = {name: t for name, t in tangents._asdict().items() if t is not None}
    inputs = tuple(getattr(tensors, name) for name in given)

    def results(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(given, inputs, strict=True))
        return attention(problem, tensors._replace(**named), problem.accumulator)

    if not given:
        out, lse = results()
        return Results(out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    along = tuple(t.to(x.dtype) for t, x in zip(given.values(), inputs, strict=True))
    (out, lse), (tout, tlse) = jvp(results, inputs, along, create_graph=True)
    return Results(out, lse, tout, tlse)


def _or_zeros(given: Tensors | Tangents, tensors: Tensors, name: str) -> Tensor:
    x = getattr(given, name)
    return torch.zeros_like(getattr(tensors, name)) if x is None else x
