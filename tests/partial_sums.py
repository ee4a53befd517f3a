"""Partial sums of dk and dv: each backend returns them in the dtype of sums."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmax.call.blocks import Block, block_of
from rowmax.call.dispatch import Prepared, choose
from rowmax.call.inputs import Gradients, Options, Tensors, Wanted
from rowmax.call.problem import problem_of

_WANTED = Wanted(False, True, True, False, False)


def check(backend: str, dtype: torch.dtype) -> None:
    """Check that wide parts add up to the whole, and that those of the inputs' dtype do not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, n, h, 16, generator=generator).to(dtype)
        for n, h in ((128, 2), (40, 1), (40, 1), (128, 2))
    )
    tensors, options = Tensors(q, k, v), Options(0.25, backend=backend)
    problem = problem_of(tensors, options)
    out, lse = choose(problem, "forward", backend).first.forward(problem, tensors)

    def gradients(rows: slice, wide: bool) -> Gradients:
        cut, place = block_of(tensors, options, Block(i=rows))
        job = Prepared(place, problem_of(cut, place))
        of_rows = out[:, rows], lse[..., rows].contiguous(), dout[:, rows]
        return job.backward(cut, *of_rows, None, _WANTED, wide)

    whole = gradients(slice(0, 128), True)
    # more queries than are few: those have products of their own on a CPU
    rows = [slice(i, i + 32) for i in range(0, 128, 32)]
    wide, narrow = ([gradients(part, flag) for part in rows] for flag in (True, False))
    for name in ("k", "v"):
        exact, *parts = (getattr(found, name) for found in (whole, *wide))
        rounded = [getattr(found, name) for found in narrow]
        assert {t.dtype for t in (exact, *parts)} == {problem.accumulator}
        assert {t.dtype for t in rounded} == {dtype}
        for a, b in zip(parts, rounded, strict=True):
            assert torch.equal(a.to(dtype), b)
        assert _error(parts, exact) < 2e-6
        assert _error(rounded, exact) > 5e-5


def _error(parts: list[Tensor], exact: Tensor) -> float:
    total = sum(t.to(exact.dtype) for t in parts)
    return float((total - exact).norm() / exact.norm())
