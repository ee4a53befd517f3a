"""The FLOP formulas of the operators, for ``torch.utils.flop_counter``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..call import flops
from ..call.problem import Problem, problem_of
from ..torch_compat import active_dispatch_modes, is_fake
from .library import N_TANGENTS, second_arguments, split


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


def _forward_flops(*inputs: Any, out_val: Any = None) -> int:
    return flops.forward_flops(*_measured(inputs))


def _backward_flops(
    dout: Tensor, dlse: Any, out: Any, lse: Any, wanted: Any, *inputs: Any, out_val: Any = None
) -> int:
    return flops.backward_flops(*_measured(inputs))


def _tangent_flops(*inputs: Any, out_val: Any = None) -> int:
    return flops.tangent_flops(*_measured(inputs[N_TANGENTS:]))


def _tangent_backward_flops(*inputs: Any, out_val: Any = None) -> int:
    return flops.tangent_backward_flops(*_measured(second_arguments(*inputs).inputs))


_FORMULAS = {
    "forward": _forward_flops,
    "backward": _backward_flops,
    "tangent": _tangent_flops,
    "tangent_backward": _tangent_backward_flops,
}


def _measured(inputs: tuple[Any, ...]) -> tuple[Problem, flops.Lengths | None]:
    """Return the problem and, of a packed call whose offsets have values, the lengths."""
    tensors, options = split(inputs)
    problem = problem_of(tensors, options)
    cu = [t for t in (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if t is not None]
    if not cu or any(map(is_fake, cu)):
        return problem, None
    return problem, list(zip(*(t.diff().tolist() for t in cu), strict=True))
