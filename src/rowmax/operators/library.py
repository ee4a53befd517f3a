"""The operators that PyTorch sees: their schema, kernels, fake kernels and ``vmap`` rules.

``forward`` and ``backward``; ``tangent``, which is the derivative of forward in forward mode; and
``tangent_backward``, its backward. They have every second derivative between them: see
``operators/autograd.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from .vmap import rule

_SCHEMA = schema()
N_TENSORS = len(Tensors._fields)
N_DIFFERENTIABLE = len(DIFFERENTIABLE)  # the first inputs
N_TANGENTS = N_DIFFERENTIABLE


class Layout(NamedTuple):
    """The number of an operator's arguments before the tensors and options."""

    tangents: int  # those of the inputs
    rows: int  # results of a call and their gradients; behind them, ``wanted``

    @property
    def before(self) -> int:
        return self.tangents + self.rows + (self.rows > 0)


LAYOUTS = {
    "forward": Layout(0, 0),
    "backward": Layout(0, 4),
    "tangent": Layout(N_TANGENTS, 0),
    "tangent_backward": Layout(N_TANGENTS, 8),
}

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
    before = LAYOUTS["tangent_backward"].before
    *rows, wanted = given[N_TANGENTS:before]
    return SecondArguments(
        Tangents(*given[:N_TANGENTS]),
        tuple(rows[:4]),
        Cotangents(*rows[4:]),
        WantedSecond(Wanted(*wanted[:N_DIFFERENTIABLE]), Wanted(*wanted[N_DIFFERENTIABLE:])),
        given[before:],
    )


def _tangent_backward_kernel(*given: Any) -> tuple[Tensor, ...]:
    a = second_arguments(*given)
    tensors, options = split(a.inputs)
    call = prepared(tensors, options)
    found = call.tangent_backward(tensors, a.tangents, a.results, a.cotangents, a.wanted)
    out = a.results[0]
    return tuple(out.new_empty(0) if g is None else g for half in found for g in half)


def _forward_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = split(inputs)
    problem: Problem = problem_of(tensors, options)
    out = tensors.q.new_empty(problem.out_shape)
    return out, tensors.q.new_empty(problem.lse_shape, dtype=problem.accumulator)


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    return _gradients_fake(out, wanted, inputs)


def _tangent_fake(*inputs: Any) -> tuple[Tensor, ...]:
    out, lse = _forward_fake(*inputs[N_TANGENTS:])
    return out, lse, torch.empty_like(out), torch.empty_like(lse)


def _tangent_backward_fake(*given: Any) -> tuple[Tensor, ...]:
    a = second_arguments(*given)
    return tuple(g for part in a.wanted for g in _gradients_fake(a.results[0], part, a.inputs))


def _gradients_fake(
    out: Tensor, wanted: Iterable[bool], inputs: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    pairs = zip(wanted, inputs, strict=False)
    return tuple(x.new_empty(x.shape) if want else out.new_empty(0) for want, x in pairs)


for _name, _kernel, _fake in (
    ("forward", _forward_kernel, _forward_fake),
    ("backward", _backward_kernel, _backward_fake),
    ("tangent", _tangent_kernel, _tangent_fake),
    ("tangent_backward", _tangent_backward_kernel, _tangent_backward_fake),
):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rowmax::{_name}", _fake)
    torch.library.register_vmap(f"rowmax::{_name}", rule(_name, *LAYOUTS[_name]), lib=LIBRARY)
