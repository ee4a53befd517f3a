"""Attention in plain Triton, for every GPU that Triton supports."""

from __future__ import annotations

import torch

from ...call.dispatch import SECOND_ORDER, WHOLE_DRAWS, Limit, beyond
from ...call.inputs import HEAD_TERMS
from ...call.problem import Problem
from .. import assembler, parts, shares, short_keys, tiles
from ..ahead import compile_ahead
from ..replay import record
from .backward import backward
from .few import forward
from .tangent import tangent
from .tangent_backward import tangent_backward

__all__ = [
    "backward", "compile_ahead", "forward", "notes", "record", "supports", "tangent",
    "tangent_backward",
]  # fmt: skip


def _has_capability(problem: Problem, *least: int) -> bool:
    """Return True unless the device is an NVIDIA GPU of a lower compute capability."""
    if problem.device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(problem.device_index) >= least


#: a call that keeps all of these has kernels
LIMITS = (
    Limit(
        lambda p: p.dtype in (torch.float32, torch.float16, torch.bfloat16),
        "it computes in float32, float16 and bfloat16, not in {0.dtype}",
    ),
    Limit(
        lambda p: max(p.d, p.dv) <= 512,
        "it takes head sizes up to 512, these are {0.d} and {0.dv}",
    ),
    WHOLE_DRAWS,
    Limit(
        lambda p: p.dtype != torch.bfloat16 or _has_capability(p, 8, 0),
        "{0.dtype} needs a GPU of compute capability 8.0 or more",
    ),
    Limit(
        lambda p: _has_capability(p, 7, 0),
        "{0.dtype} needs a GPU of compute capability 7.0 or more",
    ),
)

#: the sentence of ``explain`` for few queries
_IN_PARTS = "few queries: their keys in %d parts, which a second kernel merges"
#: bytes of a row of the widest head: of wider ones, most of the sums would lie in local memory
_WIDEST = 512
#: the limits of tangents and of their backward, past those of all calls
TANGENT_LIMITS = (
    Limit(
        lambda p: max(p.d, p.dv) * p.dtype.itemsize <= _WIDEST,
        "it computes tangents of head sizes up to 256, in float32 up to 128, not of "
        "{0.d} and {0.dv}",
    ),
    Limit(
        lambda p: all(HEAD_TERMS[name].added for name in p.heads),
        "it has no tangent of terms that bend scores: {0.heads}",
    ),
)


def supports(problem: Problem, call: str) -> str | None:
    """Return None, or the reason why no kernel computes the problem."""
    refused = beyond(LIMITS, problem)
    if refused is None and call in SECOND_ORDER:
        return beyond(TANGENT_LIMITS, problem)
    return refused


def _note_of_shares(problem: Problem) -> str | None:
    device = torch.device(problem.device, problem.device_index)
    job = "dk" if max(problem.d, problem.dv) > tiles.BOTH_UP_TO else "dkdv"
    block_k = tiles.tiles_for(job, problem, device).block_k
    return shares.note(problem, shares.shares_of(problem, block_k))


def notes(problem: Problem, call: str) -> list[str]:
    """Return the sentences that ``explain`` adds to a job of this backend."""
    found = []
    if call == "forward" and parts.splits(problem):
        count = parts.parts_of(problem)
        found.append("one tile for the queries of a kv head" if count == 1 else _IN_PARTS % count)
    shape = short_keys.tiles_of(problem) if call == "backward" else None
    if shape is not None:
        more = f", in {shape.parts} parts that a second launch adds" if shape.parts > 1 else ""
        found.append("few keys: one program a kv head" + more)
    elif call == "backward" and (text := _note_of_shares(problem)):
        found.append(text)
    text = assembler.note(problem.device_index) if problem.device == "cuda" else None
    if text is None:
        return found
    narrow = assembler.choice().taken is None and problem.dtype == torch.float32
    return [*found, text, *(["tiles of at most 32 x 32, which make no wgmma"] if narrow else [])]
