"""One table of cases for every backend: each feature alone, and every pair that interacts.

``CASES`` is the table, ``COVERING`` the part of it that meets every pair of features, for dtypes
and devices that cannot afford all. ``make`` turns a case into a call with fresh random numbers.
Sizes are for two cores: 150 rows cross tiles of 64 and of 128. ``make(..., size=8)`` asks the
same of a GPU at eight times the length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

import rowmax
from rowmax.call.check import Arguments
from rowmax.call.inputs import Tensors
from rowmax.call.normalize import normalized
from rowmax.call.problem import Problem, problem_of
from rowmax.masks import Mask, as_mask

LEAVES = ("q", "k", "v", "bias", "sink")


@dataclass(frozen=True)
class Case:
    """One call, described: shapes and features."""

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
    documents: str | None = None  # sorted, unsorted, batched, queries (their own ids), offsets
    lengths: tuple[float, ...] | None = None  # fractions of nk, taken in turn by the batch
    align: str = "keys"  # of positions, to the keys or to the lengths
    #: of "bhqk", 1 where it broadcasts, a capital where it is expanded; fewer letters, fewer dims
    allowed: str | None = None
    empty_rows: bool = False  # the boolean mask forbids some rows (or sequences) everything
    bias: str | None = None  # as for allowed
    bias_float32: bool = False  # whatever the dtype of q
    alibi: bool = False
    softcap: float = 0.0
    sink: bool = False
    dropout: float = 0.0
    #: bnhd, bhnd, sliced, interleaved, strided, expanded: the strides; "a/b/c" for q, k and v
    layout: str = "bnhd"
    dout: str = "bnhd"  # the layout of the cotangent of out
    transposed: bool = False  # bias and boolean mask have queries, not keys, side by side
    shift: int = 0  # elements by which q, k, v, bias, mask and sink lie off an aligned address
    sequences: tuple[tuple[int, int], ...] | None = None  # packed: (queries, keys) of each
    max_given: bool = False  # a packed call told a bound on its lengths, not the exact ones
    wide_offsets: bool = False  # the packed offsets are int64
    grads: tuple[str, ...] | None = None  # the leaves whose gradients are wanted; None for all
    dlse: bool = True  # lse has a cotangent as well
    deterministic: bool = False

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """A case with its numbers: what to call, and what the reference is called with."""

    case: Case
    inputs: tuple[Tensor, ...]  # q, k, v and, packed, the offsets and longest lengths
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **overrides: Any) -> Any:
        """(out, lse) of ``rowmax.attention`` or ``attention_varlen``."""
        function = rowmax.attention_varlen if self.case.packed else rowmax.attention
        return function(*self.inputs, **{"return_lse": True, **self.keywords, **overrides})

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs whose gradients are wanted."""
        q, k, v = self.inputs[:3]
        named = {"q": q, "k": k, "v": v, **self.keywords}
        wanted = LEAVES if self.case.grads is None else self.case.grads
        return {n: named[n] for n in LEAVES if named.get(n) is not None and n in wanted}

    def with_leaves(self, leaves: dict[str, Tensor]) -> Call:
        """The same call over other tensors for some of its leaves."""
        named = dict(zip("qkv", self.inputs, strict=False))
        first = tuple(leaves.get(name, t) for name, t in named.items())
        others = {name: t for name, t in leaves.items() if name not in named}
        return replace(self, inputs=first + self.inputs[3:], keywords={**self.keywords, **others})

    def problem(self) -> tuple[Problem, Tensors]:
        """What a backend is given, always with a batch dimension."""
        given = {"causal": False, "mask": None, **_DEFAULTS, **self.keywords}
        mask = as_mask(given.pop("mask"))
        mask = mask & rowmax.Causal() if given.pop("causal") else mask
        if self.case.packed:
            given |= {"cu_seqlens": self.inputs[3:5], "max_seqlens": self.inputs[5:7]}
        tensors, options, _ = normalized(Arguments(*self.inputs[:3], mask=mask, **given))
        return problem_of(tensors, options), tensors


_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "alibi": None,
    "scale": None,
    "softcap": 0.0,
    "sink": None,
    "dropout_p": 0.0,
    "seed": None,
    "deterministic": False,
    "backend": None,
}


# --- numbers for a case ------------------------------------------------------------------------


def make(
    case: Case,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | int = 0,
    size: int = 1,
) -> Call:
    """Fresh random numbers for a case; every length ``size`` times what the table says."""
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
    """b, nq, nk, hq, hk, d, dv; of a packed case the number of sequences and the longest."""
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
    """t, or a copy in a storage of its own that begins ``shift`` elements before it."""
    if not shift:
        return t
    storage = t.new_zeros(t.numel() + shift)
    storage[shift:] = t.flatten()
    return storage[shift:].view(t.shape)


def laid_out(normal: Any, layout: str, shape: tuple[int, ...]) -> Tensor:
    """Random ``[B, N, H, D]`` with the strides that the layout asks for."""
    b, n, h, d = shape
    if layout == "bhnd":
        return normal(b, h, n, d).transpose(1, 2)
    if layout == "sliced":  # heads and channels cut out of more, at an odd offset
        return normal(b, n, h + 2, d + 5)[:, :, 1 : h + 1, 3 : d + 3]
    if layout == "interleaved":  # one of three that share memory, as of a fused projection
        return normal(b, n, h, 3, d)[:, :, :, 1]
    if layout == "strided":  # not even the last dimension is contiguous
        return normal(b, d, n, h, 2)[..., 0].permute(0, 2, 3, 1)
    if layout == "expanded":  # one sequence for all of the batch
        return normal(1, n, h, d).expand(b, n, h, d)
    return normal(b, n, h, d)


def _broadcast(
    fill: Any, pattern: str, shape: dict[str, int], case: Case, changed: Any = None
) -> Tensor:
    """``fill(*sizes)`` of a bias or a mask, then ``changed``: a 1 or a capital has one slice,
    which a capital expands."""
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
    """``[B|1, Hq|1, Nq|1, Nk|1]`` of a pattern."""
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
        own = case.documents == "queries" or nq > nk or case.align == "lengths"
        # of queries with ids of their own some have one that no key has
        q_ids = ids(4, nq) if own else None
        if case.documents == "offsets":
            cu = ids(nk + 1, 2).sort()[0]
            cu = torch.cat([cu.new_zeros(1), cu, cu.new_full((1,), nk)])
            parts.append(rowmax.Documents(cu_seqlens=cu, q_ids=q_ids))
        else:
            parts.append(rowmax.Documents(k_ids, q_ids=q_ids))
    if case.lengths is not None:
        taken = [round(nk * case.lengths[n % len(case.lengths)]) for n in range(b)]
        lengths = torch.tensor(taken, dtype=torch.int32, device=device)
        parts.append(rowmax.PrefixLengths(lengths, align=case.align))
    if case.allowed is not None:

        def allow(*sizes: int) -> Tensor:
            t = torch.rand(sizes, generator=generator, device=generator.device) < 0.7
            return _shifted(t.to(device), case.shift)

        allowed = _broadcast(allow, case.allowed, shape, case, partial(_tiled, case=case))
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
    if any(n is not None and n < 0 for n in (left, right)):  # which ``Window`` does not take
        return rowmax.Mask(left=left, right=right)
    return rowmax.Window(left, right)


def _tiled(allowed: Tensor, case: Case) -> Tensor:
    """Some rectangles all forbidden and all allowed, so that tiles are skipped and full."""
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


# --- the table ---------------------------------------------------------------------------------


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few rows in which every two values of different factors meet (greedy, the same always)."""
    choice = random.Random(0)
    names = list(factors)
    index = {name: range(len(factors[name])) for name in names}
    missing = {(a, x, b, y) for a, b in combinations(names, 2) for x in index[a] for y in index[b]}
    rows = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        others = [name for name in names if name not in row]
        choice.shuffle(others)
        for name in others:
            row[name] = max(index[name], key=lambda v: _meets(missing, names, row, name, v))
        missing -= {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}
        rows.append({name: factors[name][value] for name, value in row.items()})
    return rows


def _meets(missing: set, names: list[str], row: dict[str, int], name: str, value: int) -> int:
    """How many missing pairs a value would meet in a row that is being filled."""
    pairs = (
        (name, value, other, v)
        if names.index(name) < names.index(other)
        else (other, v, name, value)
        for other, v in row.items()
    )
    return sum(pair in missing for pair in pairs)


def _named(options: dict[str, Any], prefix: str) -> Case:
    """A case whose name tells what in it is not the default."""
    default = {f.name: f.default for f in fields(Case)}
    changed = {k: v for k, v in options.items() if v != default[k]}
    texts = [k if v is True else f"{k}={_short(v)}" for k, v in changed.items()]
    return Case("-".join([prefix, *texts]), **changed)


def _short(value: Any) -> str:
    return str(len(value)) if isinstance(value, tuple) else str(value)


def _crossed(prefix: str, rows: list[dict[str, Any]]) -> list[Case]:
    flat = [{k: v for part in row.values() for k, v in part.items()} for row in rows]
    return [_named(options, f"{prefix}{n}") for n, options in enumerate(flat)]


_OFF: dict[str, Any] = {}
_HEADS = ({"hq": 4}, {"hq": 4, "hk": 2}, {"hq": 3, "hk": 1})
_SCORES: dict[str, tuple[dict[str, Any], ...]] = {
    "bias": (_OFF, *({"bias": p} for p in ("bhqk", "1hqk", "b11k", "11q1"))),
    "alibi": (_OFF, {"alibi": True}),
    "softcap": (_OFF, {"softcap": 1.5}),
    "sink": (_OFF, {"sink": True}),
    "dropout": (_OFF, {"dropout": 0.2}),
    "scale": (_OFF, {"scale": 0.5}),
}

PAIRS = _crossed(
    "pair",
    pairwise(
        {
            **_SCORES,
            "band": (
                _OFF,
                {"causal": True},
                {"left": 40, "right": 9},
                {"left": 70, "causal": True},
                {"right": 20},
            ),
            "documents": (_OFF, {"documents": "sorted"}, {"documents": "unsorted"}),
            "lengths": (_OFF, {"lengths": (0.6, 1.0, 0.0)}),
            "allowed": (
                _OFF,
                {"allowed": "bhqk", "empty_rows": True},
                {"allowed": "11qk"},
                {"allowed": "b11k"},
            ),
            "heads": _HEADS,
            "sizes": ({"d": 32}, {"d": 33, "dv": 16}, {"d": 64}),
            "rows": (
                {"b": 2, "nq": 96},
                {"b": 1, "nq": 70, "nk": 150},
                {"b": 3, "nq": 150, "nk": 71},
            ),
            "layout": (_OFF, {"layout": "bhnd"}, {"layout": "sliced"}, {"layout": "expanded"}),
        }
    ),
)

PACKED_PAIRS = _crossed(
    "packedpair",
    pairwise(
        {
            **_SCORES,
            "band": (_OFF, {"causal": True}, {"left": 40, "right": 9}),
            "lengths": (_OFF, {"lengths": (0.6, 1.0, 0.0)}),
            "allowed": (_OFF, {"allowed": "bhqk", "empty_rows": True}, {"allowed": "111k"}),
            "heads": _HEADS,
            "sizes": ({"d": 32}, {"d": 33, "dv": 16}),
            "rows": (
                {"sequences": ((37, 37), (130, 130), (1, 1), (64, 64))},
                {"sequences": ((5, 90), (0, 17), (100, 70), (33, 0), (1, 40))},
            ),
            "layout": (_OFF, {"layout": "bhnd"}, {"layout": "sliced"}),
            "bound": (_OFF, {"max_given": True}),
        }
    ),
)

_BIASES = ["".join(p) for p in product("b1", "h1", "q1", "k1")] + ["hqk", "qk", "k"]
_MASKS = ["bhqk", "bh1k", "b1qk", "b11k", "1hqk", "11qk", "1h11", "b1q1", "b111", "hqk", "qk", "k"]
_LENGTHS = ((1, 1), (3, 3), (1, 200), (239, 1), (113, 203), (203, 113), (64, 64), (128, 256))
_HEAD_SIZES = ((1, 1), (7, 7), (8, 8), (33, 33), (64, 64), (80, 80), (96, 96), (128, 128))
_WIDE_SIZES = ((160, 160), (192, 128), (256, 256), (512, 512), (512, 8), (16, 64), (1, 40))

SINGLES = [
    Case("plain"),
    Case("causal", causal=True),
    Case("causal-deeper", b=1, nq=300, hq=2, d=64, causal=True),
    *(_named({"bias": p, "nq": 90, "nk": 140}, "bias") for p in _BIASES),
    Case("bias-float32", bias="1hqk", bias_float32=True),
    Case("bias-float32-causal-gqa", bias="bh1k", bias_float32=True, causal=True, hk=2),
    *(_named({"allowed": p, "nq": 90, "nk": 140}, "mask") for p in _MASKS),
    *(
        _named({"allowed": p, "empty_rows": True, "sink": s}, "mask")
        for p in ("bhqk", "11qk", "b11k", "11q1")
        for s in (False, True)
    ),
    Case("window-left", left=30),
    Case("window-right", right=30),
    Case("window-both", left=17, right=5),
    Case("window-none", left=0, right=0),
    Case("window-causal", left=64, causal=True),
    Case("window-causal-longer-keys", nq=90, nk=230, left=50, causal=True),
    Case("window-longer-queries", nq=230, nk=90, left=50, right=3),
    Case("documents-sorted", documents="sorted"),
    Case("documents-unsorted", documents="unsorted"),
    Case("documents-batched", documents="batched"),
    Case("documents-queries", documents="queries"),
    Case("documents-causal", documents="batched", causal=True),
    Case("documents-longer-keys", nq=64, nk=150, documents="sorted", causal=True),
    Case("documents-longer-queries", nq=150, nk=64, documents="unsorted"),
    Case("lengths", b=3, lengths=(0.6, 0.0, 1.0)),
    Case("lengths-causal", b=3, nq=90, nk=140, lengths=(0.6, 0.0, 1.0), causal=True),
    Case("lengths-zero-sink", b=2, lengths=(0.0,), sink=True),
    Case("lengths-zero", b=2, lengths=(0.0,)),
    Case("alibi", alibi=True),
    Case("alibi-causal-longer-keys", nq=90, nk=140, alibi=True, causal=True),
    Case("softcap", softcap=1.5),
    Case("softcap-large", softcap=30.0, scale=1.0),
    Case("scale", scale=0.7),
    Case("scale-zero", scale=0.0),
    Case("scale-large", scale=3.0),  # rows of nearly one weight
    Case("sink", sink=True),
    Case("dropout", dropout=0.1),
    Case("dropout-half-gqa", dropout=0.5, hk=2, causal=True),
    Case("dropout-most", dropout=0.95),
    Case("gqa", hk=2),
    Case("mqa", hk=1),
    Case("gqa-odd-group", hq=6, hk=2),
    Case("gqa-one-query", nq=1, nk=150, hq=8, hk=2),
    *(_named({"nq": n, "nk": m}, "rows") for n, m in _LENGTHS),
    *(_named({"nq": n, "nk": m, "causal": True}, "rows") for n, m in _LENGTHS),
    *(_named({"d": d, "dv": dv, "nq": 70, "hq": 2}, "head") for d, dv in _HEAD_SIZES + _WIDE_SIZES),
    *(
        _named({"layout": layout, "hk": 2, "causal": True}, "strides")
        for layout in ("bhnd", "sliced", "interleaved", "strided", "expanded")
    ),
    Case("empty-queries", nq=0, nk=9, bias="bhqk", sink=True),
    Case("empty-keys", nq=9, nk=0, bias="bhqk"),
    Case("empty-keys-sink", nq=9, nk=0, sink=True, causal=True),
    Case("empty-batch", b=0, nq=9),
    Case("empty-both", nq=0, nk=0, causal=True),
]

_RAGGED = ((37, 37), (130, 130), (1, 1), (64, 64))
_UNEQUAL = ((5, 90), (0, 17), (100, 70), (33, 0), (1, 40))

PACKED = [
    Case("packed", sequences=_RAGGED),
    Case("packed-causal", sequences=_RAGGED, causal=True),
    Case("packed-unequal", sequences=_UNEQUAL),
    Case("packed-unequal-causal", sequences=_UNEQUAL, causal=True, hk=2),
    Case("packed-unequal-sink", sequences=_UNEQUAL, sink=True),
    Case("packed-window", sequences=_RAGGED, left=20, right=4),
    Case("packed-bound", sequences=_UNEQUAL, max_given=True, causal=True),
    *(
        _named({"sequences": _UNEQUAL, "bias": p}, "packed")
        for p in ("bhqk", "1hqk", "b11k", "1h11")
    ),
    Case("packed-mask", sequences=_UNEQUAL, allowed="b1qk", empty_rows=True),
    Case("packed-lengths", sequences=_UNEQUAL, lengths=(0.5, 1.0, 0.0)),
    Case("packed-dropout", sequences=_UNEQUAL, dropout=0.3, causal=True),
    Case("packed-alibi", sequences=_UNEQUAL, alibi=True),
    Case(
        "packed-many-small", sequences=tuple((n % 5, (n * 3) % 7) for n in range(40)), causal=True
    ),
    Case("packed-one", sequences=((150, 150),), causal=True),
    Case("packed-empty-ones", sequences=((0, 0), (0, 0))),
    Case("packed-none", sequences=()),
]

#: fractions of nk: fewer keys than queries, some, all, none, and more than there are
_CACHED: dict[str, Any] = {"align": "lengths", "lengths": (0.2, 0.7, 1.0, 0.0, 1.3), "b": 5}
_CACHES: dict[str, Any] = {**_CACHED, "nq": 70, "nk": 200, "hq": 2}

ALIGNED = [
    Case("aligned-causal", **_CACHES | {"hq": 4, "hk": 2}, causal=True, sink=True),
    Case("aligned-window", **_CACHES, left=40, right=9, softcap=1.5),
    Case("aligned-alibi", **_CACHES | {"hq": 4, "hk": 2}, alibi=True, right=3),
    Case("aligned-bias", **_CACHES, causal=True, bias="1hqk"),
    Case("aligned-dropout", **_CACHES, left=90, causal=True, dropout=0.2, bias="bhqk"),
    Case("aligned-documents", **_CACHES, causal=True, documents="queries", allowed="b11k"),
    Case("aligned-one-query", **_CACHES | {"nq": 1, "hq": 4, "hk": 1}, left=60, alibi=True),
    Case(
        "aligned-packed",
        **_CACHED,
        sequences=((40, 200), (64, 64), (5, 90), (9, 150), (100, 70)),
        hk=2,
        causal=True,
        bias="1h1k",
        alibi=True,
    ),
    Case(
        "aligned-packed-window",
        **_CACHED,
        sequences=((40, 90), (0, 17), (33, 0), (70, 64), (20, 130)),
        left=30,
        right=4,
        allowed="b1qk",
    ),
]

#: Masks with one slice for many heads, sequences, queries or keys: a map of their tiles has the
#: shape of the slice, and lists of tiles have those of documents and lengths as well.
EXPANDED = [
    Case("mask-expanded-documents", allowed="HQK", documents="queries", causal=True, hk=2),
    Case("mask-expanded-lengths", b=3, nq=90, nk=140, allowed="bHqk", lengths=(0.6, 0.0, 1.0)),
    Case("mask-expanded-rows", nq=90, nk=140, allowed="BhQk"),
    Case("packed-mask-expanded", sequences=_UNEQUAL, allowed="BHqk", causal=True),
]

CASES = SINGLES + PAIRS + PACKED + PACKED_PAIRS + ALIGNED + EXPANDED
COVERING = PAIRS + PACKED_PAIRS + ALIGNED

assert len({case.name for case in CASES}) == len(CASES), "names are unique"
