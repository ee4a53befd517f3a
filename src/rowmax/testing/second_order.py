"""Tangents and second derivatives of a call, and the rule by which they are right.

along = directions(call)
wrong = second_complaints(second_answer(call, along, backend="torch"), second_expected(call, along))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call.inputs import Cotangents, Results, Tangents
from ..reference import dense, tolerance
from ..reference.tolerance import GRADIENT, OUTPUT, Noise
from .cases import Call
from .tolerance import by_definition, complaint, cotangents, inputs_of

#: by name: tout, tlse, the gradient of each leaf (dq) and of its tangent (dtq)
SecondAnswer = dict[str, Tensor]


class Directions(NamedTuple):
    """The tangents of a call's leaves, and the cotangents of (out, lse, tout, tlse)."""

    tangents: dict[str, Tensor]
    cotangents: Cotangents


class SecondExpected(NamedTuple):
    """The references of an answer, and the noise of each tensor."""

    dtype: torch.dtype
    ref: SecondAnswer
    std: SecondAnswer
    noise: dict[str, Noise]


def directions(call: Call, generator: torch.Generator | int = 2) -> Directions:
    """Return random tangents and cotangents in the shapes and dtypes of a call's tensors."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    tangents = {}
    for name, t in call.leaves.items():
        numbers = torch.randn(t.shape, generator=generator, device=generator.device)
        tangents[name] = numbers.to(t)
    pairs = cotangents(call, generator), cotangents(call, generator)
    return Directions(tangents, Cotangents(*pairs[0], *pairs[1]))


def second_answer(call: Call, along: Directions, **overrides: object) -> SecondAnswer:
    """Return the answer of rowmax: forward mode, and reverse mode over it."""
    leaves = {name: _in_memory(t.detach()) for name, t in call.leaves.items()}
    return _answer(
        leaves, along, lambda named: call.with_leaves(named)(**overrides), call.inputs[0].dtype
    )


def second_definition(call: Call, along: Directions, dtype: torch.dtype) -> SecondAnswer:
    """Return the answer of the dense definition with every step in ``dtype``."""
    leaves = {name: _in_memory(t.detach().to(dtype)) for name, t in call.leaves.items()}
    return _answer(leaves, along, lambda named: by_definition(call, named, dtype), dtype)


def _in_memory(t: Tensor) -> Tensor:
    """Return t, or a copy of an expanded one: torch gives it no tangent."""
    repeated = any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True))
    return t.contiguous() if repeated else t


def _answer(
    leaves: dict[str, Tensor],
    along: Directions,
    function: Callable[[dict[str, Tensor]], Any],
    dtype: torch.dtype,
) -> SecondAnswer:
    primals = {name: t.requires_grad_() for name, t in leaves.items()}
    tangents = {name: along.tangents[name].to(t).requires_grad_() for name, t in leaves.items()}
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, tangents[name]) for name, x in primals.items()}
        out, lse = (forward_ad.unpack_dual(t) for t in function(duals))
    results = [out.primal, lse.primal, out.tangent, lse.tangent]
    outputs, cots = [], []
    for n, (x, g) in enumerate(zip(results, along.cotangents, strict=True)):
        if x is None:  # lse does not depend on v
            results[n] = torch.zeros_like(results[n - 2])
        elif g is not None and x.requires_grad:
            outputs.append(x)
            cots.append(g.to(x.dtype))
    every = [*primals.values(), *tangents.values()]
    found: tuple[Tensor | None, ...] = (None,) * len(every)
    if outputs:
        found = torch.autograd.grad(outputs, every, cots, allow_unused=True)
    names = [f"d{name}" for name in primals] + [f"dt{name}" for name in tangents]
    answer = {"tout": results[2].detach(), "tlse": results[3].detach()}
    for name, x, g in zip(names, every, found, strict=True):
        answer[name] = torch.zeros_like(x) if g is None else g
    return answer


def second_expected(call: Call, along: Directions) -> SecondExpected:
    """Return the references of a call. std of float64 is computed in float32."""
    dtype = call.inputs[0].dtype
    ref = second_definition(call, along, torch.float64)
    std = second_definition(call, along, torch.float32 if dtype == torch.float64 else dtype)
    problem, tensors = call.problem()
    with torch.no_grad():
        out, lse = dense.attention(problem, tensors)
    tout, tlse, cots = ref["tout"], ref["tlse"], list(along.cotangents)
    if call.case.packed:
        tout, tlse = tout[None], tlse[None]
        cots = [None if t is None else t[None] for t in cots]
    tangents = Tangents(**inputs_of(call, along.tangents))
    results = Results(out, lse, tout, tlse)
    noise = tolerance.second_noise(problem, tensors, tangents, results, Cotangents(*cots))
    return SecondExpected(dtype, ref, std, noise)


def second_complaints(got: SecondAnswer, want: SecondExpected) -> list[str]:
    """Return a sentence for each tensor that breaks the rule."""
    found = []
    for name, x in got.items():
        factor = OUTPUT if name in ("tout", "tlse") else GRADIENT
        parts = (want.ref[name], want.std[name])
        text = complaint(name, x, *parts, want.dtype, factor, want.noise[name])
        if text is not None:
            found.append(text)
    return found
