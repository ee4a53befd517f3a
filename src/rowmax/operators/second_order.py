"""The operators of tangents under autograd, and how second derivatives are made of them.

- The backward of ``tangent`` is ``tangent_backward``: reverse over forward.
- The backward of ``backward``: along cotangents (a, b, ..) of (dq, dk, ..), the gradient of (dout,
  dlse) is the tangent of (out, lse); that of the inputs is ``tangent_backward`` with the cotangents
  (dout, dlse) of (tout, tlse). These are total derivatives: the saved out and lse have none.
- The tangent of ``backward`` is the same with the cotangents (dout', dlse') of (out, lse).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_compat import DispatchKeySet
from .functions import (
    NO_THIRD,
    Along,
    Function,
    ThirdOrder,
    redispatch,
    register,
    without_tangents,
)
from .library import N_TANGENTS, N_TENSORS

NONE = (None,) * N_TANGENTS
Gradients = Sequence[Tensor | None]
_NOT_WANTED = (False,) * N_TANGENTS


class _Tangent(Function):
    """The operator ``tangent``; its inputs are the tangents, the tensors and the options."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet, *inputs: Any) -> tuple[Tensor, ...]:
        results = redispatch(torch.ops.rowmax.tangent.default, below, inputs)
        ctx.set_materialize_grads(False)
        ctx.options = inputs[N_TANGENTS + N_TENSORS :]
        ctx.save_for_backward(*inputs[: N_TANGENTS + N_TENSORS], *results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        tangents = given[:N_TANGENTS]
        inputs = (*given[N_TANGENTS : N_TANGENTS + N_TENSORS], *ctx.options)
        results = given[N_TANGENTS + N_TENSORS :]
        needed = ctx.needs_input_grad[1:]
        first, second = needed[N_TANGENTS : 2 * N_TANGENTS], needed[:N_TANGENTS]
        dout, dlse, dtout, dtlse = grads
        if dtout is None and dtlse is None:
            found = NONE
            if any(first) and not (dout is None and dlse is None):
                found = backward(dout, dlse, results[:2], first, inputs)
            found = (*NONE, *found)
        else:
            both = tangent_backward(tangents, results, grads, (*first, *second), inputs)
            found = (*both[N_TANGENTS:], *both[:N_TANGENTS])
        return (None, *found, *(None,) * (len(needed) - len(found)))


register("tangent", without_tangents(_Tangent, NO_THIRD))
register("tangent_backward", without_tangents(ThirdOrder, NO_THIRD))


# --- calls of the operators ----------------------------------------------------------------------


def tangent_backward(
    tangents: Gradients,
    results: Sequence[Tensor],
    cotangents: Gradients,
    wanted: Sequence[bool],
    inputs: Sequence[Any],
) -> list[Tensor | None]:
    """Return the wanted gradients of the inputs, then of the tangents; others are None."""
    given = (*tangents, *results, *cotangents, list(wanted), *inputs)
    found = torch.ops.rowmax.tangent_backward(*given)
    return [g if want else None for g, want in zip(found, wanted, strict=True)]


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    results: Sequence[Tensor],
    wanted: Sequence[bool],
    inputs: Sequence[Any],
) -> list[Tensor | None]:
    """Return the wanted gradients of the inputs; others are None."""
    dout = torch.zeros_like(results[0]) if dout is None else dout
    found = torch.ops.rowmax.backward(dout, dlse, *results, list(wanted), *inputs)
    return [g if want else None for g, want in zip(found, wanted, strict=True)]


def along_forward(primals: Sequence[Any], tangents: Gradients) -> Along:
    """Return out and lse with their tangents."""
    results = torch.ops.rowmax.tangent(*tangents, *primals)
    return Along(results[:2], results[2:])


def along_backward(primals: Sequence[Any], tangents: Gradients) -> Along:
    """Return the gradients of ``backward`` with their tangents; primals are its arguments."""
    dout, dlse, out, lse, wanted, *inputs = primals
    e, a, tout, tlse, _, *of_inputs = tangents
    along = of_inputs[:N_TANGENTS]
    if all(t is None for t in along):  # linear in dout and dlse
        found = torch.ops.rowmax.backward(*primals)
        moved: Gradients = NONE
        if e is not None or a is not None:
            moved = backward(e, a, (out, lse), wanted, inputs)
        return Along(found, moved)
    if tout is None or tlse is None:  # else those of the forward, at this level
        _, _, tout, tlse = torch.ops.rowmax.tangent(*along, *inputs)
    results, cotangents = (out, lse, tout, tlse), (e, a, dout, dlse)
    both = tangent_backward(along, results, cotangents, [*wanted, *wanted], inputs)
    # the gradient of a tangent is the gradient of the call: both are linear in (dout, dlse)
    found = [out.new_empty(0) if g is None else g for g in both[N_TANGENTS:]]
    return Along(found, both[:N_TANGENTS])


def of_backward(
    grads: Gradients,
    cotangents: tuple[Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    needed: Sequence[bool],
    tensors: Sequence[Tensor | None],
    options: Sequence[Any],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Return the gradients of (dout, dlse, inputs) of a backward from those of its results.

    ``cotangents`` is (dout, dlse), ``results`` is (out, lse), and ``needed`` is of the inputs.
    """
    inputs = (*tensors, *options)
    _, _, tout, tlse = torch.ops.rowmax.tangent(*grads, *inputs)
    found: list[Tensor | None] = list(NONE)
    if any(needed):
        rows, cots = (*results, tout, tlse), (None, None, *cotangents)
        both = tangent_backward(grads, rows, cots, (*needed, *_NOT_WANTED), inputs)
        found = both[:N_TANGENTS]
    return tout, None if cotangents[1] is None else tlse, found
