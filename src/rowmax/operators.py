"""What PyTorch sees: two operators, their fake kernels, autograd and vmap.

Eager calls go through an ``autograd.Function`` around the operators, which composes with every
``torch.func`` transform; a call that is being compiled goes to the operator itself, whose
registered autograd is made of the same two steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import choose
from .problem import Gradients, Options, Problem, Tensors, Wanted, problem_of

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? alibi, Tensor? allowed, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seed, float scale, float softcap, float dropout_p, SymInt? left, SymInt? right, "
    "SymInt max_q, SymInt max_k, bool deterministic, str? backend"
)
_TENSORS = len(Tensors._fields)
_DIFFERENTIABLE = len(Gradients._fields)  # the first inputs: q, k, v, bias, sink

_library = torch.library.Library("rowmax", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_INPUTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)


def attend(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments, differentiable."""
    if torch.compiler.is_compiling():
        return torch.ops.rowmax.forward(*tensors, *options)
    return _Attention.apply(*tensors, *options)  # pyright: ignore


def _split(inputs: tuple[Any, ...]) -> tuple[Tensors, Options]:
    return Tensors(*inputs[:_TENSORS]), Options(*inputs[_TENSORS:])


# --- the operators' kernels --------------------------------------------------------------------


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = _split(inputs)
    problem = problem_of(tensors, options)
    return choose(problem, "forward", options.backend).forward(problem, tensors)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    tensors, options = _split(inputs)
    problem = problem_of(tensors, options)
    backend = choose(problem, "backward", options.backend)
    gradients = backend.backward(problem, tensors, out, lse, dout, dlse, Wanted(*wanted))
    return tuple(dout.new_empty(0) if g is None else g for g in gradients)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("rowmax::forward")
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = _split(inputs)
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


# --- autograd ----------------------------------------------------------------------------------

_NO_TANGENT = (
    "rowmax: forward-mode derivatives (jvp, dual tensors) are not supported; use reverse mode "
    "(backward, torch.func.grad or vjp)"
)
_NO_SECOND = (
    "rowmax: second derivatives (create_graph=True followed by a backward, hessian) are not "
    "supported; use first derivatives"
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """One gradient for each input of the forward."""
    saved = ctx.saved_tensors
    tensors, (out, lse) = saved[:_TENSORS], saved[_TENSORS:]
    nothing = (None,) * (_TENSORS + len(ctx.options))
    if dout is None and dlse is None:
        return nothing
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    arguments = (dout, dlse, out, lse, wanted, *tensors, *ctx.options)
    if torch.compiler.is_compiling():
        gradients = torch.ops.rowmax.backward(*arguments)
    else:
        gradients = _AttentionBackward.apply(*arguments)
    kept = tuple(g if want else None for g, want in zip(gradients, wanted, strict=True))  # pyright: ignore
    return kept + nothing[_DIFFERENTIABLE:]


torch.library.register_autograd("rowmax::forward", _gradients, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.rowmax.forward(*inputs)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _gradients(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_TANGENT)


class _AttentionBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return torch.ops.rowmax.backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_TANGENT)
