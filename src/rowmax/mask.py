"""Masks: small values that say which keys a query may see, and which tiles hold any.

Every mask is one record: a band around the diagonal, documents, lengths and a boolean tensor,
all of which must allow a pair. The classes fill in one part each and ``&`` intersects records,
so a backend meets one form only.

Positions are aligned bottom-right: query ``i`` of ``Nq`` stands at key position
``i + Nk - Nq``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .problem import Problem, Tensors

# What a backend does with a tile of (queries, keys).
SKIP, PARTIAL, FULL = 0, 1, 2


class Mask:
    """Which pairs (query, key) may attend; immutable, composed with ``&``.

    Fields (``None`` forbids nothing):
        left, right: the band ``-left <= j - (i + offset) <= right``.
        k_ids, q_ids: int32 ``[N]`` or ``[B, N]``, equal ids may attend; without ``q_ids`` a
            query has the id of the key position at which it stands.
        lengths: int32 ``[B]``, key ``j < lengths[b]``.
        allowed: bool, broadcast to ``[B, Hq, Nq, Nk]``; True may attend.
    """

    __slots__ = ("allowed", "k_ids", "left", "lengths", "q_ids", "right")

    def __init__(
        self,
        left: int | None = None,
        right: int | None = None,
        k_ids: Tensor | None = None,
        q_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> None:
        self.left = left
        self.right = right
        self.k_ids = k_ids
        self.q_ids = q_ids
        self.lengths = lengths
        self.allowed = allowed

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        k_ids, q_ids = _both_documents(self, other)
        return Mask(
            left=_least(self.left, other.left),
            right=_least(self.right, other.right),
            k_ids=k_ids,
            q_ids=q_ids,
            lengths=_both(self.lengths, other.lengths, torch.minimum),
            allowed=_both(self.allowed, other.allowed, torch.logical_and),
        )

    __rand__ = __and__

    def __repr__(self) -> str:
        numbers = [f"{n}={getattr(self, n)}" for n in ("left", "right")]
        tensors = [
            f"{n}={list(t.shape)}"
            for n in ("k_ids", "q_ids", "lengths", "allowed")
            if (t := getattr(self, n)) is not None
        ]
        parts = [text for text in numbers if not text.endswith("=None")] + tensors
        return f"Mask({', '.join(parts)})"


class Causal(Mask):
    """A query sees its own position and what came before: ``j <= i + Nk - Nq``.

    >>> import torch, rowmax
    >>> q = torch.randn(1, 8, 2, 16)
    >>> rowmax.attention(q, q, q, mask=rowmax.Causal()).shape
    torch.Size([1, 8, 2, 16])
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(right=0)


class Window(Mask):
    """A band: ``i + offset - left <= j <= i + offset + right``; ``None`` is no limit.

    Args:
        left: keys before the query's position, 0 or more, or None for all.
        right: keys after it; 0 makes the window causal.

    Raises:
        TypeError, ValueError: a limit that is not an int, or is negative.

    >>> import rowmax
    >>> rowmax.Window(left=128, right=0)
    Mask(left=128, right=0)
    """

    __slots__ = ()

    def __init__(self, left: int | None = None, right: int | None = None) -> None:
        for name, n in (("left", left), ("right", right)):
            if n is None:
                continue
            if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
                raise TypeError(f"Window({name}=): got {n!r}; want an int of 0 or more, or None")
            if n < 0:
                raise ValueError(f"Window({name}=): got {n}; want 0 or more, or None for no limit")
        super().__init__(left=left, right=right)


class Documents(Mask):
    """Only positions of the same document attend to each other.

    Args:
        ids: integers ``[N]`` or ``[B, N]``, the document of each key position (in any order).
            A query has the id of the position at which it stands.
        cu_seqlens: instead of ids, ``[documents + 1]`` offsets, 0 first, N last.
        q_ids: the documents of the queries, ``[Nq]`` or ``[B, Nq]``, where they are their own.

    >>> import torch, rowmax
    >>> rowmax.Documents(torch.tensor([0, 0, 1, 1, 1]))
    Mask(k_ids=[5])
    """

    __slots__ = ()

    def __init__(
        self,
        ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        q_ids: Tensor | None = None,
    ) -> None:
        if (ids is None) == (cu_seqlens is None):
            raise TypeError("Documents: want either ids or cu_seqlens, got both or neither")
        if cu_seqlens is not None:
            _want_integers("Documents(cu_seqlens=)", cu_seqlens, (1,))
            ids = _ids_of_offsets(cu_seqlens)
        assert ids is not None
        _want_integers("Documents(ids=)", ids, (1, 2))
        if q_ids is not None:
            _want_integers("Documents(q_ids=)", q_ids, (1, 2))
        super().__init__(k_ids=ids, q_ids=q_ids)


class PrefixLengths(Mask):
    """Sequence b of the batch has ``lengths[b]`` keys; those after are padding.

    Args:
        lengths: integers ``[B]``.

    >>> import torch, rowmax
    >>> rowmax.PrefixLengths(torch.tensor([3, 5]))
    Mask(lengths=[2])
    """

    __slots__ = ()

    def __init__(self, lengths: Tensor) -> None:
        _want_integers("PrefixLengths(lengths=)", lengths, (1,))
        super().__init__(lengths=lengths)


def as_mask(mask: Mask | Tensor | None, name: str = "mask") -> Mask:
    """The record of a mask, of a boolean tensor, or of nothing."""
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name}: got {type(mask).__name__}; want a rowmax mask or a boolean tensor"
        )
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name}: got a tensor of {mask.dtype}; want torch.bool, True where a query may "
            "attend (an additive mask goes to bias=)"
        )
    return Mask(allowed=mask)


# --- the rules ---------------------------------------------------------------------------------


def dense(problem: Problem, tensors: Tensors) -> Tensor:
    """Every pair's permission, bool ``[B|1, Hq|1, Nq, Nk]``: the definition of a mask."""
    device = tensors.q.device
    i = torch.arange(problem.nq, device=device)[:, None] + problem.offset
    j = torch.arange(problem.nk, device=device)[None, :]
    seen = torch.ones(1, 1, problem.nq, problem.nk, dtype=torch.bool, device=device)
    if problem.left is not None:
        seen = seen & (j >= i - problem.left)
    if problem.right is not None:
        seen = seen & (j <= i + problem.right)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        seen = seen & (tensors.q_ids[:, None, :, None] == tensors.k_ids[:, None, None, :])
    if tensors.lengths is not None:
        seen = seen & (j < tensors.lengths[:, None, None, None])
    if tensors.allowed is not None:
        seen = seen & tensors.allowed
    return seen


def tile_states(problem: Problem, tensors: Tensors, block_q: int, block_k: int) -> Tensor:
    """Each tile's state, uint8 ``[B|1, Hq|1, tiles of queries, tiles of keys]``.

    ``SKIP`` holds no allowed pair, ``FULL`` nothing but allowed pairs, ``PARTIAL`` is anything
    else: a tile may be called partial without need, never skipped or full without right.
    The map costs one byte a tile; a boolean tensor is read once to make it.
    """
    nq, nk, device = problem.nq, problem.nk, tensors.q.device
    i0 = torch.arange(0, nq, block_q, device=device)[:, None]
    j0 = torch.arange(0, nk, block_k, device=device)[None, :]
    i1 = (i0 + block_q).clamp(max=nq) - 1  # the last row and column of the tile
    j1 = (j0 + block_k).clamp(max=nk) - 1
    low, high = i0 + problem.offset, i1 + problem.offset
    some = torch.ones(1, 1, i0.shape[0], j0.shape[1], dtype=torch.bool, device=device)
    every = some.clone()
    if problem.left is not None:
        some = some & (j1 >= low - problem.left)
        every = every & (j0 >= high - problem.left)
    if problem.right is not None:
        some = some & (j0 <= high + problem.right)
        every = every & (j1 <= low + problem.right)
    if tensors.lengths is not None:
        lengths = tensors.lengths[:, None, None, None]
        some = some & (j0 < lengths)
        every = every & (j1 < lengths)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        q_low, q_high = _tile_range(tensors.q_ids, block_q)
        k_low, k_high = _tile_range(tensors.k_ids, block_k)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    if tensors.allowed is not None:
        any_allowed, all_allowed = _tile_any_all(problem, tensors.allowed, block_q, block_k)
        some = some & any_allowed
        every = every & all_allowed
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def _tile_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest id of each block, ``[B|1, blocks]``."""
    pad = -ids.shape[1] % block
    last = ids[:, -1:].expand(-1, pad)  # repeats an id that the block already has
    blocks = torch.cat([ids, last], 1).unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _tile_any_all(
    problem: Problem, allowed: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Whether any and whether all of a boolean tensor's pairs are allowed, tile by tile."""
    for dim, block in ((2, block_q), (3, block_k)):
        if allowed.shape[dim] == 1:
            continue  # broadcast along this dimension: each tile sees the one value
        pad = -allowed.shape[dim] % block
        last = allowed.narrow(dim, allowed.shape[dim] - 1, 1)
        repeat = [-1, -1, -1, -1]
        repeat[dim] = pad
        allowed = torch.cat([allowed, last.expand(repeat)], dim) if pad else allowed
    n_q = -(-problem.nq // block_q) if allowed.shape[2] > 1 else 1
    n_k = -(-problem.nk // block_k) if allowed.shape[3] > 1 else 1
    tiles = allowed.unflatten(3, (n_k, -1)).unflatten(2, (n_q, -1))  # [B, H, n_q, bq, n_k, bk]
    return tiles.any(5).any(3), tiles.all(5).all(3)


# --- building records --------------------------------------------------------------------------


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _both(a: Tensor | None, b: Tensor | None, combine: Any) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def _both_documents(a: Mask, b: Mask) -> tuple[Tensor | None, Tensor | None]:
    """Ids that are equal exactly where both masks' ids are."""
    if a.k_ids is None or b.k_ids is None:
        one = a if b.k_ids is None else b
        return one.k_ids, one.q_ids
    if (a.q_ids is None) != (b.q_ids is None):
        raise ValueError("Documents & Documents: give q_ids to both or to neither")
    k_ids = torch.broadcast_tensors(a.k_ids, b.k_ids)
    pairs = torch.stack(k_ids, -1)
    if a.q_ids is None or b.q_ids is None:
        return torch.unique(pairs.flatten(0, -2), dim=0, return_inverse=True)[1].view(
            pairs.shape[:-1]
        ), None
    q_pairs = torch.stack(torch.broadcast_tensors(a.q_ids, b.q_ids), -1)
    both = torch.cat([pairs.flatten(0, -2), q_pairs.flatten(0, -2)])
    number = torch.unique(both, dim=0, return_inverse=True)[1]
    n = pairs.shape[:-1].numel()
    return number[:n].view(pairs.shape[:-1]), number[n:].view(q_pairs.shape[:-1])


def _ids_of_offsets(cu_seqlens: Tensor) -> Tensor:
    """The document of each position: [0, 2, 5] -> [0, 0, 1, 1, 1]."""
    lengths = cu_seqlens.diff()
    if cu_seqlens.shape[0] < 2 or int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(
            f"Documents(cu_seqlens=): got {cu_seqlens.tolist()}; want offsets that start at 0 "
            "and never fall"
        )
    number = torch.arange(lengths.shape[0], device=cu_seqlens.device, dtype=torch.int32)
    return number.repeat_interleave(lengths)


def _want_integers(name: str, t: object, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}; want a tensor of int32 or int64")
    if t.dim() not in dims:
        want = " or ".join(f"{n}-D" for n in dims)
        raise ValueError(f"{name}: got shape {list(t.shape)}; want a {want} tensor")
