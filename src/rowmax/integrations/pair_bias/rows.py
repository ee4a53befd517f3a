"""Attention of N rows in each of B structures, whose bias the rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import Documents, Mask, PrefixLengths, attention


class Keys(NamedTuple):
    """The keys that each row may see; both None: all."""

    allowed: Tensor | None = None  # bool [B, N, K], in any pattern
    lengths: Tensor | None = None  # [B, N], the keys after it are padding

    def each(self, change: Callable[[Tensor], Tensor]) -> Keys:
        """Return the keys with both tensors changed."""
        return Keys(*(None if t is None else change(t) for t in self))


class Inputs(NamedTuple):
    """The inputs of B structures, in rowmax's layout."""

    q: Tensor  # [B, N, Q, H, D]
    k: Tensor  # [B, N, K, H, D]
    v: Tensor
    bias: Tensor | None  # [B, 1, H, Q, K]


def attend(
    x: Inputs, keys: Keys, scale: float | None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return out ``[B, N, Q, H, D]`` and lse ``[B, N, H, Q]`` or None.

    Structures with a bias of their own are a call each, because a bias shared by their rows
    would have to be expanded in one call. Nothing waits for the device.
    """
    b, n = x.q.shape[:2]
    if b == 1 or n == 1 or x.bias is None:
        # one call of B N sequences: the bias is shared by all, or each sequence has its own
        q, k, v = (t.flatten(0, 1) for t in x[:3])
        bias = None if x.bias is None else x.bias.squeeze(1)
        found = _call(q, k, v, bias, keys.each(lambda t: t.flatten(0, 1)), scale, return_lse)
        return _shaped(*found, b, n)
    # unbind, whose gradient is one stack
    each = zip(x.q.unbind(), x.k.unbind(), x.v.unbind(), x.bias.unbind(), strict=True)
    parts = [
        _call(q, k, v, bias, keys.each(lambda t, i=i: t[i]), scale, return_lse)
        for i, (q, k, v, bias) in enumerate(each)
    ]
    out = torch.stack([out for out, _ in parts])
    return out, torch.stack([lse for _, lse in parts if lse is not None]) if return_lse else None


def cast_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which rowmax computes: autocast's where it is on, else q's."""
    device = q.device.type
    if q.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return q.dtype
    return torch.get_autocast_dtype(device)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keys: Keys,
    scale: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return out ``[N, Q, H, D]`` and lse ``[N, H, Q]`` or None of one call of rowmax."""
    # rowmax takes q's dtype or float32, which holds halves; autocast casts q and halves alike
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias if bias.dtype == cast_dtype(q) else bias.to(torch.float32)
    mask = _mask(keys, q.shape[1])
    if return_lse:
        return attention(q, k, v, mask=mask, bias=bias, scale=scale, return_lse=True)
    return attention(q, k, v, mask=mask, bias=bias, scale=scale), None


def _mask(keys: Keys, nq: int) -> Mask | None:
    """Return the mask of rows; ids of documents are exact for any pattern of keys.

    They take one number a key, and Hopper's kernels have documents but no boolean masks.
    """
    if keys.lengths is not None:
        return PrefixLengths(keys.lengths)
    if keys.allowed is None:
        return None
    ids = keys.allowed.to(torch.int32)
    return Documents(ids, q_ids=ids.new_ones(nq))


def _shaped(out: Tensor, lse: Tensor | None, b: int, n: int) -> tuple[Tensor, Tensor | None]:
    """Return out and lse with their first axis split into [B, N]."""
    return out.unflatten(0, (b, n)), None if lse is None else lse.unflatten(0, (b, n))
