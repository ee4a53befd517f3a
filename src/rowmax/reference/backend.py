"""The dense definition as a backend, for comparison: its memory is quadratic."""

from __future__ import annotations

import torch
from torch import Tensor

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
            name: getattr(tensors, name).detach().requires_grad_()
            for name, want in wanted._asdict().items()
            if want
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
