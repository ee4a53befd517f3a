"""Attention for Hopper (sm_90a) in Gluon: TMA, asynchronous wgmma, specialised warps.

It takes what is listed in ``supports``; the rest is the Triton backend's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..problem import Gradients, Problem, Tensors, Wanted

__all__ = ["backward", "forward", "supports"]


def supports(problem: Problem, call: str) -> str | None:
    """None, or the sentence that says why not."""
    reason = _refused(problem)
    if call == "backward":
        reason = reason or _refused_backward(problem)
    return reason or _missing()


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    from . import launch

    return launch.forward(problem, tensors)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    from .gradients import launch

    return launch.backward(problem, tensors, out, lse, dout, dlse, wanted)


def _refused(p: Problem) -> str | None:
    """What the kernels do not do."""
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the tensors are {p.dtype}"
    if max(p.d, p.dv) > 256:
        return f"it takes head sizes up to 256, these are {p.d} and {p.dv}"
    if p.d % 8 or p.dv % 8:
        return f"it takes head sizes that are multiples of 8, these are {p.d} and {p.dv}"
    if p.scale == 0.0:
        return "it takes a scale above 0"
    if p.dropout_p > 0:
        return "it does not take dropout"
    if p.allowed is not None:
        return "it does not take boolean masks"
    if p.varlen and p.documents:
        return "it does not take documents within packed sequences"
    return None


def _refused_backward(p: Problem) -> str | None:
    """What the kernels of the backward do not do beside."""
    if p.bias is not None:
        if p.bias[2:] != (p.nq, p.nk) or p.varlen:
            return "its backward takes a bias with a row for each query and a column for each key"
        if p.bias_dtype != p.dtype:
            return f"its backward takes a bias of {p.dtype}, this one is {p.bias_dtype}"
        if p.nk % 8:
            return f"its backward takes a bias for a multiple of 8 keys, these are {p.nk}"
    return None


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """What this machine lacks."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the device is not of compute capability 9.0 (Hopper)"
    try:
        from . import kernel  # noqa: F401
    except ImportError as error:
        return f"triton's Gluon is missing or of another release ({error})"
    return None
