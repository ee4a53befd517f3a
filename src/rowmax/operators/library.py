"""The operators that PyTorch sees: their schema, kernels, fake kernels and ``vmap`` rules.

``forward`` and ``backward``; ``tangent``, which is the derivative of forward in forward mode; and
``tangent_backward``, its backward. They have every second derivative between them: see
``operators/autograd.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.check import check_packed_values
from ..call.dispatch import prepared
from ..call.inputs import (
    DIFFERENTIABLE,
    Cotangents,
    Options,
    Tangents,
    Tensors,
    Wanted,
    WantedSecond,
    schema,
)
from ..call.problem import Problem, problem_of
from . import vmap as vmap_rules

_SCHEMA = schema()
N_TENSORS = len(Tensors._fields)
N_DIFFERENTIABLE = len(DIFFERENTIABLE)  # the first inputs
N_TANGENTS = N_DIFFERENTIABLE  # the first arguments of the operators of tangents

LIBRARY = torch.library.Library("rowmax", "DEF")
LIBRARY.define(f"forward({_SCHEMA}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_SCHEMA}) -> ({', '.join(f'Tensor d{name}' for name in DIFFERENTIABLE)})"
)
_TANGENTS = ", ".join(f"Tensor? t{name}" for name in Tangents._fields)
_RESULTS = "Tensor out, Tensor lse, Tensor tout, Tensor tlse"
LIBRARY.define(f"tangent({_TANGENTS}, {_SCHEMA}) -> ({_RESULTS})")
LIBRARY.define(  # wanted: of the inputs, then of the tangents, as the results
    f"tangent_backward({_TANGENTS}, {_RESULTS}, "
    f"{', '.join(f'Tensor? d{name}' for name in Cotangents._fields)}, bool[] wanted, {_SCHEMA}) -> "
    f"({', '.join(f'Tensor {kind}{name}' for kind in ('d', 'dt') for name in DIFFERENTIABLE)})"
)


def split(inputs: tuple[Any, ...]) -> tuple[Tensors, Options]:
    """Return the records of an operator's arguments."""
    return Tensors(*inputs[:N_TENSORS]), Options(*inputs[N_TENSORS:])


# --- the operators' kernels --------------------------------------------------------------------


def _forward_kernel(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = split(inputs)
    check_packed_values(tensors, options)
    return prepared(tensors, options).forward(tensors)


def _backward_kernel(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    tensors, options = split(inputs)
    call = prepared(tensors, options)
    gradients = call.backward(tensors, out, lse, dout, dlse, Wanted(*wanted))
    return tuple(dout.new_empty(0) if g is None else g for g in gradients)


def _tangent_kernel(*inputs: Any) -> tuple[Tensor, ...]:
    tangents, (tensors, options) = Tangents(*inputs[:N_TANGENTS]), split(inputs[N_TANGENTS:])
    check_packed_values(tensors, options)
    return prepared(tensors, options).tangent(tensors, tangents)


class SecondArguments(NamedTuple):
    """The arguments of ``tangent_backward``."""

    tangents: Tangents
    results: tuple[Tensor, ...]  # out, lse, tout, tlse
    cotangents: Cotangents
    wanted: WantedSecond
    inputs: tuple[Any, ...]  # the tensors and options


def second_arguments(*given: Any) -> SecondArguments:
    """Return the arguments of ``tangent_backward`` by name."""
    *rows, wanted = given[N_TANGENTS : N_TANGENTS + 9]
    return SecondArguments(
        Tangents(*given[:N_TANGENTS]),
        tuple(rows[:4]),
        Cotangents(*rows[4:]),
        WantedSecond(Wanted(*wanted[:N_DIFFERENTIABLE]), Wanted(*wanted[N_DIFFERENTIABLE:])),
        given[N_TANGENTS + 9 :],
    )


def _tangent_backward_kernel(*given: Any) -> tuple[Tensor, ...]:
    a = second_arguments(*given)
    tensors, options = split(a.inputs)
    call = prepared(tensors, options)
    found = call.tangent_backward(tensors, a.tangents, a.results, a.cotangents, a.wanted)
    out = a.results[0]
    return tuple(out.new_empty(0) if g is None else g for half in found for g in half)


for _name, _kernel in {
    "forward": _forward_kernel,
    "backward": _backward_kernel,
    "tangent": _tangent_kernel,
    "tangent_backward": _tangent_backward_kernel,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("rowmax::forward")
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = split(inputs)
    problem: Problem = problem_of(tensors, options)
    out = tensors.q.new_empty(problem.out_shape)
    return out, tensors.q.new_empty(problem.lse_shape, dtype=problem.accumulator)


@torch.library.register_fake("rowmax::backward")
def _(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty(x.shape) if want else dout.new_empty(0)
        for want, x in zip(wanted, inputs, strict=False)
    )


@torch.library.register_fake("rowmax::tangent")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    tensors, options = split(inputs[N_TANGENTS:])
    problem = problem_of(tensors, options)
    q, wide = tensors.q, problem.accumulator
    out, lse = q.new_empty(problem.out_shape), q.new_empty(problem.lse_shape, dtype=wide)
    return out, lse, torch.empty_like(out), torch.empty_like(lse)


@torch.library.register_fake("rowmax::tangent_backward")
def _(*given: Any) -> tuple[Tensor, ...]:
    a = second_arguments(*given)
    return tuple(
        x.new_empty(x.shape) if want else a.results[0].new_empty(0)
        for part in a.wanted
        for want, x in zip(part, a.inputs, strict=False)
    )


for _name in ("forward", "backward", "tangent", "tangent_backward"):
    torch.library.register_vmap(f"rowmax::{_name}", getattr(vmap_rules, _name), lib=LIBRARY)
