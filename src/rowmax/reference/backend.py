"""The dense definition as a backend, for comparison: its memory is quadratic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.inputs import Cotangents, Tangents, WantedSecond
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
        pairs = [(o, dout.to(o.dtype)), (e, dlse)]  # lse does not depend on v
        used = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
        outputs, cotangents = zip(*used, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    shaped = (
        torch.zeros_like(x) if g is None else g.contiguous()
        for g, x in zip(grads, leaves.values(), strict=True)
    )
    return Gradients(**dict(zip(leaves, shaped, strict=True)))


def tangent(
    problem: Problem, tensors: Tensors, tangents: Tangents
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, tout, tlse)."""
    with torch.enable_grad(), torch.autocast(problem.device, enabled=False):
        (out, lse), (tout, tlse) = _along(problem, tensors, tangents)
    out, tout = (t.detach().to(problem.dtype).contiguous() for t in (out, tout))
    return out, lse.detach().contiguous(), tout, tlse.detach().contiguous()


def tangent_backward(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    out: Tensor,
    lse: Tensor,
    tout: Tensor,
    tlse: Tensor,
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
        results, along = _along(problem, tensors._replace(**first), tangents._replace(**second))
        pairs = [
            (x, g.to(x.dtype))
            for x, g in zip((*results, *along), cotangents, strict=True)
            if g is not None and x.requires_grad
        ]
        every = [*first.values(), *second.values()]
        found: list[Tensor | None] = [None] * len(every)
        if pairs and every:
            outputs, grads = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(outputs, every, grads, allow_unused=True))
    shaped = [
        torch.zeros_like(x) if g is None else g.contiguous()
        for g, x in zip(found, every, strict=True)
    ]
    cut = len(first)
    return (
        Gradients(**dict(zip(first, shaped[:cut], strict=True))),
        Gradients(**dict(zip(second, shaped[cut:], strict=True))),
    )


Pair = tuple[Tensor, Tensor]


def _along(problem: Problem, tensors: Tensors, tangents: Tangents) -> tuple[Pair, Pair]:
    """Return (out, lse) and their tangents, differentiable.

    By reverse mode twice: the vjp is linear in its cotangents u, and the jvp is its derivative by
    u. A level of forward mode may be in use already, and torch has only one.
    """
    leaves = {
        name: x if x.requires_grad else x.detach().requires_grad_()
        for name, t in tangents._asdict().items()
        if t is not None
        for x in [getattr(tensors, name)]
    }
    out, lse = attention(problem, tensors._replace(**leaves), problem.accumulator)
    results = [out, lse]
    found = [torch.zeros_like(out), torch.zeros_like(lse)]
    used = [n for n, x in enumerate(results) if leaves and x.requires_grad]
    if used:
        u = [torch.zeros_like(results[n]).requires_grad_() for n in used]
        grads = torch.autograd.grad(
            [results[n] for n in used],
            list(leaves.values()),
            u,
            create_graph=True,
            allow_unused=True,
        )
        given = [getattr(tangents, name) for name in leaves]
        pairs = [(g, t.to(g.dtype)) for g, t in zip(grads, given, strict=True) if g is not None]
        if pairs:
            lefts, rights = zip(*pairs, strict=True)
            jvp = torch.autograd.grad(lefts, u, rights, create_graph=True, allow_unused=True)
            for n, t in zip(used, jvp, strict=True):
                found[n] = found[n] if t is None else t
    return (out, lse), (found[0], found[1])


def _or_zeros(given: Tensors | Tangents, tensors: Tensors, name: str) -> Tensor:
    x = getattr(given, name)
    return torch.zeros_like(getattr(tensors, name)) if x is None else x
