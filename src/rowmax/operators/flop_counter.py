"""The FLOP formulas of the operators, for ``torch.utils.flop_counter``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..call import flops
from ..call.problem import Problem, problem_of
from ..torch_compat import active_dispatch_modes, is_fake
from .library import LAYOUTS, split


def register() -> None:
    """Register the formulas with torch's counter, once its module is imported.

    Importing it here would import Triton. A counter copies the registry when it is constructed,
    possibly before our first call, so active counters get the formulas too.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counting = (getattr(mode, "counter", mode) for mode in active_dispatch_modes())
    for counter in (module, *counting):
        registry = getattr(counter, "flop_registry", None)
        if registry is not None:
            for name, formula in _FORMULAS.items():
                registry.setdefault(getattr(torch.ops.rowmax, name), formula)


def _formula(name: str, before: int) -> Callable[..., int]:
    count: Callable[..., int] = getattr(flops, f"{name}_flops")
    return lambda *inputs, out_val=None: count(*_measured(inputs[before:]))


_FORMULAS = {name: _formula(name, layout.before) for name, layout in LAYOUTS.items()}


def _measured(inputs: tuple[Any, ...]) -> tuple[Problem, flops.Lengths | None]:
    """Return the problem and, of a packed call whose offsets have values, the lengths."""
    tensors, options = split(inputs)
    problem = problem_of(tensors, options)
    cu = [t for t in (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if t is not None]
    if not cu or any(map(is_fake, cu)):
        return problem, None
    return problem, list(zip(*(t.diff().tolist() for t in cu), strict=True))
