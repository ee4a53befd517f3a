"""The operators under ``torch.vmap``: one call over a larger batch where the result is the same.

The vmapped dimension joins the batch: V slices of B sequences become V B sequences. The slices are
computed one by one, which is always correct, under

- dropout, whose draws depend on the batch index
- packed offsets
- a sink or parameters of heads with the vmapped dimension
- a gradient that is summed over the batch
- a bias or boolean mask that would be copied to join

A tangent may have the vmapped dimension where its input has none (a Jacobian column by column); the
input is then expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.inputs import INPUTS, Tangents, Tensors, Wanted

_N = len(Tensors._fields)
_T = len(Tangents._fields)
#: inputs with a row for each sequence; terms whose axes may be 1 join by a rule of their own
_PER_SEQUENCE = tuple(n for n, x in INPUTS.items() if x.axes[:1] == "b" and "h?" not in x.axes)

_TERMS = tuple(n for n, x in INPUTS.items() if "h?" in x.axes)


def rule(name: str, tangents: int, rows: int) -> Callable[..., tuple[Any, Any]]:
    """Return the rule of an operator (``library.Layout``).

    It returns (results, their vmapped dimensions).
    """
    before = slice(tangents, tangents + rows)
    at = before.stop + (rows > 0)

    def fold(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        size, operator = info.batch_size, getattr(torch.ops.rowmax, name)
        dims = in_dims[:tangents], in_dims[at : at + _N]
        slices = Tensors(*_leading(inputs[at : at + _N], dims[1]))
        along = Tangents(*_leading(inputs[:tangents], dims[0]))
        wanted = inputs[at - 1] if rows else None
        folded = _folded_pair(size, slices, along, dims, wanted)
        if folded is None:
            return _one_by_one(size, operator, in_dims, inputs)
        given = _rows(size, inputs[before], in_dims[before])
        flag = () if wanted is None else (wanted,)
        tail = inputs[at + _N :]
        results = operator(*folded[1][:tangents], *given, *flag, *folded[0], *tail)
        if wanted is not None:
            times = len(wanted) // _T
            return _apart(size, results, wanted, times * slices[:_T], times * tuple(dims[1][:_T]))
        batch = slices.q.shape[0 if dims[1][0] is None else 1]
        return tuple(r.unflatten(0, (size, batch)) for r in results), (0,) * len(results)

    return fold


def _rows(size: int, rows: Sequence[Any], dims: Sequence[Any]) -> list[Tensor | None]:
    """Return results of a call or their gradients, of all slices."""
    pairs = zip(_leading(rows, dims), dims, strict=True)
    return [_joined(size, t, d is not None) for t, d in pairs]


def _apart(
    size: int, results: Sequence[Tensor], wanted: Sequence[bool], inputs: Any, dims: Sequence[Any]
) -> tuple[Any, Any]:
    """Return gradients by slices; ``inputs`` are theirs, with these vmapped dimensions."""
    apart = (
        r.unflatten(0, (size, x.shape[0 if d is None else 1])) if want else r
        for r, want, x, d in zip(results, wanted, inputs, dims, strict=True)
    )
    return tuple(apart), tuple(0 if want else None for want in wanted)


def _folded_pair(
    size: int, t: Tensors, along: Tangents, dims: Sequence[Any], wanted: Sequence[bool] | None
) -> tuple[Tensors, Tangents] | None:
    """Return the inputs and tangents of one call over all slices, or None as ``_folded``.

    ``dims`` has those of the tangents, then those of the inputs; ``wanted`` the gradients of the
    inputs, then perhaps those of the tangents.
    """
    own, batched = _names(dims[0]), _names(dims[1])
    if own & {"sink", "heads"}:
        return None
    if t.bias is not None and "bias" in own - batched:
        t, batched = t._replace(bias=t.bias.expand(size, *t.bias.shape)), batched | {"bias"}
    either = None if wanted is None else Wanted(*(any(wanted[n::_T]) for n in range(_T)))
    folded = _folded(size, t, batched, either)
    if folded is None:
        return None
    joined = {name: _joined(size, getattr(along, name), name in own) for name in "qkv"}
    if along.bias is not None and folded.bias is not None:
        shared = folded.bias.shape[0] != folded.q.shape[0]  # then so is the tangent
        joined["bias"] = along.bias if shared else _joined(size, along.bias, "bias" in own)
    return folded, along._replace(**joined)


def _names(dims: Sequence[Any]) -> set[str]:
    """Return the names of the inputs, or of the tangents, that have a vmapped dimension."""
    return {name for name, d in zip(Tensors._fields, dims, strict=False) if d is not None}


def _leading(tensors: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Return each tensor with its vmapped dimension, if it has one, in front."""
    return [
        t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True)
    ]


def _folded(size: int, t: Tensors, batched: set[str], wanted: Wanted | None) -> Tensors | None:
    """Return the inputs of one call over all slices, or None if the slices need separate calls."""
    if t.seed is not None or t.cu_seqlens_q is not None or batched & {"sink", "heads"}:
        return None
    if wanted is not None and (wanted.sink or wanted.heads):
        return None
    batch = t.q.shape[1 if "q" in batched else 0]
    large = {}
    for name in _TERMS:
        x = getattr(t, name)
        if x is None:
            continue
        if name in batched and x.shape[1] == batch:
            large[name] = x.flatten(0, 1)
        elif name in batched or x.shape[0] != 1:
            return None
        elif name == "bias" and wanted is not None and wanted.bias:
            if batch != 1:
                return None
            large[name] = x.expand(size, -1, -1, -1)  # each slice has a gradient of its own
    small = {}
    for name in _PER_SEQUENCE:
        x, ids = getattr(t, name), name.endswith("ids")
        if x is None or (ids and name not in batched and x.shape[0] == 1):
            continue  # one row for all sequences of all slices
        x = x.expand(-1, batch, -1) if ids and name in batched else x
        small[name] = _joined(size, x, name in batched)
    return t._replace(**large, **small)


def _joined(size: int, t: Tensor | None, batched: bool) -> Tensor | None:
    """Return ``[V B, ...]`` of ``[V, B, ...]`` or, the same for every slice, of ``[B, ...]``."""
    if t is None:
        return None
    return (t if batched else t.expand(size, *t.shape)).flatten(0, 1)


def _one_by_one(
    size: int, operator: Callable[..., tuple[Tensor, ...]], in_dims: Sequence[Any], inputs: Any
) -> tuple[Any, Any]:
    def part(x: Any, d: int | None, n: int) -> Any:
        if not isinstance(x, Tensor) or d is None:
            return x
        if size == 0:  # compute one slice of the right shape, and drop it
            return x.new_zeros(x.movedim(d, 0).shape[1:])
        return x.select(d, n)

    calls = [
        operator(*(part(x, d, n) for x, d in zip(inputs, in_dims, strict=True)))
        for n in range(max(size, 1))
    ]
    results = tuple(torch.stack(parts)[:size] for parts in zip(*calls, strict=True))
    return results, (0,) * len(results)
