"""The features that an installation is checked for: a name, and a call that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rowmax

B, N, H, D = 2, 200, 4, 64


@dataclass(frozen=True)
class Call:
    """Arguments of ``attention``, or of ``attention_varlen`` if it has offsets."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    offsets: tuple[Tensor, Tensor] | None = None

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return fresh leaves of the inputs with gradients, in their own dtype or another."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        named |= {n: self.options[n] for n in ("bias", "sink", "alibi") if n in self.options}
        return {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in named.items()}


class Maker:
    """Makes random numbers for calls, the same on every machine."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, wide: bool = False) -> Tensor:
        """Return normal numbers in the dtype of the inputs, or of the accumulator if wide."""
        t = torch.randn(shape, generator=self.generator)
        return t.to(self.device, self.accumulator if wide else self.dtype)

    def bools(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < 0.7).to(self.device)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def call(
        self, *, nq: int = N, nk: int = N, hk: int = H, d: int = D, dv: int = D, **options: Any
    ) -> Call:
        q, k, v = self.normal(B, nq, H, d), self.normal(B, nk, hk, d), self.normal(B, nk, hk, dv)
        return Call(q, k, v, options)


@dataclass(frozen=True)
class Feature:
    """A named call, made from random numbers."""

    name: str
    make: Callable[[Maker], Call]
    dtype: torch.dtype | None = None  # dtype of the inputs; None: the device's usual one


def _documents(m: Maker) -> Call:
    ids = m.integers(*(n // 70 for n in range(N)))
    return m.call(causal=True, mask=rowmax.Documents(ids))


def _lengths(m: Maker) -> Call:
    return m.call(mask=rowmax.PrefixLengths(m.integers(130, 0)))


def _cache(m: Maker) -> Call:
    mask = rowmax.PrefixLengths(m.integers(130, 40), align="lengths")
    return m.call(nq=70, causal=True, mask=mask)


def _rows_without_keys(m: Maker) -> Call:
    mask = m.bools(B, 1, N, N)
    mask[:, :, ::3] = False
    return m.call(mask=mask)


def _nan_padding(m: Maker) -> Call:
    call = m.call(mask=rowmax.PrefixLengths(m.integers(130, 57)))
    for b, length in enumerate((130, 57)):
        call.k[b, length:] = call.v[b, length:] = torch.nan
    return call


def _strides(m: Maker) -> Call:
    q, k, v = (m.normal(B, H, N, D).transpose(1, 2) for _ in range(3))
    return Call(q, k, v, {"causal": True})


def _alibi(m: Maker) -> Call:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=m.accumulator, device=m.device)
    return m.call(causal=True, alibi=slopes)


def _packed(m: Maker) -> Call:
    cu = m.integers(0, 90, 90, 117, 200)
    q, k, v = (m.normal(N, H, D) for _ in range(3))
    return Call(q, k, v, {"causal": True}, (cu, cu))


def _everything(m: Maker) -> Call:
    return m.call(
        nq=150,
        hk=2,
        causal=True,
        mask=rowmax.Window(90, 20) & rowmax.PrefixLengths(m.integers(160, 200)),
        bias=m.normal(1, H, 150, N),
        softcap=5.0,
        sink=m.normal(H, wide=True),
        dropout_p=0.1,
        seed=3,
    )


FEATURES = (
    Feature("every key", lambda m: m.call()),
    Feature("causal", lambda m: m.call(causal=True)),
    Feature("causal, fewer queries than keys", lambda m: m.call(causal=True, nq=70)),
    Feature("causal, more queries than keys", lambda m: m.call(causal=True, nk=70)),
    Feature("window", lambda m: m.call(mask=rowmax.Window(50, 10))),
    Feature("documents, causal", _documents),
    Feature("prefix lengths, one of them 0", _lengths),
    Feature("causal, aligned to prefix lengths", _cache),
    Feature("boolean mask", lambda m: m.call(mask=m.bools(B, 1, N, N))),
    Feature("rows that may see nothing", _rows_without_keys),
    Feature("NaN in masked keys and values", _nan_padding),
    Feature("bias [H, N, N] with gradient", lambda m: m.call(bias=m.normal(H, N, N))),
    Feature("bias [B, 1, 1, N] with gradient", lambda m: m.call(bias=m.normal(B, 1, 1, N))),
    Feature("ALiBi, causal", _alibi),
    Feature("softcap", lambda m: m.call(softcap=2.0)),
    Feature("sinks with gradient", lambda m: m.call(causal=True, sink=m.normal(H, wide=True))),
    Feature("dropout", lambda m: m.call(dropout_p=0.2, seed=7)),
    Feature("grouped heads, 4 to 1", lambda m: m.call(hk=1, causal=True)),
    Feature("Dv other than D", lambda m: m.call(d=48, dv=80)),
    Feature("any strides", _strides),
    Feature("packed sequences, one empty", _packed),
    Feature("all of it at once", _everything),
    Feature("float64, all of it", _everything, torch.float64),
    Feature("float32, all of it", _everything, torch.float32),
    Feature("float16, all of it", _everything, torch.float16),
    Feature("bfloat16, all of it", _everything, torch.bfloat16),
)
