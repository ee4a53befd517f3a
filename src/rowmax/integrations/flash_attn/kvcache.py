"""``flash_attn_with_kvcache``: append to a cache and attend to its keys in use, for inference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import Documents, Mask, PrefixLengths, attention
from .arguments import band, by_slopes, keywords, refuse_pages


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to the cache in place, and attend to its keys in use. No gradient.

    Args:
        q: ``[B, Nq, H, D]``.
        k_cache, v_cache: ``[C, Nk, Hk, D]``, C >= B; sequence b has row b, or
            ``cache_batch_idx[b]``.
        k, v: ``[B, n, Hk, D]``, written at ``cache_seqlens[b]`` and after; the cache must have
            room for them.
        rotary_cos, rotary_sin: ``[Nk or more, R/2]``: rotate the first R numbers of k and q, k at
            its places in the cache; q likewise with causal or a window, else at
            ``cache_seqlens``.
        cache_seqlens: the keys in use before k is appended, an int or ``[B]``; all if None.
        cache_batch_idx: ``[B]``, rows of the cache; those rows are copied to be read.
        cache_leftpad: ``[B]``, the first key in use.
        block_table: None: there is no cache in pages.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in ``flash_attn_func``; the
            last query stands at the last key in use.
        rotary_interleaved: rotate numbers (0, 1), (2, 3), ...; or (0, R/2), (1, R/2 + 1), ...
        num_splits: 0: rowmax divides the work.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out ``[B, Nq, H, D]``, or (out, softmax_lse ``[B, H, Nq]`` float32).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
        NotImplementedError: a block table, num_splits, an input that requires a gradient.

    >>> import torch
    >>> import rowmax.integrations.flash_attn as flash_attn
    >>> cache, new = torch.zeros(2, 16, 2, 8), torch.randn(2, 1, 2, 8)
    >>> used = torch.tensor([5, 9], dtype=torch.int32)
    >>> out = flash_attn.flash_attn_with_kvcache(
    ...     new, cache, cache.clone(), new, new, cache_seqlens=used, causal=True
    ... )
    >>> out.shape, torch.equal(cache[1, 9], new[1, 0])
    (torch.Size([2, 1, 2, 8]), True)
    """
    refuse_pages(block_table)
    if num_splits != 0:
        raise NotImplementedError(
            f"num_splits: got {num_splits}; want 0: rowmax divides the keys itself"
        )
    _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    _check_cache(q, k_cache, v_cache, k, v, cache_seqlens)
    with torch.no_grad():
        used = _lengths(cache_seqlens, q)
        if rotary_cos is not None or rotary_sin is not None:
            if k is None or used is None or rotary_cos is None or rotary_sin is None:
                raise ValueError("rotary_cos: want rotary_sin, k, v and cache_seqlens with it")
            moving = causal or band(window_size) is not None
            q = _rotate(q, rotary_cos, rotary_sin, used, moving, rotary_interleaved)
            k = _rotate(k, rotary_cos, rotary_sin, used, True, rotary_interleaved)
        if k is not None and v is not None and used is not None:
            _append(k_cache, v_cache, k, v, used, cache_batch_idx)
            used = used + k.shape[1]
        k_rows, v_rows = (_rows(t, cache_batch_idx, q.shape[0]) for t in (k_cache, v_cache))
        options = keywords(softmax_scale, causal, window_size, softcap)
        options["return_lse"] = return_softmax_lse
        call = partial(_attend, options)
        return by_slopes(call, alibi_slopes, q, k_rows, v_rows, used, cache_leftpad)


def _attend(
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    slopes: Tensor | None,
) -> Any:
    """Return out, or (out, lse), of caches with lengths ``[B]`` and first keys ``[B]``, or None."""
    mask = options.get("mask")
    if lengths is not None:
        mask = _and(mask, PrefixLengths(lengths, align="lengths"))
    if leftpad is not None:
        mask = _and(mask, _after(leftpad, q.shape[1], k.shape[1]))
    options = dict(options, mask=mask)
    return attention(q, k, v, alibi=slopes, **options)


def _and(a: Mask | None, b: Mask) -> Mask:
    return b if a is None else a & b


def _after(leftpad: Tensor, nq: int, nk: int) -> Mask:
    """Return the mask that hides the keys before ``leftpad[b]``: ids of documents, ``[B, Nk]``."""
    places = torch.arange(nk, device=leftpad.device)
    ids = (places < leftpad[:, None]).to(torch.int32)
    return Documents(ids, q_ids=ids.new_zeros(nq))


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor) -> Tensor | None:
    """Return the keys in use of each sequence, int32 ``[B]``, or None for all."""
    if isinstance(cache_seqlens, int):
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return None if cache_seqlens is None else cache_seqlens.to(torch.int32)


def _places(used: Tensor, n: int) -> Tensor:
    """Return the place in the cache of each new position, int64 ``[B, n]``."""
    return used[:, None].long() + torch.arange(n, device=used.device)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, used: Tensor, index: Tensor | None
) -> None:
    """Write k and v ``[B, n, Hk, D]`` into the cache after the keys in use."""
    b, n = k.shape[:2]
    rows = torch.arange(b, device=k.device) if index is None else index.long()
    at = rows[:, None], _places(used, n)
    k_cache.index_put_(at, k.to(k_cache.dtype))
    v_cache.index_put_(at, v.to(v_cache.dtype))


def _rows(cache: Tensor, index: Tensor | None, batch: int) -> Tensor:
    """Return the rows of the cache that the sequences read, ``[B, Nk, Hk, D]``."""
    return cache[:batch] if index is None else cache.index_select(0, index)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, used: Tensor, moving: bool, interleaved: bool
) -> Tensor:
    """Return x ``[B, n, H, D]`` with its first R numbers rotated, in float32.

    Position i is ``used[b] + i``, or ``used[b]`` for all if they do not move.
    """
    places = _places(used, x.shape[1] if moving else 1)
    cos, sin = (t[places][:, :, None].float() for t in (cos, sin))  # [B, n|1, 1, R/2]
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise ValueError(
            f"rotary_cos: got {size // 2} angles; want at most half the head size, {x.shape[-1]}"
        )
    turned, rest = x[..., :size].float(), x[..., size:]
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), axis)
    return torch.cat((pairs.flatten(-2).to(x.dtype), rest), -1)


# --- checks ------------------------------------------------------------------------------------


def _refuse_gradients(**inputs: Tensor | None) -> None:
    """Raise for an input that requires a gradient: flash-attn returns none, silently."""
    if not torch.is_grad_enabled():
        return
    for name, t in inputs.items():
        if t is not None and t.requires_grad:
            raise NotImplementedError(
                f"flash_attn_with_kvcache: got {name} that requires a gradient; want the call "
                "under torch.no_grad(), because it has no backward (flash_attn_func has one)"
            )


def _check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Any,
) -> None:
    """Raise unless the new keys and values fit the cache. Reads no values of tensors."""
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (int, Tensor, type(None))):
        got = type(cache_seqlens).__name__
        raise TypeError(f"cache_seqlens: got {got}; want an int, a tensor [B] of ints, or None")
    if isinstance(cache_seqlens, Tensor) and tuple(cache_seqlens.shape) != (q.shape[0],):
        got = list(cache_seqlens.shape)
        raise ValueError(f"cache_seqlens: got shape {got}; want [B] = [{q.shape[0]}]")
    if (k is None) != (v is None):
        raise ValueError("k: want k and v, or neither, to append to the cache")
    if k is None or v is None:
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: got None with k; want the places where k is appended")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(new.shape) != want:
            raise ValueError(f"{name}: got shape {list(new.shape)}; want {list(want)}")
        if new.dtype != cache.dtype:
            raise TypeError(f"{name}: got {new.dtype}; want the dtype of the cache, {cache.dtype}")
    if isinstance(cache_seqlens, int) and cache_seqlens + k.shape[1] > k_cache.shape[1]:
        raise ValueError(
            f"cache_seqlens: got {cache_seqlens}, and {k.shape[1]} new keys; want at most "
            f"{k_cache.shape[1]} together, the size of the cache"
        )
