"""The backend of CPUs: tile loops and matrix products, compiled by Numba."""

from __future__ import annotations

from ..call.inputs import HEAD_TERMS
from ..call.problem import Problem
from .backward import backward
from .forward import forward
from .tangent import tangent
from .tangent_backward import tangent_backward

__all__ = ["backward", "forward", "supports", "tangent", "tangent_backward"]


def supports(problem: Problem, call: str) -> str | None:
    """Return None: the backend computes every call except tangents of terms that bend scores."""
    if call in ("forward", "backward"):
        return None
    bending = [name for name in problem.heads if not HEAD_TERMS[name].added]
    return f"it has no tangent of {', '.join(bending)}" if bending else None
