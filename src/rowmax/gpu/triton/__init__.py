"""Attention in plain Triton, for every GPU that Triton supports."""

from __future__ import annotations

import torch

from ...call.problem import Problem
from .. import assembler
from ..replay import record
from .backward import backward
from .forward import forward

__all__ = ["backward", "forward", "notes", "record", "supports"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(problem: Problem, call: str) -> str | None:
    """Return None, or the reason why no kernel computes the problem."""
    if problem.dtype not in _DTYPES:
        return f"it computes in float32, float16 and bfloat16, not in {problem.dtype}"
    if problem.device == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        have, want = torch.cuda.get_device_capability(problem.device_index), (7, 0)
        if problem.dtype == torch.bfloat16:
            want = (8, 0)
        if have < want:
            wanted = ".".join(map(str, want))
            return f"{problem.dtype} needs a GPU of compute capability {wanted} or more"
    return None


def notes(problem: Problem, call: str) -> list[str]:
    """Return the sentences that ``explain`` adds to a job of this backend."""
    text = assembler.note(problem.device_index) if problem.device == "cuda" else None
    if text is None:
        return []
    narrow = assembler.choice().taken is None and problem.dtype == torch.float32
    return [text, *(["tiles of at most 32 x 32, which make no wgmma"] if narrow else [])]
