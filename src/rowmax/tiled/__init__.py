"""Attention in tiles with torch operations alone: any device, any problem."""

from ..call.dispatch import supports_all_but_bent_tangents as supports
from .backward import backward
from .forward import forward
from .tangent import tangent
from .tangent_backward import tangent_backward

__all__ = ["backward", "forward", "supports", "tangent", "tangent_backward"]
