"""The private interfaces of torch, each with what is done where it is missing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor


def values_are_readable(t: Tensor) -> bool:
    """Whether values can be looked at for free: not on a GPU (a wait), not while tracing."""
    return (
        t.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # make_fx
        and type(t) in (Tensor, torch.nn.Parameter)
    )


def is_batched(t: Tensor | None) -> bool:
    """True inside ``vmap`` for a tensor that has a value for each slice: none can be looked at."""
    while t is not None and is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False
