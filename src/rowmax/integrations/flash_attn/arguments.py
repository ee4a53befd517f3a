"""Arguments of flash-attn as arguments of rowmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import Mask, Window

_NO_WINDOW = (-1, -1)


def keywords(
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float
) -> dict[str, Any]:
    """Return the keywords of ``rowmax.attention`` that all functions share."""
    found: dict[str, Any] = {"causal": causal, "scale": softmax_scale}
    if window_size != _NO_WINDOW:
        found["mask"] = band(window_size)
    if softcap > 0:  # flash-attn turns it off at 0 and below
        found["softcap"] = softcap
    return found


def band(window_size: Any) -> Mask | None:
    """Return the mask of a window (left, right), where a negative limit is no limit."""
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(isinstance(n, (int, torch.SymInt)) for n in window_size)
    ):
        raise TypeError(
            f"window_size: got {window_size!r}; want (left, right), two ints, -1 for no limit"
        )
    left, right = window_size
    if left < 0 and right < 0:
        return None
    return Window(None if left < 0 else left, None if right < 0 else right)


def by_slopes(call: Callable[..., Any], alibi_slopes: Tensor | None, *rows: Tensor | None) -> Any:
    """Return the results of ``call(*rows, slopes)``, with slopes ``[H]`` or None.

    With slopes ``[B, H]`` each sequence is a call. The first of the rows is q ``[B, Nq, H, D]``.
    """
    if alibi_slopes is None:
        return call(*rows, None)
    q = rows[0]
    assert q is not None
    slopes = slopes_of(alibi_slopes, q.shape[0], q.shape[2])
    if slopes.dim() == 1:
        return call(*rows, slopes)
    # split, whose gradient is one cat
    parts = ([None] * len(slopes) if t is None else t.split(1) for t in rows)
    each = [call(*one) for one in zip(*parts, slopes, strict=True)]
    if isinstance(each[0], tuple):
        return tuple(torch.cat(one) for one in zip(*each, strict=True))
    return torch.cat(each)


def slopes_of(alibi_slopes: Tensor, batch: int, heads: int) -> Tensor:
    """Return slopes ``[H]`` if all sequences share them, else ``[B, H]``.

    Sequences share the slopes of an expanded tensor (stride 0); values are not read, because that
    waits for the device.
    """
    want = f"a tensor [H] = [{heads}] or [B, H] = [{batch}, {heads}]"
    if not isinstance(alibi_slopes, Tensor):
        raise TypeError(f"alibi_slopes: got {type(alibi_slopes).__name__}; want {want}")
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes: got shape {list(alibi_slopes.shape)}; want {want}")
    if alibi_slopes.requires_grad:
        raise ValueError(
            "alibi_slopes: got slopes that require a gradient; want constants, such as "
            "alibi_slopes.detach()"
        )
    if alibi_slopes.dim() == 2 and (batch == 1 or alibi_slopes.stride(0) == 0):
        return alibi_slopes[0]
    return alibi_slopes


def unpacked(name: str, packed: Tensor, axis: int, shape: str) -> tuple[Tensor, ...]:
    """Return the tensors of a packed one, views: the gradient is one stack."""
    count = 3 if name == "qkv" else 2
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name}: got {type(packed).__name__}; want a tensor {shape}")
    if packed.dim() != axis + 3 or packed.shape[axis] != count:
        raise ValueError(f"{name}: got shape {list(packed.shape)}; want {shape}")
    return packed.unbind(axis)


def refuse_probabilities(dropout_p: float, return_attn_probs: bool) -> None:
    """Raise if the matrix of probabilities is wanted: only dropout fills it."""
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            f"return_attn_probs: got True with dropout_p={dropout_p}; want dropout_p=0, or "
            "return_attn_probs=False: S_dmask would hold seqlen_q x seqlen_k probabilities, which "
            "rowmax never computes (rowmax.attention has return_lse= with dropout)"
        )


def refuse_pages(block_table: Tensor | None) -> None:
    """Raise for a key-value cache in pages."""
    if block_table is not None:
        raise NotImplementedError(
            "block_table: got a table; want None, and keys and values that are not in pages "
            "(k_cache[block_table].flatten(1, 2) copies a cache's pages in order)"
        )
