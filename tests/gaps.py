"""Drawn forward calls of two chunks of queries with a gap between them (``call.inputs.Gap``)."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from rowmax.call.inputs import Gap, Tensors
from rowmax.call.problem import Problem
from rowmax.reference import dense
from rowmax.testing import Case, complaint, make

#: queries before a gap: multiples of the rows that two warpgroups take; most, that three take too
EARLY = (128, 256, 384, 768, 1152, 3072)


def drawn(seed: int, device: str, dtype: torch.dtype, longest: int) -> tuple[Problem, Tensors]:
    """Return a causal call whose first queries stand some keys earlier, of chunks up to so long."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    early = rng.choice([n for n in EARLY if n <= longest])
    late = rng.choice((rng.randint(1, longest), 128, early))
    gap = rng.choice((0, 1, 64, rng.randint(0, 2 * longest)))
    before = rng.choice((0, 5, 128, rng.randint(0, longest)))
    case = Case(
        f"gap-{seed}", b=rng.choice((1, 1, 2)), nq=early + late, nk=early + gap + late + before,
        hq=4, hk=rng.choice((1, 2, 4)), d=rng.choice((32, 64, 80, 96, 128, 256)), causal=True,
        sink=rng.random() < 0.3, softcap=rng.choice((0.0, 9.0)),
    )  # fmt: skip
    problem, tensors = make(case, device, dtype).problem()
    return problem._replace(gap=Gap(early, gap)), tensors


def complaints(problem: Problem, tensors: Tensors, got: tuple[Tensor, Tensor]) -> list[str]:
    """Return the faults of (out, lse) by the dense definition, a call of each chunk."""
    gap = problem.gap
    assert gap is not None
    seen = problem.nk - problem.nq + gap.queries - gap.keys
    found = []
    for rows, keys in (
        (slice(0, gap.queries), seen),
        (slice(gap.queries, problem.nq), problem.nk),
    ):
        k, v = (t[:, :keys] for t in (tensors.k, tensors.v))
        some = tensors._replace(q=tensors.q[:, rows], k=k, v=v)
        n = some.q.shape[1]
        plain = problem._replace(nq=n, total_q=n, nk=keys, total_k=keys, gap=None)
        ref, std = (dense.attention(plain, some, t) for t in (torch.float64, plain.dtype))
        each = zip(("out", "lse"), (got[0][:, rows], got[1][..., rows]), ref, std, strict=True)
        found += [complaint(name, *three, plain.dtype) for name, *three in each]
    return [text for text in found if text]
