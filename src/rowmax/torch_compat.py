"""The private interfaces of torch, in one place. Tried with torch 2.11 and 2.13."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

#: the types of tensors that are nothing but numbers
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_transformed() -> bool:
    """True inside ``vmap``, ``grad`` and the other transforms of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def is_traced_or_transformed() -> bool:
    """True while a call is compiled, traced by ``torch.jit`` or transformed by ``torch.func``."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or is_transformed()
    )


def values_are_readable(t: Tensor) -> bool:
    """True if reading values is free: not on a GPU, which is a wait, and not while tracing."""
    return (
        t.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # make_fx
        and type(t) in PLAIN
    )


def is_batched(t: Tensor | None) -> bool:
    """True inside ``vmap`` for a tensor with a value for each slice: none can be read."""
    while t is not None and is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False
