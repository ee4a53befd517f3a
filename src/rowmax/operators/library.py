"""The two operators that PyTorch sees: their schema, kernels, fake kernels and ``vmap`` rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.check import check_packed_values
from ..call.dispatch import prepared
from ..call.inputs import DIFFERENTIABLE, Options, Tensors, Wanted, schema
from ..call.problem import Problem, problem_of
from . import vmap as vmap_rules

_SCHEMA = schema()
N_TENSORS = len(Tensors._fields)
N_DIFFERENTIABLE = len(DIFFERENTIABLE)  # the first inputs

LIBRARY = torch.library.Library("rowmax", "DEF")
LIBRARY.define(f"forward({_SCHEMA}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_SCHEMA}) -> ({', '.join(f'Tensor d{name}' for name in DIFFERENTIABLE)})"
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


LIBRARY.impl("forward", _forward_kernel, "CompositeExplicitAutograd")
LIBRARY.impl("backward", _backward_kernel, "CompositeExplicitAutograd")


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


torch.library.register_vmap("rowmax::forward", vmap_rules.forward, lib=LIBRARY)
torch.library.register_vmap("rowmax::backward", vmap_rules.backward, lib=LIBRARY)
