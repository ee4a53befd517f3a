"""Padded batches to packed rows and back, with the names of ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return ``input[indices]``, ``[len(indices), ...]``."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros ``[first_axis_dim, ...]`` with the values at the indices."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the rows that the masks select, packed. Waits for the device, which counts them.

    Args:
        hidden_states: ``[B, N, ...]``.
        attention_mask: ``[B, N]``, bool or int, 1 for rows in use.
        unused_mask: ``[B, N]``, 1 for rows that are kept and not in use.

    Returns:
        (rows ``[total, ...]``, indices ``[total]`` among B N, cu_seqlens ``[B + 1]`` int32, the
        longest sequence, rows in use ``[B]`` int32).

    >>> import torch
    >>> from rowmax.integrations.flash_attn.bert_padding import pad_input, unpad_input
    >>> x, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    >>> rows.shape, cu_seqlens.tolist(), longest
    (torch.Size([4, 8]), [0, 3, 4], 3)
    >>> torch.equal(pad_input(rows, indices, 2, 4), x * mask[..., None])
    True
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed rows ``[total, ...]`` at their places in ``[batch, seqlen, ...]``, else 0."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))
