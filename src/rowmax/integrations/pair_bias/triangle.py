"""``triangle_attention`` with the signature of cuequivariance_torch 0.13."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import Inputs, Keys, attend

#: out, or (out, lse, max) with return_aux; max is None
Result = Tensor | tuple[Tensor, Tensor, None]


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Result:
    """Compute attention of N rows of each structure, with a bias that the rows share.

    Args:
        q: ``[B, N, H, Q, D]``; all five-axis inputs may lack B if it is 1.
        k, v: ``[B, N, H, K, D]``.
        bias: ``[B, 1, H, Q, K]``, any floating dtype that float32 holds. With half-precision q on
            Hopper a bias of q's dtype is faster than float32.
        mask: ``[B, N, 1, 1, K]``, nonzero where a key may be seen, in any pattern. Exact, and
            never read by the host.
        scale: of the scores, ``1/sqrt(D)`` if None.
        return_aux: also return lse and None.
        kv_lengths: instead of mask, int32 ``[B, N, 1, 1, 1]``: row n sees the first keys alone.
            Past K it means K. Faster than a mask where whole tiles are padding.

    Returns:
        out ``[B, N, H, Q, D]``, a view of ``[B, N, Q, H, D]``; or (out, lse ``[B, N, H, Q]``
        float32, None): rowmax does not keep the largest score of a row, which cuEquivariance
        returns third. A row that may see no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch
    >>> from rowmax.integrations.pair_bias import mask_to_kv_lengths, triangle_attention
    >>> q, k, v = (torch.randn(1, 6, 2, 6, 16) for _ in range(3))  # [B, N, H, S, D]
    >>> bias = torch.randn(1, 1, 2, 6, 6)
    >>> mask = (torch.arange(6) < 4).expand(1, 6, 1, 1, 6)
    >>> out = triangle_attention(q, k, v, bias, mask)
    >>> lengths = mask_to_kv_lengths(mask)
    >>> torch.allclose(out, triangle_attention(q, k, v, bias, kv_lengths=lengths), atol=1e-6)
    True
    """
    if mask is not None and kv_lengths is not None:
        raise ValueError("mask: got a mask and kv_lengths; want one of them")
    for name, t in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; want a tensor")
    q, k, v, bias = (_five_axes(t) for t in (q, k, v, bias))
    b, n, h, nq, d = _want("q", q, (None,) * 5, "[B, N, H, Q, D]")
    nk = _want("k", k, (b, n, h, None, d), "[B, N, H, K, D]")[3]
    _want("v", v, (b, n, h, nk, None), "[B, N, H, K, D]")
    _want("bias", bias, (b, 1, h, nq, nk), "[B, 1, H, Q, K]")
    keys = Keys()
    if mask is not None:
        mask = _five_axes(mask)
        _want("mask", mask, (b, n, 1, 1, nk), "[B, N, 1, 1, K]")
        keys = Keys(allowed=mask.to(torch.bool)[:, :, 0, 0])
    elif kv_lengths is not None:
        kv_lengths = _five_axes(kv_lengths)
        _want("kv_lengths", kv_lengths, (b, n, 1, 1, 1), "[B, N, 1, 1, 1]")
        keys = Keys(lengths=kv_lengths[:, :, 0, 0, 0])
    q, k, v = (t.transpose(2, 3) for t in (q, k, v))
    out, lse = attend(Inputs(q, k, v, bias), keys, scale, return_aux)
    out = out.transpose(2, 3)
    return out if lse is None else (out, lse, None)


def mask_to_kv_lengths(mask: Tensor) -> Tensor:
    """Return the lengths ``[B, N, 1, 1, 1]`` of a mask ``[B, N, 1, 1, K]`` of prefixes.

    Waits for the device, to check that each row is a prefix: call it once a batch.

    Raises:
        ValueError: another shape; a row with a hidden key before one that may be seen.

    >>> import torch
    >>> from rowmax.integrations.pair_bias import mask_to_kv_lengths
    >>> mask_to_kv_lengths(torch.tensor([True, True, False]).view(1, 1, 1, 1, 3)).flatten()
    tensor([2], dtype=torch.int32)
    """
    mask = _five_axes(mask).to(torch.bool)
    _want("mask", mask, (None, None, 1, 1, None), "[B, N, 1, 1, K]")
    if bool((mask[..., 1:] & ~mask[..., :-1]).any()):
        raise ValueError(
            "mask: got a row with a hidden key before one that may be seen; want prefixes, or "
            "triangle_attention(mask=), which takes any pattern"
        )
    return mask.sum(-1, keepdim=True, dtype=torch.int32)


def _five_axes(t: Tensor) -> Tensor:
    return t[(None,) * (5 - t.dim())] if t.dim() < 5 else t


def _want(name: str, t: Tensor, sizes: tuple[int | None, ...], layout: str) -> torch.Size:
    """Return the shape of t, or raise if a size that is not None differs."""
    if t.dim() != len(sizes) or any(
        want is not None and got != want for got, want in zip(t.shape, sizes, strict=True)
    ):
        known = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name}: got shape {list(t.shape)}; want {layout} = [{known}]")
    return t.shape
