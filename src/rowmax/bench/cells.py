"""Cells: the problems that are measured, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

TOKENS, WIDTH = 16384, 2048


@dataclass(frozen=True)
class Cell:
    """Describe one problem. Fewer queries than keys stand at the last keys."""

    n: int = 1024
    d: int = 64
    b: int = 0  # 0: the number of sequences with 16k tokens in all
    hq: int = 0  # 0: heads 2048 wide in all
    hk: int = 0  # 0: as many as query heads
    dtype: str = "bfloat16"
    causal: bool = False
    window: int = 0  # keys that a query sees before its own, and none after; 0: no window
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    bias: str = ""  # sizes of the bias in letters, such as 1hqk
    dbias: bool = False  # the gradient of the bias is wanted
    lengths: tuple[int, ...] = ()  # keys in use of each sequence
    packed: tuple[int, ...] = ()  # lengths of packed sequences; n is the sum
    documents: int = 0  # number of documents of equal length
    layers: int = 0  # layers of the model of a training step; b are its rows
    compiled: bool = False  # torch.compile compiles the whole model
    nq: int = 0  # queries, of each packed sequence; 0: as many as keys
    bias_float32: bool = False  # whatever the dtype of q
    dv: int = 0  # columns of values and results; 0: as many as of q and k
    boolean: bool = False  # the mask is given as a boolean tensor
    sink: bool = False  # a logit a head, with its gradient
    offsets: bool = False  # documents are given by them, not by ids
    unbounded: bool = False  # the longest of packed sequences is not given
    left: bool = False  # padding comes before the keys in use

    def __post_init__(self) -> None:
        if self.nq and self.documents:
            raise ValueError(f"nq: got {self.nq} with documents; want 0")
        if self.offsets and not self.documents:
            raise ValueError("offsets: got True; want documents")
        if self.unbounded and not self.packed:
            raise ValueError("unbounded: got True; want packed sequences")
        if self.left and not self.lengths:
            raise ValueError("left: got True; want lengths")
        masked = self.causal or self.window or self.documents or self.lengths
        if self.boolean and (self.packed or not masked):
            raise ValueError("boolean: got True; want a mask, and no packed sequences")
        n = sum(self.packed) or self.n
        heads = self.hq or WIDTH // self.d
        sizes = {"n": n, "b": self.b or max(1, TOKENS // n), "hq": heads, "hk": self.hk or heads}
        for name, size in (sizes | {"b": 1} if self.packed else sizes).items():
            object.__setattr__(self, name, size)

    @property
    def name(self) -> str:
        """Return the sizes and the features that are not the default."""
        parts = [f"D{self.d} N{self.n} {'causal' if self.causal else 'full'}"]
        parts += [f"B{self.b}"] * (self.b > 1 and (self.nq > 0 or self.b * self.n != TOKENS))
        parts += [f"H{self.hq}"] * (self.hq * self.d != WIDTH)
        parts += [f"kv heads {self.hk}"] * (self.hq != self.hk)
        for f in fields(self)[5:]:
            x = getattr(self, f.name)
            if x != f.default and f.name != "causal":
                if isinstance(x, tuple):
                    x = f"{len(x)} of {min(x)} to {max(x)}"
                parts.append(f.name if x is True else f"{f.name} {x}")
        return ", ".join(parts)

    @property
    def queries(self) -> int:
        """Return the rows of q: those of all packed sequences."""
        return self.nq * max(1, len(self.packed)) or self.n

    @property
    def values(self) -> int:
        """Return the columns of values."""
        return self.dv or self.d

    @property
    def pairs(self) -> float:
        """Return the pairs of one head that may attend, in all sequences; half if causal.

        Few queries see nearly all keys.
        """
        n, w = self.n, self.window
        if self.nq:
            keys = sum(self.packed) or sum(self.lengths) or self.b * min(w + 1 if w else n, n)
            return self.nq * keys
        every = sum(_pairs(x, w) for x in self.packed or (n,) * self.b)
        every = n * sum(self.lengths) or every / (self.documents or 1)
        return every / (2 if self.causal else 1)

    @property
    def streamed(self) -> float:
        """Return the bytes of the keys and values that some query sees."""
        each = getattr(torch, self.dtype).itemsize * self.hk * (self.d + self.values)
        n, w = self.n, self.window
        return each * (sum(self.lengths) or self.b * min(w + self.queries if w else n, n))

    def flops(self, products: int) -> float:
        """Return the operations of a number of products: 2 of a forward, 5 of a backward.

        Every second one has the columns of values: out and dP, dV of a backward.
        """
        columns = (products + 1) // 2 * self.d + products // 2 * self.values
        return 2 * self.hq * columns * self.pairs


def _pairs(n: int, window: int) -> float:
    """Return the pairs of a sequence of n positions; a window's are those of a causal mask too."""
    w = min(window, n - 1)
    return n * (w + 1) - w * (w + 1) / 2 if window else n * n


def cells(text: str) -> list[Cell]:
    """Return the cells of "d=64|128 n=512 causal=0|1 packed=200+312", one for each choice."""
    pairs = [part.split("=") for part in text.split()]
    choices = product(*(x.split("|") for _, x in pairs))
    names = [name for name, _ in pairs]
    return [Cell(**{k: _value(k, x) for k, x in zip(names, xs, strict=True)}) for xs in choices]


def _value(name: str, text: str) -> Any:
    kind = type(getattr(Cell, name))
    if kind is tuple:
        return tuple(map(int, text.split("+")))
    return kind(int(text)) if kind is bool else kind(text)


@dataclass
class Inputs:
    """The tensors of a cell: q, k, v, dout ``[B, N, H, D]``, of a packed one ``[N, H, D]``.

    q and dout have the cell's queries for N.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None  # [Hq]
    sink: Tensor | None = None  # [Hq]
    lengths: Tensor | None = None  # [B]
    ids: Tensor | None = None  # [N], the document of each position
    offsets: Tensor | None = None  # the first key of each sequence or document, and the end
    q_offsets: Tensor | None = None  # the same of queries


def inputs_of(cell: Cell, device: str) -> Inputs:
    """Return random inputs, the same in every process."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=getattr(torch, cell.dtype))

    first = () if cell.packed else (cell.b,)
    i = cell.queries
    n, d, dv = cell.n, cell.d, cell.values
    rows = ((i, cell.hq, d), (n, cell.hk, d), (n, cell.hk, dv), (i, cell.hq, dv))
    found = Inputs(*(normal(*first, *sizes) for sizes in rows))
    sizes = {"b": cell.b, "h": cell.hq, "q": i, "k": cell.n, "1": 1}
    if cell.bias:
        found.bias = normal(*(sizes[x] for x in cell.bias))
        if cell.bias_float32:
            found.bias = found.bias.float()
    if cell.alibi:
        found.slopes = 2.0 ** -torch.linspace(1, 8, cell.hq, device=device)
    if cell.sink:
        found.sink = torch.randn(cell.hq, device=device)
    if cell.lengths:
        found.lengths = torch.tensor(cell.lengths, device=device)
    if cell.documents:
        size = -(-cell.n // cell.documents)
        found.ids = torch.arange(cell.n, device=device) // size
        if cell.offsets:
            ends = size * torch.arange(cell.documents + 1, device=device)
            found.offsets = ends.clamp(max=cell.n).int()
    if cell.packed:
        found.offsets = torch.tensor((0, *cell.packed), device=device).cumsum(0).int()
        found.q_offsets = found.offsets
        if cell.nq:
            found.q_offsets = cell.nq * torch.arange(len(cell.packed) + 1, device=device).int()
    return found


def allowed(cell: Cell, x: Inputs) -> Tensor | None:
    """Return the pairs that may attend ``[1 or B, 1, Nq, N]``, or None for all."""
    i = torch.arange(cell.n, device=x.q.device)
    distance = i[-cell.queries :, None] - i
    ok = torch.ones_like(distance, dtype=torch.bool)[None, None]
    if cell.causal or cell.window:
        ok = ok & (distance >= 0) & (distance <= (cell.window or cell.n))
    if x.ids is not None:
        ok = ok & (x.ids[:, None] == x.ids)
    if x.lengths is not None:
        used = x.lengths[:, None, None, None]
        ok = ok & (i >= cell.n - used if cell.left else i < used)
    return ok if cell.causal or cell.window or cell.documents or cell.lengths else None
