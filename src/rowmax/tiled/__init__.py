"""Attention in tiles with torch operations alone: any device, any problem."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward", "supports"]


def supports(problem: object, call: str) -> str | None:
    """Return None: the backend computes every call."""
    return None if call in ("forward", "backward") else f"it has no {call}"
