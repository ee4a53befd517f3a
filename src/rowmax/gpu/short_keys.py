"""Few keys: which backwards one program a kv head computes, and by which tiles.

A program holds all keys of a kv head (``triton/short.py``). Memory and registers bound their
number. Where kv heads are fewer than processors, programs share the queries of a kv head.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..call.dispatch import Limit, beyond
from ..call.problem import Problem, Wanted
from .tiles import BOTH_UP_TO, WGMMA_ROWS, Tiles, kind_of, limits_of, padded, table

#: elements of K, and of V, of a kv head that a program holds
MOST_ELEMENTS = 256 * 64
#: programs wanted: two for each of 132 processors
PROGRAMS = 264
#: the fewest queries of a part of many
LEAST_QUERIES = 256

#: a backward that keeps all of these is computed by one program a kv head
LIMITS = (
    Limit(
        lambda p: p.device == "cuda" and torch.cuda.is_available(), "the tensors are not on a GPU"
    ),
    Limit(lambda p: p.dtype.itemsize == 2, "{0.dtype} needs twice the memory"),
    Limit(lambda p: not p.varlen, "sequences are packed"),
    Limit(lambda p: 0 < p.nk and _elements(p) <= MOST_ELEMENTS, "{0.nk} keys are too many"),
    Limit(lambda p: max(p.d, p.dv) <= BOTH_UP_TO, "the heads are too wide"),
)


def _elements(problem: Problem) -> int:
    return _height(problem) * padded(max(problem.d, problem.dv, 64))


def _height(problem: Problem) -> int:
    """Return the rows of a tile that holds all keys."""
    return max(WGMMA_ROWS, padded(problem.nk))


def tiles_of(problem: Problem, wanted: Wanted | None = None) -> Tiles | None:
    """Return the tiles of a backward of few keys, or None: then other kernels compute it.

    Without ``wanted``, all gradients are.
    """
    if beyond(LIMITS, problem) is not None:
        return None
    more = (problem.bias is not None, problem.sink, bool(problem.heads))
    if any(more if wanted is None else wanted[3:]):
        return None  # gradients of other inputs than q, k and v
    job = f"short-{_height(problem)}"
    device = torch.device(problem.device, problem.device_index)
    found = table(kind_of(job, problem), limits_of(device))
    return found and replace(found, block_k=_height(problem), parts=parts_of(problem))


def parts_of(problem: Problem) -> int:
    """Return the number of programs that share the queries of a kv head."""
    heads = max(1, problem.batch * problem.hk)
    return max(1, min(PROGRAMS // heads, problem.nq // LEAST_QUERIES))
