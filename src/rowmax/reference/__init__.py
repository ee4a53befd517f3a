"""The definition (dense.py), the recurrence (online.py), and the dense one as a backend."""

from .backend import backward, forward, supports, tangent, tangent_backward

__all__ = ["backward", "forward", "supports", "tangent", "tangent_backward"]
