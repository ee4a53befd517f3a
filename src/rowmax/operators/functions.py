"""The base of autograd's functions: levels of differentiation, dual tensors, refusals.

Under ``torch.func`` the dispatcher calls an operator's autograd kernel once for each level of
``grad`` and ``jvp``, with tensors of that level: their graph and their tangents belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_compat import (
    DispatchKeySet,
    SingleLevelFunction,
    any_requires_grad,
    below_autograd,
    forward_mode_enabled,
    is_transformed,
    is_zeros_not_written,
    primal_of,
    single_level_autograd,
)
from . import flop_counter, library

NO_THIRD = (
    "rowmax: third derivatives, and forward mode twice (jacfwd of jacfwd), are not supported here; "
    "a second derivative is jacfwd(jacrev(f)) (torch.func.hessian), jacrev(jacrev(f)), "
    "jacrev(jacfwd(f)) or create_graph=True and a backward. Any other: use "
    'backend="reference", neither compiled nor traced (it is dense: memory for Nq x Nk scores), or '
    "torch's own scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)
_NO_TANGENT = (
    "rowmax: forward mode reached an operator that does not see the tangents of its inputs; "
    "call torch.func.jvp or forward_ad inside torch.compile, not around a compiled function, or "
    "use reverse mode"
)


class Along(NamedTuple):
    """Results of an operator that are already computed, with their tangents at this level."""

    results: Sequence[Tensor]
    tangents: Sequence[Tensor | None]

    def values(self) -> tuple[Tensor, ...]:
        """Return the results without their graph. The older ``vmap`` has no rule for detach."""
        return tuple(t.detach() if t.requires_grad else t for t in self.results)


class Function(SingleLevelFunction):
    """Forward mode and compiled autograd of every function.

    ``ctx.along`` is an ``Along``, or None where no input has a tangent.
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        along: Along | None = getattr(ctx, "along", None)
        if along is None:
            raise NotImplementedError(_NO_TANGENT)
        ctx.along = None  # the graph of the tangents must not outlive them
        return tuple(  # torch takes None for no result that may have a tangent
            torch.zeros_like(x) if t is None else t
            for x, t in zip(along.results, along.tangents, strict=True)
        )

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """Return the key of ``torch.autograd.Function``, for compiled autograd.

        Dynamo guards everything else that the backward depends on.
        """
        return (ctx._autograd_function_id,)


class ThirdOrder(Function):
    """The operator ``tangent_backward``, whose derivatives are not there."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet, *inputs: Any) -> Any:
        return redispatch(torch.ops.rowmax.tangent_backward.default, below, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise NotImplementedError(NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_THIRD)


def redispatch(operator: Any, below: DispatchKeySet, inputs: tuple[Any, ...]) -> Any:
    """Call the kernel below this level's autograd or, in a ``grad(grad)``, the next level.

    A Function's forward runs with gradients off. That is meant for its own level, not the next.
    """
    if not is_transformed():
        return operator.redispatch(below, *inputs)
    with torch.enable_grad(), forward_mode_enabled(True):
        return operator.redispatch(below, *inputs)


def recorded(
    function: type[Function], operator: Any, way: DispatchKeySet | Along, inputs: tuple[Any, ...]
) -> Any:
    """Return the results of an operator, and record their derivative at this level if one needs it.

    ``way`` holds the dispatch keys below autograd, or the results with their tangents.
    """
    if not isinstance(way, Along) and not any_requires_grad(inputs):
        return operator.redispatch(way, *inputs)
    with single_level_autograd():
        return function.apply(way, *inputs)  # pyright: ignore


class _Tangents(SingleLevelFunction):
    """A function without results, which finds the tangents that its inputs have at this level.

    Autograd passes them to ``jvp``. Compiled graphs enter levels of forward mode that
    ``forward_ad`` in Python does not know, and a view of each input would be traced.
    """

    @staticmethod
    def forward(ctx: Any, found: list[Tensor | None], *inputs: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.found = found

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        ctx.found.extend(tangents[1:])  # the first is that of ``found``


def unpacked(inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]] | None:
    """Return the inputs without their tangents at this level, and the tangents; None if none has.

    A tangent of zeros that are not written is None.
    """
    found: list[Tensor | None] = []
    with single_level_autograd():
        _Tangents.apply(found, *inputs)  # pyright: ignore
    tangents = [None if t is None or is_zeros_not_written(t) else t for t in found]
    if all(t is None for t in tangents):
        return None
    pairs = zip(inputs, found, strict=True)
    return [x if t is None else primal_of(x) for x, t in pairs], tangents


def without_tangents(function: type[Function], refusal: str) -> Callable[..., Any]:
    """Return the autograd kernel of an operator that refuses inputs with tangents."""

    def kernel(operator: Any, below: DispatchKeySet, *inputs: Any) -> Any:
        if unpacked(inputs) is not None:
            raise NotImplementedError(refusal)
        return recorded(function, operator, below, inputs)

    return kernel


def register(name: str, kernel: Callable[..., Any]) -> None:
    """Register ``kernel(operator, keys below autograd, *inputs)`` as an autograd kernel."""
    operator = getattr(torch.ops.rowmax, name).default

    def autograd(keys: DispatchKeySet, *inputs: Any) -> Any:
        flop_counter.register()
        return kernel(operator, below_autograd(keys), *inputs)

    library.LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
