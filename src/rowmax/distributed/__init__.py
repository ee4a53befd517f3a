"""Exact attention over a sequence that is cut across devices."""

from .layout import Layout

__all__ = ["Layout"]
