"""Cut a tensor into the rows of each rank, and join it again.

A value that all ranks hold counts once. So the derivative of one function is the other: the
gradient of a shard is joined, and equal on all ranks; that of a join is its own rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import bad, check_dense, wrong_type
from ..masks import as_int
from ..operators.functions import Along, Function, redispatch, register, unpacked
from ..operators.library import LIBRARY
from ..torch_compat import DispatchKeySet, any_requires_grad, single_level_autograd
from .agreement import agree, digest, refuse_together
from .calls import layout_of
from .collectives import all_gather
from .exchange import in_order
from .groups import Group, group_named, group_of
from .layout import Layout

LIBRARY.define("shard(Tensor x, int dim, str group, str layout) -> Tensor")
LIBRARY.define("unshard(Tensor x, int dim, str group, str layout) -> Tensor")


def shard(
    x: Tensor, layout: Layout, mesh: DeviceMesh | ProcessGroup | None = None, dim: int = 1
) -> Tensor:
    """Return this rank's rows of a tensor that all ranks hold, along ``dim``.

    Differentiable to any order: the derivative is ``unshard``, so every rank runs the backward.

    Args:
        x: any dtype, with ``layout.n`` rows along ``dim``.
        mesh: a DeviceMesh of one dimension or two, a ProcessGroup, or None for the default group.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    group = group_of(mesh)
    axis = _checked(x, layout, group, dim)
    if x.shape[axis] != layout.n:
        raise bad("x", f"{x.shape[axis]} rows", f"{layout.n}, as the layout has")
    return torch.ops.rowmax.shard(x, axis, group.name, layout.text)


def unshard(
    x: Tensor, layout: Layout, mesh: DeviceMesh | ProcessGroup | None = None, dim: int = 1
) -> Tensor:
    """Return the whole tensor, on every rank, from the rows of all ranks.

    Differentiable to any order: the derivative is ``shard``. Args are those of ``shard``; x has
    ``layout.lengths[rank]`` rows along ``dim``.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    group = group_of(mesh)
    try:
        axis = _checked(x, layout, group, dim)
        want = layout.lengths[group.rank]
        if x.shape[axis] != want:
            got = f"{x.shape[axis]} rows on rank {group.rank}"
            raise bad("x", got, f"{want}, as the layout has")
    except (TypeError, ValueError) as error:
        refuse_together(group, error)
    return torch.ops.rowmax.unshard(x, axis, group.name, layout.text)


def _checked(x: Any, layout: Any, group: Group, dim: Any) -> int:
    """Return the axis of the rows, counted from the first."""
    if not isinstance(x, Tensor):
        raise wrong_type("x", type(x).__name__, "a tensor")
    check_dense("x", x)
    if not isinstance(layout, Layout):
        raise wrong_type("layout", type(layout).__name__, "a Layout")
    if layout.ranks != group.size:
        raise bad("layout", f"{layout.ranks} ranks", f"those of the group, {group.size}")
    axis = as_int(dim)
    if axis is None or not -x.dim() <= axis < x.dim():
        raise bad("dim", repr(dim), f"an axis of x, which has {x.dim()}")
    return axis % x.dim()


# --- kernels -----------------------------------------------------------------------------------


def _shard_kernel(x: Tensor, dim: int, group: str, layout: str) -> Tensor:
    chunks = layout_of(layout).chunks(group_named(group).rank)
    return torch.cat([x.narrow(dim, c.start, len(c)) for c in chunks] or [x.narrow(dim, 0, 0)], dim)


def _unshard_kernel(x: Tensor, dim: int, group: str, layout: str) -> Tensor:
    whole, here = layout_of(layout), group_named(group)
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    if here.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    agree(
        ("unshard", dim, others, x.dtype, layout),
        here,
        lambda: {
            "call": f"unshard along {dim}",
            "layout": digest(whole),
            "x": f"{x.dtype} {list(others)} without its rows",
        },
    )
    wide = torch.Size(others).numel()
    flat = all_gather(x.movedim(dim, 0).flatten(), [n * wide for n in whole.lengths], here)
    parts = [t.view(n, *others) for n, t in zip(whole.lengths, flat, strict=True)]
    return in_order(parts, whole.owned).movedim(0, dim).contiguous()


LIBRARY.impl("shard", _shard_kernel, "CompositeExplicitAutograd")
LIBRARY.impl("unshard", _unshard_kernel, "CompositeExplicitAutograd")


def _fake(x: Tensor, dim: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + 1 :]))


@torch.library.register_fake("rowmax::shard")
def _(x: Tensor, dim: int, group: str, layout: str) -> Tensor:
    return _fake(x, dim, layout_of(layout).lengths[group_named(group).rank])


@torch.library.register_fake("rowmax::unshard")
def _(x: Tensor, dim: int, group: str, layout: str) -> Tensor:
    return _fake(x, dim, layout_of(layout).n)


# --- autograd ----------------------------------------------------------------------------------


class _Linear(Function):
    """An operator whose derivative is another, its adjoint."""

    @staticmethod
    def forward(
        ctx: Any, way: DispatchKeySet | Along, operator: Any, adjoint: Any, *inputs: Any
    ) -> Tensor:
        ctx.adjoint, ctx.rest = adjoint, inputs[1:]
        if isinstance(way, Along):
            ctx.along = way
            return way.values()[0]
        return redispatch(operator, way, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = ctx.adjoint(grads[0], *ctx.rest)
        return (None, None, None, found, *(None,) * len(ctx.rest))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return Function.jvp(ctx, *tangents)[0]


def _linear(adjoint: str) -> Any:
    def kernel(operator: Any, below: DispatchKeySet, *inputs: Any) -> Any:
        dual = unpacked(inputs)
        way: Any = below
        if dual is not None:
            (primal, *rest), tangents = dual
            way = Along((operator(primal, *rest),), (operator(tangents[0], *rest),))
        elif not any_requires_grad(inputs):
            return operator.redispatch(below, *inputs)
        with single_level_autograd():
            other = getattr(torch.ops.rowmax, adjoint)
            return _Linear.apply(way, operator, other, *inputs)  # pyright: ignore

    return kernel


register("shard", _linear("unshard"))
register("unshard", _linear("shard"))
