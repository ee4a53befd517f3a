"""The backend of CPUs: tile loops and matrix products, compiled by Numba."""

from __future__ import annotations

from ..call.problem import Problem
from .backward import backward
from .forward import forward

__all__ = ["backward", "forward", "supports"]


def supports(problem: Problem, call: str) -> str | None:
    """Return None: the backend computes every call on a CPU."""
    return None
