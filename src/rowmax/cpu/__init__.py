"""The backend of CPUs: tile loops compiled by Numba, with matrix products of our own."""

from __future__ import annotations

from ..call.problem import Problem
from .backward import backward
from .forward import forward

__all__ = ["backward", "forward", "supports"]


def supports(problem: Problem, call: str) -> str | None:
    """Return None: the backend refuses nothing that runs on a CPU."""
    return None
