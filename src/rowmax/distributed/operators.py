"""The operators of distributed attention: their kernels, fake kernels and autograd kernels.

Collectives run inside of them, so a compiled call is one graph with one node for each.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..call.inputs import DIFFERENTIABLE, Options, Tensors, Wanted, schema
from ..operators.autograd import is_direct
from ..operators.functions import Function, redispatch, register, without_tangents
from ..operators.library import LIBRARY, N_DIFFERENTIABLE, split
from ..torch_compat import DispatchKeySet, any_requires_grad
from .agreement import agreed
from .calls import Place, ShardedCall, sharded
from .collectives import broadcast
from .strategies import module_of

_N_PLACE = len(Place._fields)
_PLACE = ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(Place).items())
_ARGUMENTS = f"{_PLACE}, {schema()}"
_ONCE = (
    "rowmax.distributed: attention across ranks has first derivatives in reverse mode; want "
    "neither forward mode nor create_graph=True, or rowmax.attention on one device"
)

LIBRARY.define(f"distributed_forward({_ARGUMENTS}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "distributed_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_ARGUMENTS}) -> ({', '.join(f'Tensor d{name}' for name in DIFFERENTIABLE)})"
)


def attend(place: Place, tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries, differentiable once."""
    given = *place, *tensors, *options
    if torch.compiler.is_compiling() or not is_direct(tensors):
        return torch.ops.rowmax.distributed_forward(*given)
    if any_requires_grad(tensors):
        return _Attention.apply(None, *given)  # pyright: ignore
    return _forward_kernel(*given)


def _call(given: tuple[Any, ...], wanted: Wanted | None = None) -> ShardedCall:
    """Return the call of an operator's arguments, on which ranks have agreed."""
    call = agreed(sharded(Place(*given[:_N_PLACE]), *split(given[_N_PLACE:])), wanted)
    seed = call.tensors.seed
    if seed is None or not call.place.drawn:
        return call
    return call._replace(tensors=call.tensors._replace(seed=broadcast(seed, call.group)))


# --- kernels -----------------------------------------------------------------------------------


def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor]:
    call = _call(given)
    out, lse = module_of(call).forward(call)
    return out.contiguous(), lse.contiguous()  # as the fake kernels have them


def _backward_kernel(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *given: Any
) -> tuple[Tensor, ...]:
    chosen = Wanted(*wanted)
    call = _call(given, chosen)
    gradients = module_of(call).backward(call, out, lse, dout, dlse, chosen)
    return tuple(dout.new_empty(0) if g is None else g.contiguous() for g in gradients)


for _name, _kernel in {
    "distributed_forward": _forward_kernel,
    "distributed_backward": _backward_kernel,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("rowmax::distributed_forward")
def _(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, _ = split(given[_N_PLACE:])
    q = tensors.q
    b, n, hq, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((b, n, hq, tensors.v.shape[3])), q.new_empty((b, hq, n), dtype=wide)


@torch.library.register_fake("rowmax::distributed_backward")
def _(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *given: Any
) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty(x.shape) if want else dout.new_empty(0)
        for want, x in zip(wanted, given[_N_PLACE:], strict=False)
    )


# --- autograd ----------------------------------------------------------------------------------


class _Attention(Function):
    """The forward operator. Only own rows are saved.

    ``below`` is None for a call past the dispatcher.
    """

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        if below is None:
            out, lse = _forward_kernel(*inputs)
        else:
            out, lse = redispatch(torch.ops.rowmax.distributed_forward.default, below, inputs)
        ctx.set_materialize_grads(False)
        tensors, ctx.options = split(inputs[_N_PLACE:])
        ctx.place, ctx.n_inputs = inputs[:_N_PLACE], len(inputs)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        *tensors, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1 + _N_PLACE :][:N_DIFFERENTIABLE]
        # also without any cotangent: other ranks wait for this one
        dout = torch.zeros_like(out) if dout is None else dout
        given = (dout, dlse, out, lse, list(wanted), *ctx.place, *tensors, *ctx.options)
        dispatched = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if dispatched or not is_direct((dout, dlse, out, lse, *tensors)):
            found = torch.ops.rowmax.distributed_backward(*given)
        else:
            found = _backward_kernel(*given)
        found = [g if want else None for g, want in zip(found, wanted, strict=True)]
        rest = ctx.n_inputs - _N_PLACE - N_DIFFERENTIABLE
        return (*(None,) * (1 + _N_PLACE), *found, *(None,) * rest)


class _Once(Function):
    """The backward operator, which has no derivatives."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet, *inputs: Any) -> tuple[Tensor, ...]:
        return redispatch(torch.ops.rowmax.distributed_backward.default, below, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(_ONCE)


register("distributed_forward", without_tangents(_Attention, _ONCE))
register("distributed_backward", without_tangents(_Once, _ONCE))
