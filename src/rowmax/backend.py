"""Backends: what each can do and, where it cannot, why; which one takes a problem.

A backend is imported only when a problem on its kind of device asks for it.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from typing import Literal, Protocol

from torch import Tensor

from .problem import Gradients, Problem, Tensors, Wanted

Call = Literal["forward", "backward"]

#: every backend, the most specialised first
NAMES = ("hopper", "triton", "cpu", "torch", "reference")

#: where each is, and the devices it may be asked for
_MODULES = {
    "hopper": "rowmax.hopper",
    "triton": "rowmax.triton",
    "cpu": "rowmax.cpu",
    "torch": "rowmax.tiled",
    "reference": "rowmax.reference",
}
_DEVICES = {"hopper": ("cuda",), "triton": ("cuda", "xpu"), "cpu": ("cpu",)}
#: what brings the libraries of a backend that has some of its own
_EXTRAS = {"cpu": "cpu"}
#: the reference holds the whole score matrix, so it is used only where it is named
_BY_NAME_ONLY = ("reference",)
#: what is made of differentiable operations alone: autograd goes through it, as often as asked
PLAIN_OPERATIONS = ("reference",)


class Backend(Protocol):
    """What the modules above offer as module-level functions."""

    def supports(self, problem: Problem, call: Call) -> str | None:
        """None, or the sentence that says why not."""
        ...

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """(out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``), contiguous."""
        ...

    def backward(
        self,
        problem: Problem,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """The wanted gradients, contiguous, each of its input's shape and dtype."""
        ...


@lru_cache(maxsize=512)
def choose(problem: Problem, call: Call, name: str | None = None) -> Backend:
    """The backend called ``name``, or the first that supports the problem.

    Raises:
        ValueError: the one named (or every one) refuses, with the reasons.
    """
    refusals = {}
    for candidate in NAMES if name is None else (name,):
        if name is None and candidate in _BY_NAME_ONLY:
            continue
        reason = refusal(candidate, problem, call)
        if reason is None:
            return _load(candidate)
        refusals[candidate] = reason
    reasons = "; ".join(f"{n}: {r}" for n, r in refusals.items())
    raise ValueError(f"backend: got {name!r}; it cannot take this {call}: {reasons}")


def refusal(name: str, problem: Problem, call: Call) -> str | None:
    """Why the backend cannot take the call, or None."""
    devices = _DEVICES.get(name)
    if devices is not None and problem.device not in devices:
        return f"it runs on {' or '.join(devices)}, the tensors are on {problem.device}"
    try:
        backend = _load(name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(name)
        hint = f': pip install "rowmax[{extra}]", in a checkout ".[{extra}]"' if extra else ""
        return f"{error.name} is not installed{hint}"
    except (ImportError, OSError, RuntimeError) as error:
        return _broken(name, f"it cannot be loaded: {type(error).__name__}: {error}")
    return backend.supports(problem, call)


@lru_cache(maxsize=16)  # the warning comes once
def _broken(name: str, reason: str) -> str:
    """Warn that a backend that is installed does not work; return the reason."""
    warnings.warn(f"rowmax: the {name} backend is left out: {reason}", RuntimeWarning, stacklevel=3)
    return reason


def _load(name: str) -> Backend:
    return import_module(_MODULES[name])  # pyright: ignore
