"""The functions of flash-attn for training: dense, packed and of variable lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import attention, attention_varlen
from .arguments import (
    by_slopes,
    keywords,
    refuse_pages,
    refuse_probabilities,
    slopes_of,
    unpacked,
)

#: out, or (out, softmax_lse, S_dmask) with return_attn_probs
Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q ``[B, Nq, H, D]`` over k and v ``[B, Nk, Hk, D]``.

    Args:
        q, k, v: float16, bfloat16, float32 or float64, H a multiple of Hk.
        dropout_p: the probability of dropping a weight.
        softmax_scale: ``1/sqrt(D)`` if None.
        causal: query i sees keys ``j <= i + Nk - Nq``.
        window_size: (left, right), keys from ``i + Nk - Nq - left`` to ``i + Nk - Nq + right``;
            -1 is no limit.
        softcap: c > 0 bends scores to ``c tanh(score / c)``.
        alibi_slopes: ``[H]``, or ``[B, H]``: then each sequence is a call of its own unless the
            tensor is expanded from ``[H]``.
        deterministic: gradients that are equal from run to run.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out ``[B, Nq, H, D]``, or (out, softmax_lse ``[B, H, Nq]`` float32, S_dmask ``[0]``).
        A row that sees no key has out 0 and lse -inf (flash-attn: lse inf).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
        NotImplementedError: return_attn_probs with dropout.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    >>> flash_attn.flash_attn_func(q, k, k, causal=True, window_size=(4, 0)).shape
    torch.Size([2, 8, 4, 16])
    >>> out, lse, _ = flash_attn.flash_attn_func(q, k, k, return_attn_probs=True)
    >>> lse.shape
    torch.Size([2, 4, 8])
    """
    refuse_probabilities(dropout_p, return_attn_probs)
    options = keywords(softmax_scale, causal, window_size, softcap)
    options.update(dropout_p=dropout_p, deterministic=deterministic, return_lse=return_attn_probs)

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Any:
        return attention(q, k, v, alibi=slopes, **options)

    return _result(by_slopes(call, alibi_slopes, q, k, v), q, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of qkv ``[B, N, 3, H, D]``; see ``flash_attn_func``.

    The gradient of qkv is one tensor ``[B, N, 3, H, D]``.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 8, 3, 4, 16)).shape
    torch.Size([2, 8, 4, 16])
    """
    q, k, v = unpacked("qkv", qkv, 2, "[B, N, 3, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q over kv ``[B, Nk, 2, Hk, D]``; see ``flash_attn_func``.

    The gradient of kv is one tensor ``[B, Nk, 2, Hk, D]``.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> q, kv = torch.randn(2, 3, 4, 16), torch.randn(2, 8, 2, 2, 16)
    >>> flash_attn.flash_attn_kvpacked_func(q, kv).shape
    torch.Size([2, 3, 4, 16])
    """
    k, v = unpacked("kv", kv, 2, "[B, Nk, 2, Hk, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Result:
    """Compute attention within each of B packed sequences; see ``flash_attn_func``.

    Args:
        q: ``[total_q, H, D]``; k and v ``[total_k, Hk, D]``.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, the first row of each sequence, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence, or a bound.
        alibi_slopes: ``[H]``, or ``[B, H]`` expanded from it.
        block_table: None: there is no cache in pages.

    Returns:
        out ``[total_q, H, D]``, or (out, softmax_lse ``[H, total_q]``, S_dmask ``[0]``).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
        NotImplementedError: return_attn_probs with dropout; a block table; slopes of each
            sequence.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> q, cu = torch.randn(10, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, causal=True).shape
    torch.Size([10, 2, 16])
    """
    refuse_pages(block_table)
    refuse_probabilities(dropout_p, return_attn_probs)
    options = keywords(softmax_scale, causal, window_size, softcap)
    slopes = None
    if alibi_slopes is not None:
        batch = cu_seqlens_q.shape[0] - 1
        slopes = slopes_of(alibi_slopes, batch, q.shape[1])
        if slopes.dim() == 2:
            raise NotImplementedError(
                f"alibi_slopes: got slopes [B, H] = {list(slopes.shape)} of packed sequences; want "
                "[H], or slopes.expand(B, H) of it, or flash_attn_func for a padded batch: "
                "separate calls would have to wait for the offsets on the device"
            )
    found = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        alibi=slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        **options,
    )  # fmt: skip
    return _result(found, q, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of qkv ``[total, 3, H, D]``; see ``flash_attn_varlen_func``.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> qkv, cu = torch.randn(10, 3, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 7).shape
    torch.Size([10, 2, 16])
    """
    q, k, v = unpacked("qkv", qkv, 1, "[total, 3, H, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q over kv ``[total_k, 2, Hk, D]``; see ``flash_attn_varlen_func``.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> q, kv = torch.randn(10, 4, 16), torch.randn(10, 2, 2, 16)
    >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7).shape
    torch.Size([10, 4, 16])
    """
    k, v = unpacked("kv", kv, 1, "[total_k, 2, Hk, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _result(found: Any, q: Tensor, return_attn_probs: bool) -> Result:
    """Return out, or (out, lse, an empty S_dmask) as flash-attn without dropout does."""
    return (*found, q.new_empty(0)) if return_attn_probs else found
