"""The features that an installation is checked for: cases of ``rowmax.testing``, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..testing import Call, Case, make

_SIZES: dict[str, Any] = {"b": 2, "nq": 200, "hq": 4, "d": 64}


@dataclass(frozen=True)
class Feature:
    """A case, and the dtype of its inputs."""

    case: Case
    dtype: torch.dtype | None = None  # None: the device's usual one
    poisoned: bool = False  # keys and values past the lengths are NaN

    @property
    def name(self) -> str:
        return self.case.name

    def make(self, device: torch.device, dtype: torch.dtype, seed: int) -> Call:
        """Return the call with random numbers, the same on every machine."""
        call = make(self.case, device, self.dtype or dtype, seed)
        if self.poisoned:
            for b, length in enumerate(call.keywords["mask"].lengths.tolist()):
                for t in call.inputs[1:3]:
                    t[b, length:] = torch.nan
        return call


def _feature(
    name: str, dtype: torch.dtype | None = None, poisoned: bool = False, **options: Any
) -> Feature:
    return Feature(Case(name, **{**_SIZES, **options}), dtype, poisoned)


_EVERYTHING: dict[str, Any] = {
    "nq": 150, "nk": 200, "hk": 2, "causal": True, "left": 90, "right": 20, "lengths": (0.8, 1.0),
    "bias": "1hqk", "softcap": 5.0, "sink": True, "dropout": 0.1,
}  # fmt: skip

FEATURES = (
    _feature("every key"),
    _feature("causal", causal=True),
    _feature("causal, fewer queries than keys", causal=True, nq=70, nk=200),
    _feature("causal, more queries than keys", causal=True, nk=70),
    _feature("window", left=50, right=10),
    _feature("documents, causal", causal=True, documents="sorted"),
    _feature("prefix lengths, one of them 0", lengths=(0.65, 0.0)),
    _feature(
        "causal, aligned to prefix lengths",
        causal=True, nq=70, nk=200, lengths=(0.65, 0.2), align="lengths",
    ),
    _feature("boolean mask", allowed="b1qk"),
    _feature("rows that may see nothing", allowed="b1qk", empty_rows=True),
    _feature("NaN in masked keys and values", poisoned=True, lengths=(0.65, 0.285)),
    _feature("bias [H, N, N] with gradient", bias="hqk"),
    _feature("bias [B, 1, 1, N] with gradient", bias="b11k"),
    _feature("ALiBi, causal", causal=True, alibi=True),
    _feature("softcap", softcap=2.0),
    _feature("sinks with gradient", causal=True, sink=True),
    _feature("dropout", dropout=0.2),
    _feature("grouped heads, 4 to 1", hk=1, causal=True),
    _feature("Dv other than D", d=48, dv=80),
    _feature("any strides", layout="bhnd", causal=True),
    _feature(
        "packed sequences, one empty",
        causal=True, sequences=((90, 90), (0, 0), (27, 27), (83, 83)),
    ),
    _feature("all of it at once", **_EVERYTHING),
    _feature("float64, all of it", torch.float64, **_EVERYTHING),
    _feature("float32, all of it", torch.float32, **_EVERYTHING),
    _feature("float16, all of it", torch.float16, **_EVERYTHING),
    _feature("bfloat16, all of it", torch.bfloat16, **_EVERYTHING),
)  # fmt: skip
