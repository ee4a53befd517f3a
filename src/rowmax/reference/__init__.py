"""The definition (dense.py), the recurrence (online.py), and the dense one as a backend."""

from .backend import backward, forward, supports

__all__ = ["backward", "forward", "supports"]
