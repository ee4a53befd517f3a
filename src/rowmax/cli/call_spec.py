"""A call described by options of the command line, and the arguments of ``explain`` for it.

Tensors have their shapes and no memory behind them (one row, expanded). Only documents, lengths
and offsets hold numbers, because ``explain`` reads them to count tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import rowmax

from ..masks import ALIGNMENTS, Mask
from .options import DTYPES, Backend, Device, check_backend, find_device

SHAPE = "Letters of bhqk, or 1 where it broadcasts: 1hqk."
WINDOW_HELP = "left,right; none for no limit."
DOCUMENTS_HELP = "That many, of equal length."
BIAS_HELP = "Added to the scores. " + SHAPE

Batch = Annotated[int, typer.Option("--batch", "-b", min=0, help="Sequences.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="Of q.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Of k and v, if not as many.")]
Causal = Annotated[bool, typer.Option("--causal", help="The last query sees every key.")]
Alibi = Annotated[bool, typer.Option("--alibi", help="A slope a head: scores fall with distance.")]
Sink = Annotated[bool, typer.Option("--sink", help="A logit a head in the softmax's sum.")]
Softcap = Annotated[float, typer.Option(min=0, help="c bends scores to c tanh(score / c).")]
Dropout = Annotated[float, typer.Option(min=0, max=0.999, help="Probability of each weight.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Gradients are bitwise equal from run to run.")
]
HeadSize = Annotated[int, typer.Option("-d", "--head-dim", min=1, help="Of q and k.")]


@dataclass(frozen=True)
class CallSpec:
    """Shapes and features of a call. The annotations are the options of ``rowmax explain``."""

    batch: Batch = 1
    queries: Annotated[int, typer.Option("--queries", "-n", min=0, help="Nq.")] = 2048
    keys: Annotated[int | None, typer.Option("--keys", min=0, help="Nk, if not Nq.")] = None
    heads: Heads = 8
    kv_heads: KvHeads = None
    d: HeadSize = 64
    dv: Annotated[int | None, typer.Option("--value-dim", min=1, help="Of v, if not d.")] = None
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32"
    device: Device = None
    causal: Causal = False
    window: Annotated[str | None, typer.Option(help=WINDOW_HELP)] = None
    documents: Annotated[int, typer.Option(min=0, help=DOCUMENTS_HELP)] = 0
    lengths: Annotated[str | None, typer.Option(help="Keys of each sequence: 100,250.")] = None
    align: Annotated[
        str, typer.Option(help="Where the last query stands: at the last of the keys or lengths.")
    ] = "keys"
    mask: Annotated[str | None, typer.Option(help="A boolean mask. " + SHAPE)] = None
    bias: Annotated[str | None, typer.Option(help=BIAS_HELP)] = None
    alibi: Alibi = False
    sink: Sink = False
    softcap: Softcap = 0.0
    dropout: Dropout = 0.0
    deterministic: Deterministic = False
    packed: Annotated[str | None, typer.Option(help="Lengths of packed sequences: 9,70.")] = None
    backend: Backend = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``rowmax.explain``.

        Raises:
            typer.BadParameter, ValueError: an option cannot be read; the message names it.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: got {self.dtype!r}; want {', '.join(DTYPES)}")
        device, dtype = find_device(self.device), getattr(torch, self.dtype)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        lengths = None if self.packed is None else integers("--packed", self.packed)
        nq, nk = self.queries, self._keys
        batch: tuple[int, ...] = (self.batch,)
        found: dict[str, Any] = {}
        if lengths is not None:
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
            nq = nk = sum(lengths)
            batch = ()
            found |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        if self.bias is not None:
            found["bias"] = _hollow(self._shape("--bias", self.bias), dtype, device)
        if self.alibi:
            found["alibi"] = _hollow((self.heads,), accumulator, device)
        if self.sink:
            found["sink"] = _hollow((self.heads,), accumulator, device)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        dv = self.d if self.dv is None else self.dv
        return found | {
            "q": _hollow((*batch, nq, self.heads, self.d), dtype, device),
            "k": _hollow((*batch, nk, kv_heads, self.d), dtype, device),
            "v": _hollow((*batch, nk, kv_heads, dv), dtype, device),
            "causal": self.causal,
            "mask": self._mask(device),
            "softcap": self.softcap,
            "dropout_p": self.dropout,
            "deterministic": self.deterministic,
            "backend": check_backend(self.backend),
        }

    @property
    def _keys(self) -> int:
        return self.queries if self.keys is None else self.keys

    def _mask(self, device: torch.device) -> Mask:
        mask = Mask()
        if self.align not in ALIGNMENTS:
            raise ValueError(f"--align: got {self.align!r}; want {' or '.join(ALIGNMENTS)}")
        if self.align == "lengths" and self.lengths is None:
            raise ValueError("--align: got 'lengths' without --lengths; want --lengths as well")
        if self.window is not None:
            mask = mask & rowmax.Window(*window_limits(self.window))
        if self.documents:
            ids = torch.arange(self._keys, device=device) * self.documents // max(1, self._keys)
            mask = mask & rowmax.Documents(ids)
        if self.lengths is not None:
            lengths = torch.tensor(integers("--lengths", self.lengths), device=device)
            mask = mask & rowmax.PrefixLengths(lengths, align=self.align)
        if self.mask is not None:
            mask = mask & _hollow(self._shape("--mask", self.mask), torch.bool, device)
        return mask

    def _shape(self, option: str, letters: str) -> tuple[int, ...]:
        """Return the shape that letters of bhqk stand for."""
        batch, nq, nk = self.batch, self.queries, self._keys
        if self.packed is not None:
            lengths = integers("--packed", self.packed)
            batch, nq = len(lengths), max(lengths)
            nk = nq
        sizes = {"1": 1, "b": batch, "h": self.heads, "q": nq, "k": nk}
        shape_letters(option, letters)
        return tuple(sizes[letter] for letter in letters)


def _hollow(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of that shape; only its last dimension takes memory."""
    return torch.ones(shape[-1], dtype=dtype, device=device).expand(shape)


def shape_letters(option: str, letters: str) -> None:
    """Raise a ValueError unless the letters stand for a shape."""
    if not letters or any(letter not in "bhqk1" for letter in letters):
        raise ValueError(f"{option}: got {letters!r}; want letters of bhqk or 1, such as 1hqk")


def integers(option: str, text: str) -> list[int]:
    """Return the numbers of a text with commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: got {text!r}; want integers, such as 100,250") from None
    if min(numbers) < 0:
        raise ValueError(f"{option}: got {text!r}; want integers of 0 or more")
    return numbers


def window_limits(text: str) -> tuple[int | None, int | None]:
    """Return the limits of a window, left and right."""
    parts = text.split(",")
    try:
        left, right = (None if part.strip() == "none" else int(part) for part in parts)
    except ValueError:
        want = "want left,right, such as 256,0, or none for no limit"
        raise ValueError(f"--window: got {text!r}; {want}") from None
    return left, right
