"""Attention for Hopper (sm_90a) in Gluon: TMA, asynchronous wgmma, specialised warps.

``supports`` refuses calls without a kernel, ``lacks`` gradients without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...call.dispatch import WHOLE_DRAWS, Limit, beyond
from ...call.inputs import Arrivals, Places
from ...call.problem import Gradients, Problem, Tensors, Wanted
from ...imports import without_collections
from .. import parts

__all__ = [
    "backward", "compile_ahead", "defers", "forward", "lacks", "notes", "record", "supports",
    "takes_arrivals", "takes_gap", "takes_places",
]  # fmt: skip


#: a call that keeps all of these has a kernel
LIMITS = (
    Limit(
        lambda p: p.dtype in (torch.float16, torch.bfloat16),
        "it takes float16 and bfloat16, the tensors are {0.dtype}",
    ),
    Limit(
        lambda p: max(p.d, p.dv) <= 576,
        "it takes head sizes up to 576, these are {0.d} and {0.dv}",
    ),
    Limit(
        lambda p: p.d % 8 == p.dv % 8 == 0,
        "it takes head sizes that are multiples of 8, these are {0.d} and {0.dv}",
    ),
    Limit(lambda p: p.scale > 0.0, "it takes a scale above 0"),
    Limit(
        lambda p: not p.dropout_p or max(p.d, p.dv) <= (256 if p.bias is None else 128),
        "it takes dropout for head sizes up to 256, with a bias up to 128, these are {0.d} and "
        "{0.dv}",
    ),
    WHOLE_DRAWS,
    Limit(lambda p: p.allowed is None, "it does not take boolean masks"),
    Limit(lambda p: p.heads in ((), ("alibi",)), "of the terms of heads it takes alibi alone"),
    Limit(lambda p: p.align == "keys", "it aligns positions to the keys, not to prefix lengths"),
    Limit(lambda p: not p.bidirectional, "it does not take a bidirectional prefix"),
    Limit(
        lambda p: not (p.varlen and p.documents),
        "it does not take documents within packed sequences",
    ),
)


def supports(problem: Problem, call: str) -> str | None:
    """Return None, or the reason why no kernel computes the call."""
    reason = beyond(LIMITS, problem)
    if call == "backward":
        reason = reason or _refused_backward(problem)
    return reason or _missing(problem.device_index)


def defers(problem: Problem, call: str) -> str | None:
    """Return why the Triton backend takes a call unless this one is named, or None."""
    from .. import short_keys
    from .forward_parts import takes_few

    count = parts.parts_of(problem) if call == "forward" and parts.splits(problem) else 1
    if count > 1 and not takes_few(problem):
        return f"few queries: triton reads their keys in {count} parts"

    return short_keys.deferral(problem, call)


def lacks(problem: Problem, call: str) -> dict[str, str]:
    """Return the results without a kernel, with reasons, of a problem that ``supports`` accepts."""
    if call != "backward":
        return {}
    found = {"dheads": "it makes no gradient of alibi"} if problem.heads else {}
    if problem.bias is None:
        return found
    from .backward_bias import refused_gradient

    reason = refused_gradient(problem)
    return found if reason is None else {**found, "dbias": reason}


def notes(problem: Problem, call: str) -> list[str]:
    """Return the sentences that ``explain`` adds to a job of this backend."""
    from .. import assembler
    from . import host

    found = [assembler.note(problem.device_index)]
    if call == "forward":
        of_tile = host.note_of_tile, host.note_of_heads, host.note_of_parts, host.note_of_maxima
        found = [*(note(problem) for note in of_tile), *found]
    elif call == "backward":
        from .backward_plan import note_of_shares

        found = [note_of_shares(problem), *found]
    return [text for text in found if text]


def forward(
    problem: Problem, tensors: Tensors, arrivals: Arrivals | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse). With arrivals, keys and values may arrive while the kernel runs."""
    with without_collections(f"{__name__}.host"):
        from . import host

    return host.forward(problem, tensors, arrivals)


def takes_arrivals(problem: Problem) -> bool:
    """Return True if ``forward`` takes arrivals: TMA reads keys and values where they arrive."""
    return problem.nq > 0 < problem.nk


def takes_gap(problem: Problem) -> bool:
    """Return True if ``forward`` takes the gap of a problem, between tiles of queries.

    Queries before the gap have other tiles of keys; only the band may read positions.
    """
    with without_collections(f"{__name__}.host"):
        from . import host

    return host.takes_gap(problem)


def compile_ahead(problem: Problem, tensors: Tensors, backward: Any, wanted: Wanted) -> Any:
    """Return a context for a first forward; threads compile its backward's kernels (``ahead``)."""
    from .. import ahead

    return ahead.compile_ahead(problem, tensors, backward, wanted)


def record(run: Callable[[Any], Any], given: Any) -> tuple[Any, Callable[[Any], Any] | bool | None]:
    """Return the results of a call, and the function that repeats its launches (``replay``)."""
    from .. import replay

    return replay.record(run, given)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    places: Places | None = None,
) -> Gradients:
    """Return the gradients that are wanted and not among ``lacks``.

    With places, dk and dv are written there, and are None.
    """
    with without_collections(f"{__name__}.backward_host"):
        from . import backward_host

    return backward_host.backward(problem, tensors, out, lse, dout, dlse, wanted, places)


def takes_places(problem: Problem) -> bool:
    """Return True if ``backward`` can write dk and dv to places."""
    return problem.wide and max(problem.d, problem.dv) <= 256 and problem.nk > 0 < problem.nq


def _refused_backward(p: Problem) -> str | None:
    """Return why no backward kernel computes a problem, or None."""
    if max(p.d, p.dv) > 512:
        return f"its backward takes head sizes up to 512, these are {p.d} and {p.dv}"
    if max(p.d, p.dv) > 256 and p.bias is not None:
        return "its backward of head sizes above 256 takes no bias"
    if max(p.d, p.dv) > 256 and p.prefix:
        return "its backward of head sizes above 256 takes no prefix lengths"
    if p.bias is None:
        return None
    from .backward_bias import kind_of, refused_tile

    return None if kind_of(p) else refused_tile(p)


def _missing(index: int | None) -> str | None:
    """Return why the machine, or its device of this index, cannot run the kernels, or None."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no CUDA device"
    if torch.cuda.get_device_capability(index) != (9, 0):
        return "the device is not of compute capability 9.0 (Hopper)"
    return _without_gluon()


@lru_cache(maxsize=1)
def _without_gluon() -> str | None:
    """Return why the kernels cannot be imported, or None."""
    try:
        with without_collections(f"{__name__}.forward_kernel"):
            from ..compat import is_compiled
            from . import forward_kernel, packed  # noqa: F401
    except ImportError as error:
        return f"triton's Gluon is missing or of another release ({error})"
    if not is_compiled(packed._place):
        return "Triton's interpreter is on (TRITON_INTERPRET=1), which does not run Gluon"
    return None
