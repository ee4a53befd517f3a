"""The table of cases: each feature alone, every pair of features that interact, and more by tag.

``CASES`` run on every backend. ``COVERING`` is the part of them in which every pair of features
meets, for dtypes and devices with less time. ``tagged`` returns the cases of a tag:

* every backend: ``CASES``; 150 rows cross tiles of 64 and of 128
* covering: ``COVERING``
* odd lengths, long: lengths at the edges of tiles
* every head size: the features of the Hopper kernels with each of their tile shapes; those that
  only the backward distinguishes also have the tag gradients
* every barrier: small cases that wait on every barrier of the Hopper backward
* sanitizer: small cases for tools that watch every access; forward only: not of their backward
* repeats: each order in which a gradient is summed
* launches, two devices: one case for each kind of kernel arguments
* blocks: calls at positions of a longer one
* extreme biases: cases for biases and sinks as large as their dtype allows
* known faults: float32 calls that triton 3.6.0 compiled wrongly on an H200 or H100
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from itertools import combinations, product
from typing import Any

from .cases import Case


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return few rows in which every two values of different factors meet (greedy; seeded)."""
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
    """Return how many missing pairs a value adds to an unfinished row."""
    pairs = (
        (name, value, other, v)
        if names.index(name) < names.index(other)
        else (other, v, name, value)
        for other, v in row.items()
    )
    return sum(pair in missing for pair in pairs)


def _named(options: dict[str, Any], prefix: str, **more: Any) -> Case:
    """Return a case whose name says which options are not the default; ``more`` is not named."""
    default = {f.name: f.default for f in fields(Case)}
    changed = {k: v for k, v in options.items() if v != default[k]}
    texts = [k if v is True else f"{k}={_short(v)}" for k, v in changed.items()]
    return Case("-".join([prefix, *texts]), **changed, **more)


def _short(value: Any) -> str:
    return str(len(value)) if isinstance(value, tuple) else str(value)


def _over(options: dict[str, Any], name: str, **more: Any) -> Case:
    """Return a case of options that others replace."""
    return Case(name, **{**options, **more})


def _tag(cases: Iterable[Case], *tags: str) -> list[Case]:
    return [replace(case, tags=(*case.tags, *tags)) for case in cases]


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
    *(
        _named({"b": 5, "nq": 40, "hq": 2, "d": 32, "bias": "1hqk"} | more, "pairs")
        for more in (
            {},
            {"bias_float32": True},
            {"lengths": (0.6, 0.0, 1.0, 0.3, 0.9)},
            {"lengths": (0.6, 0.0, 1.0, 0.3, 0.9), "bias_float32": True, "sink": True},
        )
    ),
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
    Case("packed-group-of-six", sequences=_UNEQUAL, causal=True, hq=6, hk=1),
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

#: fractions of nk: fewer keys than queries, some, all, none, and more than nk
_CACHED: dict[str, Any] = {"align": "lengths", "lengths": (0.2, 0.7, 1.0, 0.0, 1.3), "b": 5}
_aligned = partial(_over, {**_CACHED, "nq": 70, "nk": 200, "hq": 2})
_aligned_packed = partial(_over, _CACHED)

ALIGNED = [
    _aligned("aligned-causal", hq=4, hk=2, causal=True, sink=True),
    _aligned("aligned-window", left=40, right=9, softcap=1.5),
    _aligned("aligned-alibi", hq=4, hk=2, alibi=True, right=3),
    _aligned("aligned-bias", causal=True, bias="1hqk"),
    _aligned("aligned-dropout", left=90, causal=True, dropout=0.2, bias="bhqk"),
    _aligned("aligned-documents", causal=True, documents="queries", allowed="b11k"),
    _aligned("aligned-one-query", nq=1, hq=4, hk=1, left=60, alibi=True),
    _aligned_packed(
        "aligned-packed",
        sequences=((40, 200), (64, 64), (5, 90), (9, 150), (100, 70)),
        hk=2,
        causal=True,
        bias="1h1k",
        alibi=True,
    ),
    _aligned_packed(
        "aligned-packed-window",
        sequences=((40, 90), (0, 17), (33, 0), (70, 64), (20, 130)),
        left=30,
        right=4,
        allowed="b1qk",
    ),
]

PADDED = [
    Case("padding", b=3, padding="any", sink=True),
    Case("padding-left", b=3, padding="left", causal=True, hk=2),
    Case("padding-starts", b=3, nq=90, nk=150, padding="starts", causal=True, sink=True),
    Case("padding-left-window", b=3, nq=90, nk=230, padding="left", left=60, causal=True),
    Case("padding-documents", b=3, padding="any", documents="batched", bias="1hqk"),
    Case("padding-longer-queries", b=3, nq=230, nk=90, padding="left", alibi=True),
    Case("padding-prefix", b=3, padding="left", prefix=(0.3, 0.8), bias="b11k"),
]

DILATED = [
    Case("dilated", step=3, sink=True),
    Case("dilated-causal", nq=90, nk=230, step=7, left=150, causal=True, hk=2),
    Case("dilated-longer-queries", nq=230, nk=90, step=64, alibi=True),
    Case("dilated-documents", b=3, step=2, documents="batched", padding="left", bias="1hqk"),
    _aligned("dilated-aligned", step=4, causal=True, bias="b11k"),
]

_prefix = partial(_over, {"b": 3, "prefix": (0.4, 0.0, 1.3)})

PREFIX = [
    _prefix("prefix"),
    _prefix("prefix-left", left=40, sink=True),
    _prefix("prefix-longer-keys", nq=90, nk=230, hk=2, bias="1hqk"),
    _prefix("prefix-longer-queries", nq=230, nk=90, bias="b11k", softcap=1.5),
    _prefix("prefix-one-query", nq=1, nk=150, hk=1, alibi=True),
    _prefix("prefix-lengths", lengths=(0.7, 1.0, 0.2), bias="bhqk"),
    _prefix("prefix-documents", documents="batched", alibi=True),
    _prefix("prefix-mask", allowed="11qk", empty_rows=True, dropout=0.2),
    _prefix("prefix-aligned", **_CACHED | {"b": 3, "nq": 70, "nk": 200, "left": 90}, alibi=True),
    Case("prefix-packed", sequences=_RAGGED, prefix=(0.3, 0.8, 0.0, 0.5), hk=2),
    Case("prefix-packed-unequal", sequences=_UNEQUAL, prefix=(0.5, 1.0), bias="1hqk", left=60),
]

#: Masks with one slice for many heads, sequences, queries or keys. The map of their tiles has the
#: shape of the slice; lists of tiles also have the shapes of documents and lengths.
EXPANDED = [
    Case("mask-expanded-documents", allowed="HQK", documents="queries", causal=True, hk=2),
    Case("mask-expanded-lengths", b=3, nq=90, nk=140, allowed="bHqk", lengths=(0.6, 0.0, 1.0)),
    Case("mask-expanded-rows", nq=90, nk=140, allowed="BhQk"),
    Case("packed-mask-expanded", sequences=_UNEQUAL, allowed="BHqk", causal=True),
]

#: keys as latent attention has them; no Triton kernel has heads as wide
_LATENT = [
    Case("latent", b=1, nq=150, nk=230, hq=4, hk=1, d=576, dv=512, causal=True, sink=True),
    Case("latent-packed", d=576, dv=512, hq=2, sequences=((70, 70), (0, 3), (9, 140)), left=90),
]

_EVERY_BACKEND = (
    *SINGLES,
    *_tag(PAIRS, "covering"),
    *PACKED,
    *_tag(PACKED_PAIRS, "covering"),
    *_tag(ALIGNED, "covering"),
    *_tag(PREFIX, "covering"),
    *_tag(PADDED, "covering"),
    *_tag(DILATED, "covering"),
    *EXPANDED,
)

# --- lengths and head sizes at the edges of tiles ----------------------------------------------

_ODD_LENGTHS = (
    *((1, 1), (3, 3), (64, 1), (239, 1), (799, 3), (1, 300), (113, 203), (108, 256)),
    *((1023, 1024), (1024, 1023)),
)


def _odd(lengths: Iterable[tuple[int, int]], heads: tuple[int, ...]) -> list[Case]:
    return [
        Case(f"odd-{n}-{m}-{d}{'-causal' * c}", b=1, nq=n, nk=m, hq=4, hk=2, d=d, causal=c)
        for n, m in lengths
        for d in heads
        for c in (False, True)
    ]


_TILE_SIZES = (
    *((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 72), (40, 40)),
    *((32, 32), (320, 264), (512, 512)),
)
_FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"left": 100, "right": 30},
    {"causal": True, "left": 70, "softcap": 20.0},
    {"causal": True, "sink": True, "alibi": True},
    {"causal": True, "documents": "sorted"},
    {"lengths": (0.3, 0.0), "sink": True},
    {"bias": "1hqk", "causal": True},
    {"bias": "b11k"},
    {"hk": 1, "causal": True},
)
#: features that only the backward distinguishes: each kind of bias gradient, with masks and groups
_GRADIENT_FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": True, "sink": True},
    {"bias": "bhqk"},
    {"hk": 2, "layout": "bhnd"},
    {"hk": 2, "bias": "b1qk", "causal": True},
    {"hk": 2, "bias": "11qk", "left": 100, "right": 30},
    {"hk": 2, "bias": "1hqk", "causal": True, "softcap": 20.0, "alibi": True},
    {"hk": 2, "bias": "1hqk", "lengths": (0.7, 0.2), "causal": True},
    {"hk": 2, "bias": "11qk", "documents": "batched", "left": 100},
    {"bias": "b1qk", "lengths": (0.0, 0.7)},
)


def _every_head_size(features: tuple[dict[str, Any], ...]) -> list[Case]:
    return [
        _named(f, f"wide-{d}-{dv}", nq=600, nk=728, d=d, dv=dv)
        for d, dv in _TILE_SIZES
        for f in features
    ]


_PACKED_LONG = ((5, 90), (0, 17), (300, 270), (33, 0), (1, 40), (700, 700))
_PACKED_WIDE = [
    Case(f"packed-{d}-{dv}{'-causal' * c}", d=d, dv=dv, sequences=_PACKED_LONG, causal=c, hk=2)
    for d, dv in _TILE_SIZES
    for c in (False, True)
]

# --- small cases that touch every part of a kernel ---------------------------------------------

_FIRST_SIZES = (
    (64, 128, 64, False),
    (64, 128, 128, False),
    (1, 1, 64, False),
    (64, 1, 128, True),
    (256, 256, 64, False),
    (256, 256, 128, True),
    (300, 520, 64, True),
    (520, 300, 128, False),
    (256, 256, 32, False),
    (300, 520, 32, True),
)
#: one tile of each kind, then several, then what changes the order of the tiles
_EVERY_BARRIER = [
    *(
        Case(f"first-{n}-{m}-{d}{'-causal' * c}", b=1, nq=n, nk=m, hq=1, d=d, causal=c)
        for n, m, d, c in _FIRST_SIZES
    ),
    Case("first-heads", b=3, nq=1000, hq=8, hk=2, d=128, causal=True),
    Case("first-window", nq=1000, nk=1100, hq=4, d=64, left=100, right=20),
    Case("first-lengths", b=2, nq=300, nk=500, d=128, lengths=(0.4, 0.0)),
    Case("first-packed", d=64, sequences=_PACKED_LONG, causal=True, hk=2),
    Case("first-shared-bias", d=64, nq=300, nk=328, hk=2, bias="1hqk", causal=True),
    Case(
        "first-shared-bias-lengths", d=64, nq=200, nk=328, hq=2, bias="1hqk", lengths=(0.7, 0.2)
    ),
    Case(
        "first-shared-bias-documents",
        d=64, nq=328, hk=2, bias="11qk", documents="sorted", causal=True,
    ),
    Case(
        "first-shared-bias-batched",
        b=3, d=64, nq=200, nk=328, hk=2, bias="1hqk", documents="batched", causal=True,
    ),
    Case("first-shared-bias-heads", nq=200, nk=328, hq=2, d=128, bias="b1qk", lengths=(0.0, 0.7)),
    Case("first-own-bias", nq=300, nk=328, hk=2, d=128, bias="bhqk", causal=True),
    Case("first-own-bias-lengths", nq=200, nk=328, hq=2, d=64, bias="bhqk", lengths=(0.4, 0.0)),
    Case("first-own-bias-window", nq=300, nk=328, hq=2, d=64, bias="bhqk", left=90, right=20),
    Case("first-own-bias-documents", nq=200, hq=2, d=64, bias="bhqk", documents="sorted"),
    Case("first-row-bias", nq=300, nk=331, hk=2, d=128, bias="b11k", causal=True),
    Case("first-row-bias-lengths", nq=100, nk=331, hq=2, d=64, bias="b11k", lengths=(0.7, 0.2)),
    Case("first-row-bias-wide", nq=150, nk=201, hq=2, d=256, bias="1h1k"),
    Case("first-column-bias", nq=131, nk=201, hq=2, d=64, bias="1hq1", sink=True),
    Case("first-softcap-sink", nq=500, d=128, softcap=20.0, sink=True, causal=True),
]  # fmt: skip

_SANITIZER = [
    *(
        Case(f"small-d{d}", b=1, nq=200, nk=330, hq=2, hk=1, d=d)
        for d in (64, 96, 128, 192, 256)
    ),
    *(Case(f"small-d{d}-causal", b=2, nq=300, hq=2, d=d, causal=True) for d in (64, 128, 256)),
    Case("small-d64-many", b=80, nq=8, nk=700, hq=2, d=64, causal=True),
    Case(
        "small-d128-window", b=1, nq=400, hq=2, d=128, left=100, right=20, softcap=20.0, sink=True
    ),
    Case("small-d128-bias", b=1, nq=256, hq=2, d=128, bias="1hqk"),
    Case("small-d64-bias-window", nq=300, nk=328, hq=2, d=64, bias="bhqk", left=90, right=20),
    Case("small-d64-bias-documents", nq=200, hq=2, d=64, bias="bhqk", documents="sorted"),
    Case("small-d192-bias", nq=200, nk=328, hq=2, d=192, bias="bhqk"),
    Case("small-d256-bias", nq=200, nk=328, hq=2, hk=1, d=256, bias="bhqk", causal=True),
    Case(
        "small-d192-128-bias", nq=200, nk=328, hq=2, d=192, dv=128, bias="bhqk", left=90, right=20
    ),
    Case("small-d64-shared-bias", nq=256, hq=2, d=64, bias="1hqk", causal=True),
    Case("small-d256-shared-bias", nq=200, nk=328, hq=2, hk=1, d=256, bias="1hqk"),
    Case(
        "small-d64-shared-bias-lengths", nq=200, nk=328, hq=2, d=64, bias="1hqk", lengths=(0.7, 0.2)
    ),
    Case("small-d128-shared-bias-documents", nq=264, hq=2, d=128, bias="11qk", documents="batched"),
    Case("small-d128-row-bias", nq=300, nk=331, hk=2, d=128, bias="b11k", causal=True),
    Case("small-d256-row-bias", nq=150, nk=201, hq=2, d=256, bias="1h1k"),
    Case("small-d64-column-bias", nq=131, nk=201, hq=2, d=64, bias="1hq1", sink=True),
    Case("small-d128-packed", hk=2, d=128, causal=True, sequences=((70, 130), (0, 17), (200, 150))),
    Case("small-d64-documents", nq=300, hq=2, d=64, causal=True, documents="sorted"),
    Case("small-d128-lengths", nq=100, nk=300, hq=2, d=128, lengths=(0.4, 0.0), alibi=True),
    # the noise of gradients needs all pairs of keys: too many of these
    Case("small-d64-long", b=80, nq=8, nk=4500, hq=2, d=64, causal=True, tags=("forward only",)),
]  # fmt: skip

_repeat = partial(_over, {"b": 4, "nq": 1000, "nk": 1100, "hq": 8, "hk": 2, "d": 64})
_REPEATS = [
    _repeat("repeat-causal", causal=True),
    _repeat("repeat-dropout", dropout=0.1, sink=True),
    _repeat("repeat-bias", bias="1hqk", causal=True),
    _repeat("repeat-bias-row", bias="b11k"),
    _repeat("repeat-bias-column", bias="1hq1"),
    _repeat("repeat-documents", documents="batched", causal=True),
    Case("repeat-packed", sequences=((300, 300), (0, 7), (1500, 1700)), causal=True, hk=2),
    _repeat("repeat-wide", d=256, causal=True),
]

_LAUNCHES = [
    Case("launch-causal", b=1, nq=150, hq=2, d=64, causal=True),
    Case("launch-bias", b=2, nq=100, nk=136, hq=2, d=64, bias="1hqk", sink=True),
    Case("launch-documents", b=1, nq=136, hq=2, d=64, documents="sorted", alibi=True),
    Case("launch-packed", hq=2, hk=1, d=64, causal=True, sequences=((5, 90), (0, 17), (70, 70))),
]

_TWO_DEVICES = [
    Case("devices-causal", nq=300, hk=2, d=64, causal=True),
    Case("devices-bias", nq=200, nk=328, hk=2, d=128, bias="1hqk", causal=True),
    Case("devices-row-of-heads", nq=200, nk=328, hk=2, d=64, bias="1h1k"),
    Case("devices-documents", nq=328, hk=2, d=64, documents="sorted", sink=True),
    Case("devices-wide", b=1, nq=200, nk=328, hq=2, d=256, causal=True),
    Case("devices-packed", hk=2, d=64, causal=True, sequences=((5, 90), (0, 17), (150, 270))),
]

# --- blocks of longer calls --------------------------------------------------------------------

_block = partial(_over, {"nq": 150, "nk": 200, "hk": 2, "d": 64})
_BLOCKS = [
    _block("block-causal", causal=True, positions=(-70, 0, 0, 0, 0)),
    _block("block-causal-before", causal=True, positions=(130, 0, 0, 0, 0)),
    _block("block-causal-after", causal=True, positions=(-1000, 0, 0, 0, 0)),
    _block("block-prefix", prefix=(0.6, 0.2), left=90, positions=(-70, 0, 0, 0, 0)),
    _block("block-prefix-after", prefix=(0.6, 0.2), positions=(500, 0, 0, 0, 0)),
    _block("block-window", left=40, right=9, positions=(33, 0, 0, 0, 0)),
    _block("block-documents", documents="sorted", causal=True, positions=(-40, 0, 0, 0, 0)),
    _block("block-alibi", alibi=True, positions=(-90, 0, 0, 0, 0)),
    _block("block-alibi-d128", d=128, alibi=True, causal=True, positions=(37, 0, 0, 0, 0)),
    _block("block-alibi-d256", d=256, alibi=True, softcap=5.0, positions=(-300, 0, 0, 0, 0)),
    _block("block-alibi-bias", d=128, alibi=True, bias="1hqk", left=90, positions=(9, 0, 0, 0, 0)),
    _block("block-alibi-own-bias", alibi=True, bias="bhqk", positions=(9, 0, 0, 0, 0)),
    _block("block-alibi-row", alibi=True, bias="b11k", causal=True, positions=(-33, 0, 0, 0, 0)),
    _block("block-alibi-wide-bias", d=256, alibi=True, bias="bhqk", positions=(70, 0, 0, 0, 0)),
    _block(
        "block-alibi-lengths", alibi=True, lengths=(1.0, 0.4), right=3, positions=(5, 0, 0, 0, 0)
    ),
    _block(
        "block-alibi-to-lengths",
        alibi=True, lengths=(1.0, 0.4), align="lengths", positions=(-50, 0, 0, 0, 0),
    ),
    _block(
        "block-packed",
        alibi=True, causal=True, positions=(-20, 0, 0, 0, 0),
        sequences=((5, 90), (0, 17), (100, 133), (33, 0), (70, 70)),
    ),
    _block("block-dropout", dropout=0.3, positions=(0, 77, 128, 3, 9)),
    _block("block-dropout-far", dropout=0.3, positions=(0, 2**31 - 200, 2**31 - 256, 1, 7)),
    _block(
        "block-dropout-alibi",
        dropout=0.3, alibi=True, causal=True, bias="11qk", positions=(60, 1000, 64, 0, 0),
    ),
    _block(
        "block-dropout-packed",
        dropout=0.3, positions=(0, 3, 64, 1, 1000), sequences=((64, 90), (0, 17), (70, 37)),
    ),
]  # fmt: skip

# --- extreme biases ----------------------------------------------------------------------------

_SHAPE: dict[str, Any] = {"b": 2, "nq": 70, "nk": 96, "hq": 4, "hk": 2, "d": 64}
_EXTREME_PACKED = ((40, 60), (0, 17), (70, 96), (33, 0), (64, 64))

_extreme = partial(_over, _SHAPE)
_EXTREME = [
    *(_extreme(f"extreme-full-{bias}", bias=bias) for bias in ("bhqk", "1hqk", "b1qk", "11qk")),
    _extreme("extreme-full-causal-sink", bias="bhqk", sink=True, causal=True, nq=104),
    _extreme("extreme-full-window", bias="11qk", left=30, right=9),
    _extreme("extreme-full-softcap-alibi", bias="bhqk", softcap=2.0, alibi=True),
    _extreme("extreme-full-deep", bias="bhqk", nq=150, nk=400, b=1),
    _extreme("extreme-full-wide", bias="bhqk", d=256, b=1),
    _extreme("extreme-full-few-rows", bias="bhqk", nq=1100, right=1050, b=1),
    _extreme("extreme-row", bias="b11k", b=8),
    _extreme("extreme-row-heads", bias="bh1k", b=8, hk=4),
    _extreme("extreme-row-causal-sink", bias="b11k", sink=True, causal=True, b=8, nq=104),
    _extreme("extreme-row-lengths", bias="b11k", lengths=(0.7, 0.2, 0.0), b=8),
    _extreme("extreme-row-wide", bias="b11k", b=8, d=256),
    _extreme("extreme-column", bias="bhq1"),
    _extreme("extreme-column-causal-sink", bias="1hq1", sink=True, causal=True, nq=104),
    _extreme("extreme-column-wide", bias="11q1", d=256, b=1),
    _extreme("extreme-sink", sink=True),
    _extreme("extreme-sink-causal", sink=True, causal=True, nq=104),
    _extreme("extreme-sink-packed", sink=True, causal=True, sequences=_EXTREME_PACKED),
    _extreme("extreme-packed-full", bias="bhqk", causal=True, sequences=_EXTREME_PACKED),
    _extreme("extreme-packed-row", bias="b11k", sink=True, sequences=_EXTREME_PACKED),
    _extreme("extreme-packed-column", bias="1hq1", causal=True, sequences=_EXTREME_PACKED),
    _extreme("extreme-full-mask-dropout", bias="bhqk", allowed="bhqk", dropout=0.2),
]

# --- known faults ------------------------------------------------------------------------------


def _fault(
    b: int, nq: int, hq: int, d: int, nk: int, hk: int, dv: int, name: str = "", **more: Any
) -> Case:
    text = f"fault [{b},{nq},{hq},{d}] nk={nk} hk={hk} dv={dv} {name}".strip()
    return Case(text, b=b, nq=nq, hq=hq, d=d, nk=nk, hk=hk, dv=dv, **more)


_KNOWN_FAULTS = [
    _fault(1, 64, 4, 40, 64, 1, 16),
    _fault(2, 33, 4, 32, 3, 2, 32),
    _fault(2, 64, 8, 8, 64, 2, 24),
    _fault(2, 64, 8, 16, 64, 2, 24),
    _fault(2, 64, 8, 8, 64, 8, 24),
    _fault(2, 64, 8, 8, 64, 2, 24, "causal", causal=True),
    _fault(1, 33, 8, 8, 33, 2, 24, "window-sink", left=0, right=0, sink=True),
    _fault(2, 520, 1, 128, 130, 1, 16, "alibi", alibi=True),
    _fault(2, 257, 8, 8, 130, 2, 128, "softcap", softcap=5.0),
    _fault(
        1, 33, 1, 16, 65, 1, 64, "causal-softcap-mask",
        causal=True, softcap=5.0, allowed="11qk",
    ),
    _fault(1, 2, 4, 80, 65, 1, 80, "causal", causal=True),
    _fault(1, 33, 8, 128, 1, 2, 128),
]  # fmt: skip

# --- the table ---------------------------------------------------------------------------------

TABLE = (
    *_tag(_EVERY_BACKEND, "every backend"),
    *_tag(_odd(_ODD_LENGTHS, (64, 128, 256)), "odd lengths"),
    *_tag(_odd(((4224, 4224),), (64, 128)), "long"),
    *_tag(_every_head_size(_FEATURES), "every head size"),
    *_tag(_every_head_size(_GRADIENT_FEATURES), "every head size", "gradients"),
    *_tag(_PACKED_WIDE, "every head size"),
    *_tag(_LATENT, "every head size", "latent"),
    *_tag(_EVERY_BARRIER, "every barrier"),
    *_tag(_SANITIZER, "sanitizer"),
    *_tag(_REPEATS, "repeats"),
    *_tag(_LAUNCHES, "launches"),
    *_tag(_TWO_DEVICES, "two devices"),
    *_tag(_BLOCKS, "blocks"),
    *_tag(_EXTREME, "extreme biases"),
    *_tag(_KNOWN_FAULTS, "known faults"),
)

assert len({case.name for case in TABLE}) == len(TABLE), "names are unique"


def tagged(*tags: str) -> list[Case]:
    """Return the cases with at least one of the tags, in the order of the table.

    Raises:
        ValueError: no case has such a tag.
    """
    known = {tag for case in TABLE for tag in case.tags}
    if unknown := set(tags) - known:
        raise ValueError(f"tag: got {', '.join(sorted(unknown))}; want {', '.join(sorted(known))}")
    return [case for case in TABLE if set(case.tags) & set(tags)]


CASES = tagged("every backend")
COVERING = tagged("covering")
