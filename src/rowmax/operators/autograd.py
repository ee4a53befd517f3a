"""The operators under autograd.

The autograd kernels are our own. ``torch.library.register_autograd`` would make ones that lose
tangents (forward mode would silently give zero) and that fail under ``torch.func`` while compiling.
These refuse what they cannot do, wherever they run: eager, traced or exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.dispatch import PLAIN_OPERATIONS, Prepared, check_wanted, choose
from ..call.dispatch import prepared as prepared_of
from ..call.inputs import Options, Tensors, Wanted
from ..call.problem import Problem
from ..torch_compat import (
    DispatchKeySet,
    SingleLevelFunction,
    any_requires_grad,
    below_autograd,
    forward_mode_enabled,
    is_batched,
    is_fake,
    is_forward_mode,
    is_observed,
    is_traced,
    is_traced_by_make_fx,
    is_transformed,
    plain_addresses,
    single_level_autograd,
)
from . import flop_counter, library


def attend(tensors: Tensors, options: Options, prepared: Prepared | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a normalized call, differentiable."""
    if options.backend in PLAIN_OPERATIONS and _has_values(tensors):
        out, lse = prepared_of(tensors, options).forward(tensors)  # autograd sees every step
        return _connected(out, tensors), _connected(lse, tensors)
    if prepared is not None:  # for plain tensors that nothing observes
        return _direct(prepared, tensors if tensors.seed is not None else tensors[:3])
    if not torch.compiler.is_compiling():
        if _is_direct(tensors):
            return _direct(prepared_of(tensors, options), tensors)
        flop_counter.register()
    return torch.ops.rowmax.forward(*tensors, *options)


def _direct(prepared: Prepared, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) past the dispatcher, of the first inputs or all of them.

    Autograd takes time for every argument.
    """
    if any_requires_grad(tensors):
        return _Attention.apply(prepared, *tensors)  # pyright: ignore
    return prepared.forward(Tensors(*tensors))


def _is_direct(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return True if no tracer, mode, transform, profiler or subclass can observe the call.

    The dispatcher would then change nothing, and take a third of a small call's time.
    """
    return not is_observed() and plain_addresses(tensors) is not None


def _has_values(tensors: Tensors) -> bool:
    """Return True if a backend of plain operations can run directly.

    Packed offsets that are a batch of ``vmap`` give each slice shapes of its own.
    """
    return not (
        torch.compiler.is_compiling()
        or is_traced()
        or is_traced_by_make_fx()
        or any(is_fake(t) for t in tensors if t is not None)
        or is_batched(tensors.cu_seqlens_q)
        or is_batched(tensors.cu_seqlens_k)
    )


def _connected(x: Tensor, tensors: Tensors) -> Tensor:
    """Return x with every input in its graph, as an output of the operators has.

    With plain operations lse does not use v, and an empty packed call uses nothing. Then a gradient
    that must be zero would raise an error.
    """
    if not torch.is_grad_enabled():
        return x
    inputs = (t for t in tensors[: library.N_DIFFERENTIABLE] if t is not None)
    return x + sum(
        t[:0].sum() for t in inputs
    )  # a sum of no elements, which is 0 even if x holds NaN


# --- the functions of autograd -----------------------------------------------------------------

_WAY_OUT = (
    'backend="reference", neither compiled nor traced (it is dense: memory for Nq x Nk scores), or '
    "torch's own scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)
_NO_TANGENT = (
    "rowmax: forward-mode derivatives (jvp, dual tensors) are not supported here; use reverse mode "
    f"(backward, torch.func.grad or vjp), {_WAY_OUT}"
)
_NO_SECOND = (
    "rowmax: second derivatives (create_graph=True followed by a backward, hessian) are not "
    f"supported here; use {_WAY_OUT}"
)


class _Function(SingleLevelFunction):
    """Forward mode and compiled autograd of both functions."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_TANGENT)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """Return the key of ``torch.autograd.Function``, for compiled autograd.

        Dynamo guards everything else that the backward depends on.
        """
        return (ctx._autograd_function_id,)


def _check_backward(problem: Problem, name: str, wanted: tuple[bool, ...]) -> None:
    """Raise now if the named backend will refuse the backward."""
    try:
        plan = choose(problem, "backward", name)
    except ValueError:
        choose(problem, "forward", name)  # its own refusal comes first
        raise
    if plan.whole is None:
        check_wanted(plan, Wanted(*wanted))


class _Attention(_Function):
    """The forward operator between autograd and the kernels below it.

    ``way`` is what a call past the dispatcher has prepared, and the inputs are the tensors; or
    ``way`` holds the dispatch keys below autograd, and the inputs are those of the operator.
    """

    @staticmethod
    def forward(ctx: Any, way: DispatchKeySet | Prepared, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors = inputs[: library.N_TENSORS]
        if isinstance(way, Prepared):
            ctx.prepared, ctx.options = way, way.options
            if way.options.backend is not None:
                _check_backward(way.problem, way.options.backend, _wanted(ctx))
            out, lse = way.forward(Tensors(*tensors))
        else:
            # The backend is checked in the backward: the problem of a traced or transformed call
            # may not be the one that runs.
            ctx.prepared, ctx.options = None, inputs[library.N_TENSORS :]
            out, lse = _redispatch(_forward_operator, way, inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.n_inputs = len(inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * (1 + ctx.n_inputs)
        *inputs, out, lse = ctx.saved_tensors
        tensors, wanted = Tensors(*inputs), _wanted(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        dispatched = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not dispatched and _is_direct((*inputs, out, lse, dout, dlse)):
            prepared = ctx.prepared or prepared_of(tensors, Options(*ctx.options))
            gradients = prepared.backward(tensors, out, lse, dout, dlse, wanted)
        else:
            given = (dout, dlse, out, lse, list(wanted), *tensors, *ctx.options)
            gradients = torch.ops.rowmax.backward(*given)
            gradients = [g if want else None for g, want in zip(gradients, wanted, strict=True)]
        found = [None, *gradients][: 1 + ctx.n_inputs]
        return (*found, *(None,) * (1 + ctx.n_inputs - len(found)))


def _wanted(ctx: Any) -> Wanted:
    """Return True for the inputs that need a gradient; absent ones need none."""
    needed = ctx.needs_input_grad[1 : 1 + library.N_DIFFERENTIABLE]
    return Wanted(*needed, *(False,) * (library.N_DIFFERENTIABLE - len(needed)))


class _AttentionBackward(_Function):
    """The backward operator, likewise; it has no derivative yet."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet, *inputs: Any) -> tuple[Tensor, ...]:
        return _redispatch(_backward_operator, below, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise NotImplementedError(_NO_SECOND)


def _redispatch(operator: Any, below: DispatchKeySet, inputs: tuple[Any, ...]) -> Any:
    """Call the kernel below this level's autograd or, in a ``grad(grad)``, the next level.

    A Function's forward runs with gradients off. That is meant for its own level, not the next.
    """
    if not is_transformed():
        return operator.redispatch(below, *inputs)
    with torch.enable_grad(), forward_mode_enabled(True):
        return operator.redispatch(below, *inputs)


def _autograd(operator: Any, function: type[SingleLevelFunction]) -> Callable[..., Any]:
    """Return an autograd kernel that records ``function``, at the level of differentiation.

    Under ``torch.func`` the dispatcher calls it once for each level, which is what a
    single-level function is for.
    """

    def kernel(keys: DispatchKeySet, *inputs: Any) -> Any:
        flop_counter.register()
        below = below_autograd(keys)
        reverse = any_requires_grad(inputs)
        if not reverse and not is_forward_mode():
            return operator.redispatch(below, *inputs)
        with single_level_autograd():
            return function.apply(below, *inputs)  # pyright: ignore

    return kernel


_forward_operator = torch.ops.rowmax.forward.default
_backward_operator = torch.ops.rowmax.backward.default
library.LIBRARY.impl(
    "forward", _autograd(_forward_operator, _Attention), "Autograd", with_keyset=True
)
library.LIBRARY.impl(
    "backward", _autograd(_backward_operator, _AttentionBackward), "Autograd", with_keyset=True
)
