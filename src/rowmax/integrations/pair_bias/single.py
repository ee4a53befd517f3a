"""``attention_pair_bias`` with the signature of cuequivariance_torch 0.13."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm

from .rows import Inputs, Keys, attend

_LEAST_INF = 1e4  # exp(-1e4) is 0 in float32: smaller penalties would leave weights


def attention_pair_bias(
    single_repr: Tensor,
    pair_repr: Tensor,
    mask: Tensor | None,
    num_heads: int,
    w_ln_a: Tensor | None,
    b_ln_a: Tensor | None,
    w_proj_q: Tensor,
    b_proj_q: Tensor | None,
    w_proj_k: Tensor,
    w_proj_v: Tensor,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_proj_z: Tensor | None = None,
    b_proj_o: Tensor | None = None,
    b_proj_z: Tensor | None = None,
    w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: Tensor | None = None,
    b_proj_v: Tensor | None = None,
    w_ln_q: Tensor | None = None,
    b_ln_q: Tensor | None = None,
    w_ln_k: Tensor | None = None,
    b_ln_k: Tensor | None = None,
    b_proj_g: Tensor | None = None,
    norm_kind: str = "layer_norm",
) -> tuple[Tensor, Tensor | None]:
    """Compute normalised, gated attention of single representations, with a bias of pairs.

    Args:
        single_repr: ``[B M, N, C]``, replica m of structure b at ``b M + m``.
        pair_repr: ``[B, N, N, Z]``; with is_cached_z_proj the bias ``[B, H, N, N]``.
        mask: ``[B, N]`` or ``[B M, N]``, nonzero where a position may be seen, or None.
        num_heads: H. The head size is that of the rows of w_proj_q over H.
        w_ln_a, b_ln_a: weights ``[C]`` of the norm of single_repr.
        w_proj_q, w_proj_k, w_proj_v, w_proj_g: ``[H D, C]``, with biases b_proj_q etc. ``[H D]``.
        w_proj_o: ``[C, H D]``, b_proj_o ``[C]``.
        w_proj_z: ``[H, Z]``, b_proj_z ``[H]``, w_ln_z and b_ln_z ``[Z]``: norm and projection of
            pair_repr.
        inf: the penalty of masked positions. They are hidden, so any of 1e4 or more is the same.
        eps: of the norms.
        attn_scale: of the scores, ``1/sqrt(D)`` if None.
        return_z_proj: also return the bias ``[B, H, N, N]``.
        is_cached_z_proj: pair_repr is that bias.
        w_ln_q, b_ln_q, w_ln_k, b_ln_k: ``[H D]``: norms of the projected q and k, if given.
        norm_kind: "layer_norm", or "rms_norm" without biases.

    Returns:
        (out ``[B M, N, C]``, the bias or None).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch
    >>> from rowmax.integrations.pair_bias import attention_pair_bias
    >>> c, z, h = 16, 8, 2  # channels of singles and of pairs, heads
    >>> q, k, v, g, o = (torch.randn(c, c) for _ in range(5))
    >>> singles, pairs = torch.randn(1, 6, c), torch.randn(1, 6, 6, z)
    >>> out, _ = attention_pair_bias(
    ...     singles, pairs, None, h, torch.ones(c), torch.zeros(c), q, None, k, v, g, o,
    ...     w_proj_z=torch.randn(h, z), w_ln_z=torch.ones(z), b_ln_z=torch.zeros(z),
    ... )
    >>> out.shape
    torch.Size([1, 6, 16])
    """
    norm = _Norm(norm_kind, eps)
    b, m, n = _check(single_repr, pair_repr, mask, num_heads, is_cached_z_proj, inf)
    a = norm(single_repr, w_ln_a, b_ln_a)
    q = _project(a, w_proj_q, b_proj_q)
    k = _project(a, w_proj_k, b_proj_k)
    v = _project(a, w_proj_v, b_proj_v)
    if w_ln_q is not None or b_ln_q is not None:
        q = norm(q, w_ln_q, b_ln_q).to(v.dtype)  # autocast normalises in float32
    if w_ln_k is not None or b_ln_k is not None:
        k = norm(k, w_ln_k, b_ln_k).to(v.dtype)
    if is_cached_z_proj:
        bias = pair_repr
    elif w_proj_z is None:
        raise ValueError("w_proj_z: got None; want weights [H, Z], or is_cached_z_proj=True")
    else:
        bias = _bias(norm(pair_repr, w_ln_z, b_ln_z), w_proj_z, b_proj_z)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).unflatten(0, (b, m)) for t in (q, k, v))
    keys = Keys() if mask is None else Keys(allowed=_each(mask, b, m, n))
    out, _ = attend(Inputs(q, k, v, bias[:, None]), keys, attn_scale)
    out = _project(a, w_proj_g, b_proj_g).sigmoid() * out.flatten(0, 1).flatten(2)
    return _project(out, w_proj_o, b_proj_o), bias if return_z_proj else None


class _Norm:
    """The norm over the last axis that ``norm_kind`` names."""

    def __init__(self, kind: str, eps: float) -> None:
        if kind not in ("layer_norm", "rms_norm"):
            raise ValueError(f"norm_kind: got {kind!r}; want 'layer_norm' or 'rms_norm'")
        self.rms, self.eps = kind == "rms_norm", eps

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x normalised, in its dtype."""
        weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
        if not self.rms:
            return layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        if bias is not None:
            raise ValueError("norm_kind: got 'rms_norm' with the bias of a norm; want None")
        return rms_norm(x, x.shape[-1:], weight, self.eps)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + b``, with weights in the dtype of x."""
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _bias(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the projection ``[B, H, N, N]`` of z ``[B, N, N, Z]``, contiguous without a copy."""
    n = z.shape[1]
    found = weight.to(z.dtype) @ z.flatten(1, 2).transpose(1, 2)
    if bias is not None:
        found = found + bias.to(z.dtype)[:, None]
    return found.unflatten(-1, (n, n))


def _each(mask: Tensor, b: int, m: int, n: int) -> Tensor:
    """Return the mask of each replica, bool ``[B, M, N]``."""
    mask = mask.to(torch.bool)
    if mask.shape[0] == b * m:
        return mask.unflatten(0, (b, m))
    return mask[:, None].expand(b, m, n)


def _check(
    single: Tensor, pair: Tensor, mask: Tensor | None, heads: int, cached: bool, inf: float
) -> tuple[int, int, int]:
    """Return (B, M, N), or raise for shapes that do not fit."""
    if single.dim() != 3:
        raise ValueError(f"single_repr: got shape {list(single.shape)}; want [B M, N, C]")
    rows, n, _ = single.shape
    want = f"[B, {heads}, {n}, {n}]" if cached else f"[B, {n}, {n}, Z]"
    sizes = pair.shape[1:] if pair.dim() == 4 else ()
    if (sizes != (heads, n, n)) if cached else (sizes[:2] != (n, n)):
        raise ValueError(f"pair_repr: got shape {list(pair.shape)}; want {want}")
    b = pair.shape[0]
    if b == 0 or rows % b:
        raise ValueError(f"single_repr: got {rows} rows; want a multiple of B = {b}")
    if mask is not None and tuple(mask.shape) not in ((b, n), (rows, n)):
        got = list(mask.shape)
        raise ValueError(f"mask: got shape {got}; want [{b}, {n}] or [{rows}, {n}]")
    if mask is not None and not inf >= _LEAST_INF:
        raise ValueError(f"inf: got {inf}; want {_LEAST_INF:g} or more: masked keys are hidden")
    return b, rows // b, n
