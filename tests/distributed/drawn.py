"""Random calls across ranks: what one device's calls vary, and how ranks share a call."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ranks import Rank
from rowmax.distributed import Layout
from rowmax.distributed.strategies import STRATEGIES
from rowmax.testing import Answer, Call, Case, Expected, complaints, expected, poisoned, refusal
from tests.drawn import (
    MORE,
    Drawn,
    RefusedError,
    draw_group,
    from_json,
    given_cotangents,
    is_clear,
    siblings,
    together,
    varied,
)

from .programs import LAYOUTS, copies, heads_apart, in_stages
from .rows import joined, prepared

#: in the errors of calls that are not distributed, or that the named backend does not take
REFUSED = (
    "no position aligned to the lengths",
    "one row on every rank, each with one query",
    "backend: got",
)
DTYPES = ("bfloat16", "float16", "float32", "float64")
#: bounds of chunks are multiples of one of these
_UNITS = (1, 1, 8, 64, 128)
#: packed calls across ranks take no other masks than a band, and no bias or dropout
_PACKED: dict[str, Any] = {
    "bias": None,
    "allowed": None,
    "dropout": 0.0,
    "lengths": None,
    "prefix": None,
    "align": "keys",
    "step": None,
    "padding": None,
    "documents": None,
    "max_given": False,
}


@dataclass(frozen=True)
class Spread:
    """A call, and how ranks share it."""

    drawn: Drawn
    queries: str  # the text of a layout
    keys: str
    strategy: str
    heads: int = 1  # the second dimension of a mesh; 1 for none
    stages: int = 1
    apart: bool = False  # heads arrive one after the other
    reduced: bool = False  # gradients of replicated inputs are summed
    way: str = ""  # how rows are copied, "shared" or "collectives"; "" as the device has it
    backend: str | None = None

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return Layout.parse(self.queries), Layout.parse(self.keys)

    def as_json(self) -> str:
        shared = {name: x for name, x in asdict(self).items() if name != "drawn"}
        return json.dumps({"call": self.drawn.as_json(), **shared})


def spread_of(text: str) -> Spread:
    """Return the call of a text of ``Spread.as_json``."""
    given = json.loads(text)
    return Spread(from_json(given.pop("call")), **given)


# --- drawing -------------------------------------------------------------------------------------


def spreads(
    seed: int, ranks: int, dtype: str, kinds: tuple[str | None, ...], budget: int, calls: int = 4
) -> Iterator[Spread]:
    """Yield calls of one group, each before and after calls that differ in one thing.

    ``kinds`` are the backends of the calls; "hopper" and None draw what its kernels take.
    """
    rng = random.Random(f"{seed} {ranks} {dtype}")
    backend = rng.choice(kinds)
    case = draw_group(rng, dtype, backend or "hopper", budget)
    for n in range(calls):
        case = varied(rng, case, budget) if n else case
        one = Drawn(shareable(case), dtype, rng.randrange(2**31))
        first = spread(rng, one, ranks, backend)
        for other in siblings(rng, one, DTYPES, 2):
            same = replace(other, case=shareable(other.case))
            if rows_of(same.case) == rows_of(one.case):  # then its layouts are the same
                yield replace(first, drawn=same)
        yield first
        yield replace(first, strategy=rng.choice(strategies(first)))


def shareable(case: Case) -> Case:
    """Return the case without what calls across ranks do not take."""
    case = replace(case, positions=None)
    if case.sequences is None:
        return case
    case = replace(case, **_PACKED)
    if case.causal or case.alibi or case.left is not None or case.right is not None:
        case = replace(case, sequences=tuple((k, k) for _, k in case.sequences))
    return case


def spread(rng: random.Random, drawn: Drawn, ranks: int, backend: str | None) -> Spread:
    """Return a call with a random way of sharing it."""
    rows, cuts = rows_of(drawn.case), [_cu(drawn.case, n) for n in range(2)]
    queries = layout(rng, rows[0], ranks, cuts[0])
    same = rows[0] == rows[1] and cuts[0] == cuts[1] and rng.random() < 0.7
    keys = queries if same else layout(rng, rows[1], ranks, cuts[1])
    found = Spread(
        drawn,
        queries.text,
        keys.text,
        strategy="keys",
        heads=rng.choice((1, 1, 2)) if ranks % 2 == 0 and ranks > 2 else 1,
        # those that change how a call is planned forget the plans of calls before
        stages=rng.choice((1, 1, 1, 1, 2, 3)),
        apart=rng.random() < 0.3,
        reduced=rng.random() < 0.3,
        way=rng.choice(("", "", "", "", "shared", "collectives")),
        backend=backend,
    )
    return replace(found, strategy=rng.choice(strategies(found)))


def rows_of(case: Case) -> list[int]:
    """Return the numbers of queries and keys that ranks share."""
    if case.sequences is None:
        return [case.nq, case.nq if case.nk is None else case.nk]
    return [sum(pair[n] for pair in case.sequences) for n in range(2)]


def strategies(one: Spread) -> tuple[str, ...]:
    """Return the strategies of a call; keys more often than the others."""
    others = [name for name in STRATEGIES if name != "heads" or one.heads == 1]
    return ("auto", "keys", "keys", *others)


def _cu(case: Case, side: int) -> tuple[int, ...] | None:
    """Return the offsets of packed sequences; ``side``: 0 for queries, 1 for keys."""
    if case.sequences is None:
        return None
    return tuple(accumulate((pair[side] for pair in case.sequences), initial=0))


def layout(rng: random.Random, n: int, ranks: int, cu: tuple[int, ...] | None) -> Layout:
    """Return a layout: one that users choose, or any pieces for any ranks."""
    kind = rng.choice((*LAYOUTS, *["pieces"] * len(LAYOUTS), *["documents"] * (2 if cu else 0)))
    if kind == "documents":
        assert cu is not None
        return Layout.documents(cu, ranks)
    if kind != "pieces":
        return LAYOUTS[kind](n, ranks)
    unit = rng.choice(_UNITS)
    starts = range(unit, n, unit)
    cuts = sorted(rng.sample(starts, min(len(starts), rng.choice((1, 2, 3, 5, 9)))))
    owned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in zip([0, *cuts], [*cuts, n], strict=True):
        owned[rng.randrange(ranks)].append((start, stop))
    return Layout(tuple(map(tuple, owned)))


# --- what ranks run ------------------------------------------------------------------------------


def judged(rank: Rank, one: Spread) -> tuple[str, list[str]]:
    """Return the kind of a call's result (right, wrong or refused), and what it says."""
    try:
        texts = wrong(rank, one)
    except RefusedError as error:
        return "refused", [str(error)]
    return ("wrong" if texts else "right"), texts


def wrong(rank: Rank, one: Spread) -> list[str]:
    """Return what breaks the rule, on the first rank; nothing if all is right.

    As ``tests.drawn.wrong``: a call that breaks it runs with more numbers.

    Raises:
        RefusedError: the call is not distributed.
    """
    found = [_compared(rank, one, one.drawn.seed)]
    texts = _told(rank, complaints(*found[0]) if found[0] else [])
    if not texts or any(map(is_clear, texts)):
        return texts
    for more in MORE:
        first = one.drawn.seed + len(found)
        found += [_compared(rank, one, seed) for seed in range(first, first + more)]
        texts = _told(rank, together([pair for pair in found if pair]))
        if not texts:
            break
    return texts


def _told(rank: Rank, texts: list[str]) -> list[str]:
    """Return what the first rank has found, on every rank."""
    told: list[Any] = [texts]
    dist.broadcast_object_list(told, 0, device=rank.device)
    return told[0]


def _compared(rank: Rank, one: Spread, seed: int) -> tuple[Answer, Expected] | None:
    """Return the answer and its references on the first rank, None on the others.

    Two calls of other values come before: a copy that is missing would leave those.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    drawn = replace(one.drawn, seed=seed)
    call = drawn.call(rank.device)
    if reason := refusal(call, one.backend):
        raise RefusedError(reason)
    given = given_cotangents(call, seed)
    more: dict[str, Any] = {"strategy": one.strategy, "backend": one.backend}
    more |= {"reduce_replicated": one.reduced}
    if one.heads > 1:
        more["mesh"] = _mesh(rank, one.heads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(poisoned(drawn.case.deterministic))
        if one.stages > 1:
            stack.enter_context(in_stages(one.stages))
        if one.apart:
            stack.enter_context(heads_apart())
        if one.way:
            stack.enter_context(copies(one.way))
        own = _answer(rank, call, one.layouts, more, given)
    got = joined(call, one.layouts, rank.rank, own, one.reduced)
    return (got, expected(call, *given)) if rank.rank == 0 else None


def _answer(
    rank: Rank,
    call: Call,
    layouts: tuple[Layout, Layout],
    more: dict[str, Any],
    given: tuple[Tensor, Tensor | None],
) -> Answer:
    try:
        answer = prepared(rank, call, layouts, more, given)
        for factor in (-0.5, 2.0):
            answer(factor)
        return answer()
    except ValueError as error:
        if not any(text in str(error) for text in REFUSED):
            raise
        raise RefusedError(str(error)) from error


def _mesh(rank: Rank, heads: int) -> Any:
    """Return a mesh of all ranks whose second dimension distributes heads, made once."""
    meshes = rank.kept.setdefault("meshes", {})
    shape = rank.size // heads, heads
    if shape not in meshes:
        names = ("keys", "heads")
        meshes[shape] = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
    return meshes[shape]
