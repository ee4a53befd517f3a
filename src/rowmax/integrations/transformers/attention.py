"""The attention function that transformers' layers call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rowmax

from .. import parallel
from . import across
from .masks import MaskValue

#: arguments that would change the result and have no form here -> an advice
REFUSED = {
    "output_attentions": 'attn_implementation="eager", because the weights are never stored',
    "cache": 'attn_implementation="sdpa" for continuous batching, because pages are not read',
    "head_mask": 'attn_implementation="eager"',
    "alibi": 'attn_implementation="eager", or slopes as position_bias',
    "block_indices": 'attn_implementation="eager"',
    "indices": 'attn_implementation="sdpa" or "eager", for which a model adds them to its mask',
    "sinks": 'attn_implementation="eager", or s_aux, a logit a head [Hq]',
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskValue | rowmax.Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return (out ``[B, Nq, Hq, Dv]``, None): transformers' attention function of ``"rowmax"``.

    Args:
        module: the layer; its ``is_causal`` (True if it has none) counts where is_causal is None.
        query: ``[B, Hq, Nq, D]``; key ``[B, Hk, Nk, D]`` and value ``[B, Hk, Nk, Dv]``, Hk heads
            for Hq as they are.
        attention_mask: a ``MaskValue``, any mask of rowmax, a boolean tensor (True may attend) or
            a float tensor that is added, each broadcast to ``[B, Hq, Nq, Nk]``. It is the whole
            rule: only without it is_causal and sliding_window count.
        dropout, scaling, softcap: of the weights, and of the scores.
        s_aux: ``[Hq]``, a sink logit a head.
        position_bias: added to the scores; has a gradient.
        more: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` ``[S + 1]`` of sequences packed in a batch of
            one, with ``max_length_q`` and ``max_length_k``; ``deterministic``. Models pass on the
            arguments of their other layers, which have no effect here.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it got and what it
            accepts.
    """
    _refuse(more)
    _check_shapes(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    bias = position_bias
    mask: Any = attention_mask
    if mask is None:
        mask = _band(bool(is_causal), sliding_window)
    packed = more.get("cu_seq_lens_q") is not None or more.get("cu_seq_lens_k") is not None
    if packed:
        mask = _packed_mask(mask, bias)
    elif isinstance(mask, MaskValue):
        across.check_mask(mask, query, key)
        if mask.keys is not None:
            key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
            bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., : mask.keys]
        mask = _of_value(mask, more.get("position_ids"))
    elif isinstance(mask, Tensor):
        mask, bias = _of_tensor(mask, bias, query)
    options: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": 0.0 if softcap is None else softcap,
        "sink": s_aux,
        "dropout_p": dropout,
        "deterministic": bool(more.get("deterministic", False)),
    }
    if packed:
        return _attend_packed(query, key, value, options, more), None
    if query.shape[0] == 1 != key.shape[0]:  # learned queries
        query = query.expand(key.shape[0], -1, -1, -1)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return rowmax.attention(q, k, v, **options), None


def _band(is_causal: bool, sliding_window: int | None) -> rowmax.Mask | None:
    """Return the mask of a layer without one."""
    if sliding_window is not None:
        return rowmax.Window(sliding_window - 1, 0 if is_causal else sliding_window - 1)
    return rowmax.Causal() if is_causal else None


def _of_value(value: MaskValue, positions: Any) -> rowmax.Mask | None:
    """Return the mask of a value, with the documents of the position ids across ranks."""
    mask = value.mask()
    context = parallel.context()
    if context is None or value.by_positions is None:
        return mask
    documents = across.documents(context, positions, value.by_positions)  # pyright: ignore
    if documents is None or mask is None:
        return mask if documents is None else documents
    return mask & documents


def _of_tensor(mask: Tensor, bias: Tensor | None, query: Tensor) -> tuple[Any, Tensor | None]:
    """Return (mask, bias) of a mask that a user or a model gave as a tensor."""
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}; want 4 axes that broadcast to "
            "[B, Hq, Nq, Nk], or a mask of rowmax"
        )
    if mask.dtype == torch.bool:
        return mask, bias
    if not mask.is_floating_point():
        raise TypeError(
            f"attention_mask: got a tensor of {mask.dtype}; want torch.bool, True where a query "
            "may attend, or a floating dtype, added to the scores"
        )
    mask = mask if mask.dtype in (query.dtype, torch.float32) else mask.to(query.dtype)
    return None, mask if bias is None else bias + mask


def _packed_mask(mask: Any, bias: Tensor | None) -> rowmax.Mask | None:
    """Return the band of a mask within packed sequences: the offsets already separate them."""
    if bias is not None:
        raise NotImplementedError(
            "position_bias: got a tensor with cu_seq_lens_q; want no position_bias, or packed "
            "sequences by position_ids without cu_seq_lens_q"
        )
    if isinstance(mask, MaskValue) and mask.packed and mask.lengths is None and mask.keys is None:
        if mask.left is None and mask.right is None:
            return None
        return rowmax.Window(mask.left, mask.right)
    if mask is None or isinstance(mask, rowmax.Mask):
        return mask
    got = type(mask).__name__ if isinstance(mask, Tensor) else "padding, chunks or a cache"
    raise ValueError(
        f"attention_mask: got {got} with cu_seq_lens_q; want none, because the offsets "
        "of packed sequences already separate them"
    )


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], more: dict[str, Any]
) -> Tensor:
    """Return out ``[1, total, Hq, Dv]`` of packed sequences."""
    cu_q, cu_k = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        missing = "cu_seq_lens_q" if cu_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing}: got None; want offsets [S + 1], as in the other")
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q: got a batch of {query.shape[0]}; want packed sequences in a batch of 1"
        )
    longest = (_longest(more.get("max_length_q")), _longest(more.get("max_length_k")))
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    options.pop("bias")
    return rowmax.attention_varlen(q, k, v, cu_q, cu_k, *longest, **options)[None]


def _longest(n: Any) -> int | None:
    """Return a bound of the lengths as an int. None is found, and on a GPU is the total."""
    if isinstance(n, Tensor):
        return None if n.is_cuda or torch.compiler.is_compiling() else int(n)
    return n


def _refuse(more: dict[str, Any]) -> None:
    """Raise for arguments that change the result and that rowmax does not compute."""
    if not more:
        return
    for name, advice in REFUSED.items():
        got = more.get(name)
        if got is not None and got is not False:
            got = "a tensor" if isinstance(got, Tensor) else got
            got = got if isinstance(got, (str, bool)) else type(got).__name__
            raise NotImplementedError(f"{name}: got {got}; want None, or {advice}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4:
            raise ValueError(f"{name}: got shape {list(t.shape)}; want [B, H, N, D]")
