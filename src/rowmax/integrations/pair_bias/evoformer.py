"""``DS4Sci_EvoformerAttention`` with the signature of deepspeed.ops.deepspeed4science."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rows import Inputs, Keys, attend, cast_dtype
from .triangle import _want

_LARGEST = 1e30  # the largest bias of keys: products of q and k stay within float32


def DS4Sci_EvoformerAttention(  # noqa: N802  (DeepSpeed's name)
    Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]
) -> Tensor:
    """Compute attention of Q ``[B, N, L, H, D]`` with up to two biases, each with its gradient.

    Args:
        Q, K, V: ``[*, L, H, D]``; with a bias ``[B, N, L, H, D]``.
        biases: up to two, or None. First a bias of keys ``[B, N, 1, 1, L]``, added in two or more
            further columns of Q and K, which are copied for it. A boolean tensor instead, True
            where a key may be seen, hides keys without copies: prefer it for a mask. Second a
            bias of pairs ``[B, 1, H, L, L]``, shared by the rows.

    Returns:
        out ``[*, L, H, D]``, contiguous. A row whose boolean mask hides all keys has out 0.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch
    >>> from rowmax.integrations.pair_bias import DS4Sci_EvoformerAttention
    >>> Q, K, V = (torch.randn(1, 3, 6, 2, 16) for _ in range(3))  # [B, N, L, H, D]
    >>> keys, pairs = torch.zeros(1, 3, 1, 1, 6), torch.randn(1, 1, 2, 6, 6)
    >>> DS4Sci_EvoformerAttention(Q, K, V, [keys, pairs]).shape
    torch.Size([1, 3, 6, 2, 16])
    """
    if len(biases) > 2:
        raise ValueError(f"biases: got {len(biases)}; want at most two, of keys and of pairs")
    of_keys, of_pairs = (*biases, None, None)[:2]
    for name, t in (("Q", Q), ("K", K), ("V", V)):
        if not isinstance(t, Tensor) or t.dim() < 3:
            got = list(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name}: got {got}; want a tensor [*, L, H, D]")
    for name, t in (("K", K), ("V", V)):
        _want(name, t, tuple(Q.shape), "[*, L, H, D], the shape of Q")
    lead = Q.shape[:-3]
    if of_keys is None and of_pairs is None:
        q, k, v = (t[None].flatten(0, -4)[None] for t in (Q, K, V))
        out, _ = attend(Inputs(q, k, v, None), Keys(), None)
        return out.reshape(*lead, *out.shape[2:])
    b, n, length, h, d = _want("Q", Q, (None,) * 5, "[B, N, L, H, D]")
    if of_pairs is not None:
        _want("biases[1]", of_pairs, (b, 1, h, length, length), "[B, 1, H, L, L]")
    keys, scale = Keys(), 1 / math.sqrt(d)
    if of_keys is not None:
        _want("biases[0]", of_keys, (b, n, 1, 1, length), "[B, N, 1, 1, L]")
        of_keys = of_keys[:, :, 0, 0]
        if of_keys.dtype == torch.bool:
            keys = Keys(allowed=of_keys)
        else:
            dtype = cast_dtype(Q)  # before autocast would round the columns
            Q, K = _with_bias_of_keys(Q.to(dtype), K.to(dtype), of_keys, scale)
    return attend(Inputs(Q, K, V, of_pairs), keys, scale)[0]


def _with_bias_of_keys(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with columns whose products, times scale, are the bias ``[B, N, L]``.

    In half precision three columns hold the bias to 24 bits. The first carries its gradient.
    Head sizes stay multiples of 8, which GPU kernels need.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    largest = min(_LARGEST, torch.finfo(q.dtype).max)
    factor = 2.0 ** math.ceil(math.log2(1 / scale))  # exact in q's dtype
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # scale * factor >= 1: no column exceeds the bias
    rest = bias.to(wide).clamp(-largest, largest) / (scale * factor)
    parts = [rest.to(q.dtype)]
    for _ in range(2 * half):
        rest = rest.detach() - parts[-1].detach().to(wide)
        parts.append(rest.to(q.dtype))
    unused = -(q.shape[-1] + len(parts)) % 8
    ones = pad(q.new_full((len(parts),), factor), (0, unused))
    columns = pad(torch.stack(parts, -1), (0, unused))[:, :, :, None]
    each = (ones.expand(*q.shape[:-1], -1), columns.expand(-1, -1, -1, k.shape[3], -1))
    return torch.cat((q, each[0]), -1), torch.cat((k, each[1]), -1)
