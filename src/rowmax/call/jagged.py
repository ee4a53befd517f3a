"""Nested tensors of the layout ``torch.jagged`` as packed sequences, and the results as them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import bad, wrong_type
from ..torch_compat import cached_lengths, jagged_axis, longest_length, values_are_readable

_WANT = "a jagged tensor [B, j, H, D], as q is"


class Packed(NamedTuple):
    """Packed sequences of queries and of keys, as the arguments of a packed call."""

    q: Tensor  # [total_q, Hq, D]
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def packed(q: Tensor, k: Tensor, v: Tensor, indexed: bool) -> Packed:
    """Return the sequences of nested tensors, with the lengths that they cache.

    The longest lengths are bounds of the rows of a mask or bias: if ``indexed``, they are found
    where they are not cached, which waits for a GPU.

    Raises:
        TypeError, ValueError: naming the tensor, what it is and what it may be.
    """
    nested: list[Any] = [_checked(name, t) for name, t in (("q", q), ("k", k), ("v", v))]
    q, k, v = nested
    if k.shape[0] != q.shape[0]:
        raise bad("k", f"batch {k.shape[0]}", f"the batch of q, {q.shape[0]}")
    if not _same_lengths(k, v):
        raise bad("v", "sequences of other lengths", "those of k, such as by the same offsets")
    longest = (longest_length(t) if indexed else cached_lengths(t)[1] for t in (q, k))
    cu_seqlens = (t.offsets() for t in nested[:2])
    return Packed(*(t.values() for t in nested), *cu_seqlens, *longest)


def jagged(out: Tensor, lse: Tensor, q: Any) -> tuple[Tensor, Tensor]:
    """Return out ``[B, j, Hq, Dv]`` and lse ``[B, Hq, j]`` of packed ones, jagged as q."""
    q = _checked("q", q)
    made, offsets = torch.nested.nested_tensor_from_jagged, q.offsets()
    least, most = cached_lengths(q)
    return (
        made(out, offsets, min_seqlen=least, max_seqlen=most),
        made(lse, offsets, jagged_dim=2, min_seqlen=least, max_seqlen=most),
    )


def _checked(name: str, t: Any) -> Any:
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, _WANT)
    if not t.is_nested:
        raise wrong_type(name, f"a dense tensor {list(t.shape)}", _WANT)
    if t.layout != torch.jagged:
        raise wrong_type(name, f"a nested tensor of {t.layout}", "layout=torch.jagged")
    axis = jagged_axis(t)
    if t.dim() != 4 or axis != 1:
        sizes = ", ".join("j" if n == axis else str(t.shape[n]) for n in range(t.dim()))
        raise bad(name, f"a jagged tensor [{sizes}]", "[B, j, H, D], as transpose(1, 2) swaps axes")
    # without gaps between sequences
    return t if t.lengths() is None else t.contiguous()  # pyright: ignore


def _same_lengths(k: Any, v: Any) -> bool:
    """Return True if k and v share their offsets, or have equal ones that can be read."""
    a, b = k.offsets(), v.offsets()
    if a is b or k.shape[1] == v.shape[1]:
        return True
    return a.shape == b.shape and values_are_readable(a) and torch.equal(a, b)
