"""The operators under autograd.

The autograd kernels are our own. ``torch.library.register_autograd`` would make ones that lose
tangents (forward mode would silently give zero) and that fail under ``torch.func`` while compiling.
These refuse what they cannot do, wherever they run: eager, traced or exported. Second derivatives
are in ``second_order.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.dispatch import PLAIN_OPERATIONS, Prepared, check_named
from ..call.dispatch import prepared as prepared_of
from ..call.inputs import Options, Tensors, Wanted
from ..torch_compat import (
    DispatchKeySet,
    any_requires_grad,
    is_batched,
    is_fake,
    is_observed,
    is_traced,
    is_traced_by_make_fx,
    plain_addresses,
)
from . import flop_counter, library, second_order
from .functions import Along, Function, recorded, redispatch, register, unpacked


def attend(tensors: Tensors, options: Options, prepared: Prepared | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a normalized call, differentiable."""
    if options.backend in PLAIN_OPERATIONS and _has_values(tensors):
        out, lse = prepared_of(tensors, options).forward(tensors)  # autograd sees every step
        return _connected(out, tensors), _connected(lse, tensors)
    if prepared is None:
        prepared = prepared_directly(tensors, options)
    if prepared is not None:
        plain = all(t is None for t in tensors[3:])
        return attend_again(prepared, tensors[:3] if plain else tensors)
    if not torch.compiler.is_compiling():
        flop_counter.register()
    return torch.ops.rowmax.forward(*tensors, *options)


def prepared_directly(tensors: Tensors, options: Options) -> Prepared | None:
    """Return what calls like this one have prepared, or None for one that may be observed."""
    if torch.compiler.is_compiling() or not is_direct(tensors):
        return None
    return prepared_of(tensors, options)


def attend_again(prepared: Prepared, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) past the dispatcher, of all inputs, or of q, k and v if no other is given.

    The tensors are plain ones that nothing observes. Autograd takes time for every argument.
    """
    if any_requires_grad(tensors):
        return _Attention.apply(prepared, *tensors)  # pyright: ignore
    found = prepared.repeated(tensors)
    return prepared.forward(Tensors(*tensors)) if found is None else found


def is_direct(tensors: tuple[Tensor | None, ...]) -> bool:
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


class _Attention(Function):
    """The forward operator between autograd and the kernels below it.

    ``way`` is what a call past the dispatcher has prepared, and the inputs are the tensors. Or the
    inputs are those of the operator, and ``way`` holds the dispatch keys below autograd, or the
    results with their tangents. The inputs are saved with their tangents: so a backward at this
    level has a tangent, too.
    """

    @staticmethod
    def forward(
        ctx: Any, way: DispatchKeySet | Prepared | Along, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        tensors = inputs[: library.N_TENSORS]
        if isinstance(way, Prepared):
            ctx.prepared, ctx.options = way, way.options
            if way.options.backend is not None:
                check_named(way.problem, way.options.backend, Wanted(*_wanted(ctx)))
            wanted = None if way.has_run else _wanted(ctx)
            out, lse = way.forward(Tensors(*tensors), None, wanted)
        else:
            # The backend is checked in the backward: the problem of a traced or transformed call
            # may not be the one that runs.
            ctx.prepared, ctx.options = None, inputs[library.N_TENSORS :]
            if isinstance(way, Along):
                ctx.along = way
                out, lse = way.values()
            else:
                out, lse = redispatch(torch.ops.rowmax.forward.default, way, inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.n_inputs = len(inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * (1 + ctx.n_inputs)
        saved, prepared = ctx.saved_tensors, ctx.prepared
        dispatched = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if dlse is None and prepared is not None and not dispatched:
            gradients = prepared.repeated_backward((*saved, dout), ctx.needs_input_grad[1:])
            if gradients is not None:
                found = (None, *gradients[: ctx.n_inputs])
                return (*found, *(None,) * (1 + ctx.n_inputs - len(found)))
        *inputs, out, lse = saved
        tensors, wanted = Tensors(*inputs), _wanted(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        if not dispatched and is_direct((*inputs, out, lse, dout, dlse)):
            prepared = prepared or prepared_of(tensors, Options(*ctx.options))
            gradients = prepared.backward(tensors, out, lse, dout, dlse, wanted)
        else:
            given = (*tensors, *ctx.options)
            gradients = second_order.backward(dout, dlse, (out, lse), wanted, given)
        found = [None, *gradients][: 1 + ctx.n_inputs]
        return (*found, *(None,) * (1 + ctx.n_inputs - len(found)))


def _wanted(ctx: Any) -> Wanted:
    """Return True for the inputs that need a gradient; absent ones need none."""
    needed = ctx.needs_input_grad[1 : 1 + library.N_DIFFERENTIABLE]
    return Wanted(*needed, *(False,) * (library.N_DIFFERENTIABLE - len(needed)))


_N_ROWS = library.LAYOUTS["backward"].before


class _AttentionBackward(Function):
    """The backward operator, likewise."""

    @staticmethod
    def forward(ctx: Any, way: DispatchKeySet | Along, *inputs: Any) -> tuple[Tensor, ...]:
        if isinstance(way, Along):
            ctx.along = way
            gradients = way.values()
        else:
            gradients = redispatch(torch.ops.rowmax.backward.default, way, inputs)
        ctx.set_materialize_grads(False)
        ctx.wanted = inputs[_N_ROWS - 1]
        ctx.options = inputs[_N_ROWS + library.N_TENSORS :]
        ctx.save_for_backward(
            *inputs[: _N_ROWS - 1], *inputs[_N_ROWS : _N_ROWS + library.N_TENSORS]
        )
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        grads = tuple(g if want else None for g, want in zip(grads, ctx.wanted, strict=True))
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        found: tuple[Any, ...] = ()
        if any(g is not None for g in grads):
            inputs = needed[_N_ROWS : _N_ROWS + library.N_DIFFERENTIABLE]
            given = ((dout, dlse), (out, lse), inputs, tensors, ctx.options)
            of_dout, of_dlse, gradients = second_order.of_backward(grads, *given)
            none = (None, None)
            if torch.compiler.is_compiling():  # compiled autograd adds gradients, and no None
                none = (torch.zeros_like(out), torch.zeros_like(lse))
            found = (of_dout, of_dlse, *none, None, *gradients)
        return (None, *found, *(None,) * (len(needed) - len(found)))


def _forward(operator: Any, below: DispatchKeySet, *inputs: Any) -> Any:
    """Return out and lse, and record their derivatives at this level of differentiation."""
    dual = unpacked(inputs)
    way: Any = below
    if dual is not None:
        primals, tangents = dual
        way = second_order.along_forward(primals, tangents[: library.N_TANGENTS])
    return recorded(_Attention, operator, way, inputs)


def _backward(operator: Any, below: DispatchKeySet, *inputs: Any) -> Any:
    """Return the gradients, and record their derivatives at this level of differentiation."""
    dual = unpacked(inputs)
    way = below if dual is None else second_order.along_backward(*dual)
    return recorded(_AttentionBackward, operator, way, inputs)


register("forward", _forward)
register("backward", _backward)
