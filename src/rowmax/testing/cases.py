"""Cases: the shapes and features of a call. ``make`` returns the call with random numbers.

``make(..., size=8)`` multiplies every length by 8. Tests on a CPU use size 1, so that two cores
compute a case in milliseconds; tests on a GPU use both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rowmax

from ..attention import arguments
from ..call.blocks import at_positions
from ..call.inputs import HEAD_TERMS, Options, Positions, Tensors, Wanted
from ..call.normalize import normalized
from ..call.problem import Problem, problem_of
from ..masks import Mask, as_mask
from ..operators.autograd import attend

LEAVES = ("q", "k", "v", "bias", "sink", "alibi")
#: keys of documents of the kind "runs"
RUN = 200


def field_of(leaf: str) -> str:
    """Return the field of ``Tensors`` that a public argument is in."""
    return "heads" if leaf in HEAD_TERMS else leaf


@dataclass(frozen=True)
class Case:
    """The shapes and features of a call."""

    name: str
    b: int = 2
    nq: int = 150
    nk: int | None = None  # nq
    hq: int = 4
    hk: int | None = None  # hq
    d: int = 32
    dv: int | None = None  # d
    scale: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    #: ids: sorted, unsorted, runs, batched, queries (their own ids), offsets
    documents: str | None = None
    lengths: tuple[float, ...] | None = None  # fractions of nk; the batch repeats them
    align: str = "keys"  # positions are aligned to the keys or to the lengths
    prefix: tuple[float, ...] | None = None  # fractions of nk that all queries see; then causal
    step: int | None = None  # queries see the keys at multiples of it
    padding: str | None = None  # keys that no query sees: starts, left, any
    #: letters of "bhqk"; 1 broadcasts, a capital is expanded; fewer letters are fewer dimensions
    allowed: str | None = None
    empty_rows: bool = False  # the boolean mask forbids every key to some rows (or sequences)
    bias: str | None = None  # letters, as of ``allowed``
    bias_float32: bool = False  # whatever the dtype of q
    alibi: bool = False
    softcap: float = 0.0
    sink: bool = False
    dropout: float = 0.0
    #: strides: bnhd, bhnd, sliced, interleaved, strided or expanded; "a/b/c" for q, k and v
    layout: str = "bnhd"
    dout: str = "bnhd"  # the layout of the cotangent of out
    transposed: bool = False  # the queries of bias and boolean mask are contiguous, not the keys
    shift: int = 0  # elements between an aligned address and each tensor
    sequences: tuple[tuple[int, int], ...] | None = None  # packed: (queries, keys) of each
    max_given: bool = False  # the longest lengths of a packed call are bounds, not exact
    wide_offsets: bool = False  # the packed offsets are int64
    #: place of a block in a longer call: the fields of ``call.inputs.Positions``
    positions: tuple[int, int, int, int, int] | None = None
    grads: tuple[str, ...] | None = None  # the leaves with gradients; None for all
    dlse: bool = True  # lse has a cotangent, too
    deterministic: bool = False
    tags: tuple[str, ...] = field(default=(), compare=False)  # the parts of the table it is in

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    def __str__(self) -> str:
        return self.name

    def with_constant_slopes(self) -> Case:
        """Return the case without the gradient of ALiBi's slopes, which Hopper's kernels lack."""
        grads = LEAVES if self.grads is None else self.grads
        return replace(self, grads=tuple(n for n in grads if n != "alibi")) if self.alibi else self


@dataclass(frozen=True)
class Call:
    """A case with its tensors."""

    case: Case
    inputs: tuple[Tensor, ...]  # q, k, v and, packed, the offsets and longest lengths
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **overrides: Any) -> Any:
        """Return (out, lse) of ``rowmax.attention`` or ``attention_varlen``."""
        if self.case.positions is not None:  # they have no argument for positions
            out, lse = attend(*self.normalized(**overrides), None)
            return (out[0], lse[0]) if self.case.packed else (out, lse)
        function: Any = rowmax.attention_varlen if self.case.packed else rowmax.attention
        return function(*self.inputs, **{"return_lse": True, **self.keywords, **overrides})

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs with gradients, by name."""
        q, k, v = self.inputs[:3]
        named = {"q": q, "k": k, "v": v, **self.keywords}
        wanted = LEAVES if self.case.grads is None else self.case.grads
        return {n: named[n] for n in LEAVES if named.get(n) is not None and n in wanted}

    @property
    def wanted(self) -> Wanted:
        """Return the gradients of the leaves that a backend computes."""
        return Wanted(**{name: name in map(field_of, self.leaves) for name in Wanted._fields})

    def with_leaves(self, leaves: dict[str, Tensor]) -> Call:
        """Return the same call with other tensors for some of its leaves."""
        named = dict(zip("qkv", self.inputs, strict=False))
        first = tuple(leaves.get(name, t) for name, t in named.items())
        others = {name: t for name, t in leaves.items() if name not in named}
        return replace(self, inputs=first + self.inputs[3:], keywords={**self.keywords, **others})

    def problem(self) -> tuple[Problem, Tensors]:
        """Return the arguments of a backend, always with a batch dimension."""
        tensors, options = self.normalized()
        return problem_of(tensors, options), tensors

    def normalized(self, **overrides: Any) -> tuple[Tensors, Options]:
        """Return the arguments of an operator."""
        given = {**self.keywords, **overrides}
        if self.case.packed:
            given |= {"cu_seqlens": self.inputs[3:5], "max_seqlens": self.inputs[5:7]}
        q, k, v = self.inputs[:3]
        tensors, options, _ = normalized(arguments(q, k, v, **given))
        if self.case.positions is not None:
            options = at_positions(tensors, options, Positions(*self.case.positions))
        return tensors, options


def make(
    case: Case,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | int = 0,
    size: int = 1,
) -> Call:
    """Return a case with fresh random numbers; every length is multiplied by ``size``."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    case = _scaled(case, size)
    b, nq, nk, hq, hk, d, dv = sizes_of(case)
    shape = {"b": b, "h": hq, "q": nq, "k": nk}

    def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        t = torch.randn(sizes, generator=generator, device=generator.device)
        return _shifted(t.to(device=device, dtype=dtype), case.shift)

    packed = case.sequences
    rows = (b, nq) if packed is None else (1, sum(n for n, _ in packed))
    cols = (b, nk) if packed is None else (1, sum(n for _, n in packed))
    layouts = case.layout.split("/") if "/" in case.layout else [case.layout] * 3
    q, k, v = (
        laid_out(normal, layout, (*n, h, size))
        for layout, n, h, size in zip(
            layouts, (rows, cols, cols), (hq, hk, hk), (d, d, dv), strict=True
        )
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keywords: dict[str, Any] = {"causal": case.causal}
    if case.scale is not None:
        keywords["scale"] = case.scale
    if case.bias is not None:
        kind = wide if case.bias_float32 else dtype
        keywords["bias"] = _broadcast(partial(normal, dtype=kind), case.bias, shape, case)
    if case.alibi:
        slopes = 2.0 ** (-8.0 * torch.arange(1, hq + 1, dtype=torch.float64) / hq)
        keywords["alibi"] = slopes.to(device=device, dtype=wide)
    if case.softcap:
        keywords["softcap"] = case.softcap
    if case.sink:
        keywords["sink"] = normal(hq, dtype=wide)
    if case.dropout:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        keywords |= {"dropout_p": case.dropout, "seed": int(seed)}
    if case.deterministic:
        keywords["deterministic"] = True
    mask = _mask(case, generator, shape, device)
    if mask is not None:
        keywords["mask"] = mask
    if case.sequences is None:
        return Call(case, (q, k, v), keywords)
    kind = torch.int64 if case.wide_offsets else torch.int32
    lengths = torch.tensor(((0, 0), *case.sequences), dtype=kind)
    cu = lengths.cumsum(0, dtype=kind).to(device).unbind(1)
    longest = (nq, nk) if case.max_given or case.bias or case.allowed else (None, None)
    return Call(case, (q[0], k[0], v[0], *cu, *longest), keywords)  # pyright: ignore


def _scaled(case: Case, size: int) -> Case:
    if size == 1:
        return case
    lengths = ("nq", "nk", "left", "right")
    values = {n: getattr(case, n) * size for n in lengths if getattr(case, n) is not None}
    if case.sequences is not None:
        values["sequences"] = tuple((n * size, m * size) for n, m in case.sequences)
    return replace(case, **values)


def sizes_of(case: Case) -> tuple[int, ...]:
    """Return (b, nq, nk, hq, hk, d, dv); a packed case has b sequences of up to nq and nk."""
    b, nq, nk = case.b, case.nq, case.nq if case.nk is None else case.nk
    if case.sequences is not None:
        b = len(case.sequences)
        nq = max((n for n, _ in case.sequences), default=0)
        nk = max((n for _, n in case.sequences), default=0)
        if case.max_given:
            nq, nk = nq + 5, nk + 9
    dv = case.d if case.dv is None else case.dv
    return b, nq, nk, case.hq, case.hq if case.hk is None else case.hk, case.d, dv


def _shifted(t: Tensor, shift: int) -> Tensor:
    """Return t, or a copy that begins ``shift`` elements after the start of its storage."""
    if not shift:
        return t
    storage = t.new_zeros(t.numel() + shift)
    storage[shift:] = t.flatten()
    return storage[shift:].view(t.shape)


def laid_out(normal: Any, layout: str, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers ``[B, N, H, D]`` with the strides of the layout."""
    b, n, h, d = shape
    if layout == "bhnd":
        return normal(b, h, n, d).transpose(1, 2)
    if layout == "sliced":  # a slice of more heads and channels, at an odd offset
        return normal(b, n, h + 2, d + 5)[:, :, 1 : h + 1, 3 : d + 3]
    if layout == "interleaved":  # one of three in the same memory, as from a fused projection
        return normal(b, n, h, 3, d)[:, :, :, 1]
    if layout == "strided":  # not even the last dimension is contiguous
        return normal(b, d, n, h, 2)[..., 0].permute(0, 2, 3, 1)
    if layout == "expanded":  # one sequence for the whole batch
        return normal(1, n, h, d).expand(b, n, h, d)
    return normal(b, n, h, d)


def _broadcast(
    fill: Any, pattern: str, shape: dict[str, int], case: Case, changed: Any = None
) -> Tensor:
    """Return ``changed(fill(*sizes))`` of a bias or a mask.

    A 1 or a capital of the pattern is a dimension of size 1; a capital is expanded afterwards.
    """
    sizes = [shape[letter] if letter.islower() else 1 for letter in pattern]
    if case.transposed and len(sizes) >= 2:
        sizes[-2:] = sizes[:-3:-1]
        t = fill(*sizes).transpose(-1, -2)
    else:
        t = fill(*sizes)
    t = t if changed is None else changed(t)
    full = [1 if letter == "1" else shape[letter.lower()] for letter in pattern]
    return t if full == list(t.shape) else t.expand(full)


def shape_of(pattern: str | None, case: Case) -> tuple[int, int, int, int] | None:
    """Return the shape ``[B|1, Hq|1, Nq|1, Nk|1]`` of a pattern."""
    if pattern is None:
        return None
    b, nq, nk, hq, *_ = sizes_of(case)
    full = {"b": b, "h": hq, "q": nq, "k": nk, "1": 1}
    return tuple(full[letter.lower()] for letter in pattern.rjust(4, "1"))  # pyright: ignore


def _mask(
    case: Case, generator: torch.Generator, shape: dict[str, int], device: str | torch.device
) -> Mask | Tensor | None:
    b, nq, nk = shape["b"], shape["q"], shape["k"]
    parts: list[Mask | Tensor] = []

    def ids(high: int, *sizes: int) -> Tensor:
        t = torch.randint(high, sizes, generator=generator, device=generator.device)
        return t.to(device)

    if case.left is not None or case.right is not None:
        parts.append(_window(case.left, case.right))
    if case.documents is not None:
        several = {"batched": (b, nk), "queries": (b, nk)}
        k_ids = ids(3, *several.get(case.documents, (nk,)))
        if case.documents in ("sorted", "batched"):
            k_ids = k_ids.sort(-1)[0]
        elif case.documents == "runs":
            k_ids = k_ids[::RUN].repeat_interleave(RUN)[:nk]
        own = case.documents == "queries" or nq > nk or case.align == "lengths"
        # some queries have an id that no key has
        q_ids = ids(4, nq) if own else None
        if case.documents == "offsets":
            cu = ids(nk + 1, 2).sort()[0]
            cu = torch.cat([cu.new_zeros(1), cu, cu.new_full((1,), nk)])
            parts.append(rowmax.Documents(cu_seqlens=cu, q_ids=q_ids))
        else:
            parts.append(rowmax.Documents(k_ids, q_ids=q_ids))
    if case.lengths is not None:
        some = [round(nk * case.lengths[n % len(case.lengths)]) for n in range(b)]
        lengths = torch.tensor(some, dtype=torch.int32, device=device)
        parts.append(rowmax.PrefixLengths(lengths, align=case.align))
    if case.prefix is not None:
        some = [round(nk * case.prefix[n % len(case.prefix)]) for n in range(b)]
        parts.append(rowmax.Prefix(torch.tensor(some, dtype=torch.int32, device=device)))
    if case.step is not None:
        parts.append(rowmax.Dilated(case.step))
    if case.padding is not None:
        hidden, starts = ids(2, b, nk) == 0, ids(nk + 1, b)
        if case.padding == "left":
            hidden = torch.arange(nk, device=device) < starts[:, None]
        padding = case.padding == "starts"
        parts.append(rowmax.LeftPadding(starts) if padding else rowmax.KeyPadding(hidden))
    if case.allowed is not None:

        def allow(*sizes: int) -> Tensor:
            t = torch.rand(sizes, generator=generator, device=generator.device) < 0.7
            return _shifted(t.to(device), case.shift)

        allowed = _broadcast(allow, case.allowed, shape, case, partial(_with_rectangles, case=case))
        if not parts:
            return allowed
        parts.append(allowed)
    if not parts:
        return None
    mask = as_mask(parts[0])
    for part in parts[1:]:
        mask = mask & part
    return mask


def _window(left: int | None, right: int | None) -> Mask:
    if any(n is not None and n < 0 for n in (left, right)):  # ``Window`` raises
        return rowmax.Mask(left=left, right=right)
    return rowmax.Window(left, right)


def _with_rectangles(allowed: Tensor, case: Case) -> Tensor:
    """Forbid and allow whole rectangles, so that there are tiles to skip and full tiles."""
    if allowed.dim() >= 2 and min(allowed.shape[-2:]) > 1:
        rows, cols = allowed.shape[-2] // 2, allowed.shape[-1] // 2
        allowed[..., :rows, cols:] = False
        allowed[..., rows:, :cols] = True
    if case.empty_rows and allowed.dim() >= 2:
        if allowed.shape[-2] > 1:
            allowed[..., ::7, :] = False
        else:
            allowed[:1] = False
    return allowed
