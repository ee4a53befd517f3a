"""A call described by options: shapes and features in, the arguments of ``attention`` out.

The tensors have their shapes and no memory behind them (one element, expanded), except for what
is read to count tiles: documents, lengths, offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rowmax
from rowmax.masks import ALIGNMENTS, Mask


@dataclass(frozen=True)
class Described:
    """A call in words; what cannot be read raises a ValueError that names the option."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    dtype: torch.dtype
    device: torch.device
    causal: bool = False
    window: str | None = None  # "left,right", "none" for no limit
    documents: int = 0  # that many of equal length
    lengths: str | None = None  # "100,250": keys of each sequence
    align: str = "keys"  # positions of queries: to the keys or to the lengths
    allowed: str | None = None  # a boolean mask, by pattern
    bias: str | None = None  # by pattern: a letter of bhqk, or 1 where it broadcasts
    alibi: bool = False
    sink: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    deterministic: bool = False
    packed: str | None = None  # "100,250": the lengths of packed sequences
    backend: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``rowmax.explain``."""
        total_q, total_k, found = self.queries, self.keys, {}
        rows: tuple[int, ...] = (self.batch,)
        if self.packed is not None:
            offsets = torch.tensor([0, *_integers("--packed", self.packed)]).cumsum(0)
            total_q = total_k = int(offsets[-1])
            rows = ()
            offsets = offsets.to(self.device)
            found |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        if self.bias is not None:
            found["bias"] = self._hollow(self._pattern("--bias", self.bias))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.alibi:
            found["alibi"] = self._hollow((self.heads,), wide)
        if self.sink:
            found["sink"] = self._hollow((self.heads,), wide)
        return found | {
            "q": self._hollow((*rows, total_q, self.heads, self.d)),
            "k": self._hollow((*rows, total_k, self.kv_heads, self.d)),
            "v": self._hollow((*rows, total_k, self.kv_heads, self.dv)),
            "causal": self.causal,
            "mask": self._mask(),
            "softcap": self.softcap,
            "dropout_p": self.dropout,
            "deterministic": self.deterministic,
            "backend": self.backend,
        }

    def _hollow(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of that shape; only its last dimension takes memory."""
        last = torch.ones(shape[-1], dtype=dtype or self.dtype, device=self.device)
        return last.expand(shape)

    def _mask(self) -> Mask:
        mask = Mask()
        if self.align not in ALIGNMENTS:
            raise ValueError(f"--align: got {self.align!r}; want {' or '.join(ALIGNMENTS)}")
        if self.align == "lengths" and self.lengths is None:
            raise ValueError("--align: got 'lengths' without --lengths; want --lengths as well")
        if self.window is not None:
            mask = mask & rowmax.Window(*_limits(self.window))
        if self.documents:
            ids = torch.arange(self.keys, device=self.device) * self.documents // max(1, self.keys)
            mask = mask & rowmax.Documents(ids)
        if self.lengths is not None:
            lengths = torch.tensor(_integers("--lengths", self.lengths), device=self.device)
            mask = mask & rowmax.PrefixLengths(lengths, align=self.align)
        if self.allowed is not None:
            mask = mask & self._hollow(self._pattern("--mask", self.allowed), torch.bool)
        return mask

    def _pattern(self, option: str, pattern: str) -> tuple[int, ...]:
        sequences = self.batch
        queries, keys = self.queries, self.keys
        if self.packed is not None:
            lengths = _integers("--packed", self.packed)
            sequences, queries = len(lengths), max(lengths)
            keys = queries
        sizes = {"1": 1, "b": sequences, "h": self.heads, "q": queries, "k": keys}
        if not pattern or any(letter not in sizes for letter in pattern):
            raise ValueError(f"{option}: got {pattern!r}; want letters of bhqk or 1, such as 1hqk")
        return tuple(sizes[letter] for letter in pattern)


def _integers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: got {text!r}; want integers, such as 100,250") from None
    if min(numbers) < 0:
        raise ValueError(f"{option}: got {text!r}; want integers of 0 or more")
    return numbers


def _limits(text: str) -> tuple[int | None, int | None]:
    parts = text.split(",")
    try:
        left, right = (None if part.strip() == "none" else int(part) for part in parts)
    except ValueError:
        want = "want left,right, such as 256,0, or none for no limit"
        raise ValueError(f"--window: got {text!r}; {want}") from None
    return left, right
