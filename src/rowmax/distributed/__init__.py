"""Exact attention over a sequence that is cut across devices."""

from .attention import attention
from .layout import Layout

__all__ = ["Layout", "attention"]
