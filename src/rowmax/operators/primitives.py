"""Row softmax and logsumexp by blocks: the online recurrence as functions of their own.

A first pass over the blocks of a row keeps the running maximum m and the sum l of ``exp(x - m)``. A
second writes each block normalised by the final m and l. The recurrence of ``reference/online.py``
rescales every earlier block each time m moves; here each is scaled once. Every element is read
twice, written once and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..call.check import DTYPES
from ..errors import bad, check_dense, wrong_type
from ..masks import as_int
from ..torch_compat import forward_mode_levels

BLOCK = 1024


def softmax(x: Tensor, dim: int = -1, *, block: int = BLOCK) -> Tensor:
    """Return ``exp(x) / sum(exp(x))`` along a dimension, by blocks of it.

    Differentiable in both modes and twice. Sums are in float32 (float64 for float64).

    Args:
        x: any shape, float32, float16, bfloat16 or float64.
        dim: the dimension whose slices sum to 1.
        block: the number of elements in a block. The result differs only by rounding. Working
            memory is one block of every row.

    Returns:
        A tensor like x. A row of -inf alone gives 0, with gradient 0, where torch gives NaN.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch, rowmax
    >>> rowmax.softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    _check(x, dim, block)
    if x.dim() == 0:
        return softmax(x[None], 0, block=block)[0]
    return _softmax(x, dim % x.dim(), block)


def logsumexp(x: Tensor, dim: int = -1, keepdim: bool = False, *, block: int = BLOCK) -> Tensor:
    """Return ``log(sum(exp(x)))`` along a dimension, by blocks of it.

    Differentiable in both modes and twice. Sums are in float32 (float64 for float64).

    Args:
        x: any shape, float32, float16, bfloat16 or float64.
        dim: the dimension that is summed over.
        keepdim: keep it in the result, of size 1.
        block: the number of elements in a block, as for ``softmax``.

    Returns:
        A tensor of x's dtype and shape without ``dim``. A row of -inf alone, or of nothing,
        gives -inf, with gradient 0.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch, rowmax
    >>> rowmax.logsumexp(torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
    tensor([0.6931, 2.3133])
    """
    _check(x, dim, block)
    if not isinstance(keepdim, bool):
        raise wrong_type("keepdim", repr(keepdim), "True or False")
    if x.dim() == 0:
        return logsumexp(x[None], 0, block=block)
    e = _logsumexp(x, dim % x.dim(), block).to(x.dtype)
    return e if keepdim else e.squeeze(dim)


def _check(x: object, dim: Any, block: Any) -> None:
    if not isinstance(x, Tensor):
        raise wrong_type("x", type(x).__name__, "a tensor")
    if x.dtype not in DTYPES:
        raise wrong_type("x", x.dtype, "float32, float16, bfloat16 or float64")
    check_dense("x", x)
    for name, n in (("dim", dim), ("block", block)):
        if as_int(n) is None:
            raise wrong_type(name, repr(n), "an int")
    n = max(x.dim(), 1)
    if not -n <= dim < n:
        raise bad("dim", dim, f"{-n} to {n - 1} for {x.dim()} dimensions")
    if block < 1:
        raise bad("block", block, "1 or more")


# --- the choice --------------------------------------------------------------------------------


def _softmax(x: Tensor, dim: int, block: int) -> Tensor:
    if not _prefers_plain_operations():
        return _Softmax.apply(x, dim, block)  # pyright: ignore
    weights, l, _ = _plain(x, dim)
    return (weights / l).to(x.dtype)


def _logsumexp(x: Tensor, dim: int, block: int) -> Tensor:
    if not _prefers_plain_operations():
        return _Logsumexp.apply(x, dim, block)  # pyright: ignore
    _, l, m = _plain(x, dim)
    return _log(m, l)


def _prefers_plain_operations() -> bool:
    """Return True if plain operations are better than blocks.

    A compiler fuses plain operations. Tangents of an autograd.Function do not nest: forward mode
    over forward mode would be silently wrong.
    """
    return torch.compiler.is_compiling() or forward_mode_levels() > 1


def _plain(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (``exp(x - m)``, its sum l, m) of whole rows; a row of -inf has l = 1 and m = -inf."""
    x = x.to(_wide(x))
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    m = x.detach().amax(dim, keepdim=True) if x.shape[dim] else x.new_full(shape, -torch.inf)
    weights = torch.exp(x - _shift(m))
    l = weights.sum(dim, keepdim=True)
    return weights, l.masked_fill(m == -torch.inf, 1.0), m


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# --- the passes --------------------------------------------------------------------------------


def _blocks(x: Tensor, dim: int, block: int) -> Iterator[Tensor]:
    n = x.shape[dim]
    for j in range(0, n, block):
        yield x.narrow(dim, j, min(block, n - j))


def _max_and_sum(x: Tensor, dim: int, block: int) -> tuple[Tensor, Tensor]:
    """Return (m, l) of every row in the accumulator's dtype, dim kept: l sums ``exp(x - m)``.

    A row of -inf has m = 0, so that its exponentials are 0 and not NaN.
    """
    wide = _wide(x)
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    m = x.new_full(shape, -torch.inf, dtype=wide)
    l = torch.zeros_like(m)
    for x_j in _blocks(x, dim, block):
        m_new = torch.maximum(m, x_j.amax(dim, keepdim=True).to(wide))
        shift = _shift(m_new)
        l = l * torch.exp(m - shift) + torch.exp(x_j - shift).sum(dim, keepdim=True)
        m = m_new
    return _shift(m), l


def _shift(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0.0)


def _log(m: Tensor, l: Tensor) -> Tensor:
    """Return the logsumexp: inf for a row that holds inf, although l is NaN there."""
    return (m + torch.log(l)).masked_fill(m == torch.inf, torch.inf)


# --- softmax -----------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    """Softmax in reverse mode. Its backward is differentiable, for second order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, block: int) -> Tensor:
        m, l = _max_and_sum(x, dim, block)
        l = l.masked_fill(l == 0, 1.0)
        y = torch.empty_like(x)
        for x_j, y_j in zip(_blocks(x, dim, block), _blocks(y, dim, block), strict=True):
            y_j.copy_(torch.exp(x_j - m).div_(l))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, ctx.block = inputs
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return _through_softmax(y, grads[0], ctx.dim, ctx.block), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (y,) = ctx.saved_tensors
        return _through_softmax(y, tangents[0], ctx.dim, ctx.block)


def _through_softmax(y: Tensor, g: Tensor, dim: int, block: int) -> Tensor:
    """Return ``y (g - sum(y g))``: the Jacobian, which is symmetric, times g."""
    if y.shape[dim] == 0:
        return torch.zeros_like(y)
    wide = _wide(y)
    pairs = list(zip(_blocks(y, dim, block), _blocks(g, dim, block), strict=True))
    dots = [(y_j.to(wide) * g_j).sum(dim, keepdim=True) for y_j, g_j in pairs]
    dot = torch.stack(dots).sum(0)
    return torch.cat([(y_j * (g_j - dot)).to(y.dtype) for y_j, g_j in pairs], dim)


# --- logsumexp ---------------------------------------------------------------------------------


class _Logsumexp(torch.autograd.Function):
    """The result is in the accumulator's dtype and keeps dim."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, block: int) -> Tensor:
        m, l = _max_and_sum(x, dim, block)
        return _log(m, l)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, ctx.block = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (_softmax(x, ctx.dim, ctx.block) * grads[0]).to(x.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        y = _softmax(x, ctx.dim, ctx.block)
        return (y.to(_wide(x)) * tangents[0]).sum(ctx.dim, keepdim=True)
