"""Agreement of ranks on the arguments of a call, before its first collective.

A rank with other arguments would wait for rows that never come. The first call of each kind
compares its facts across ranks, and all raise the same error. A rank whose arguments are invalid
takes part with its error. Later calls of a kind compare nothing: if one rank then raises alone, the
others raise after the time limit of the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..call.inputs import Wanted
from ..errors import bad
from .calls import ShardedCall
from .collectives import all_objects
from .groups import Group
from .layout import Layout

_ERROR = "error"


class Kind(NamedTuple):
    """Hold what ranks have agreed on for calls of a kind, and what this rank has planned."""

    facts: dict[str, str]
    plans: dict[Any, Any]


#: by group, because its ranks see the same kinds in the same order
_agreed: dict[Group, dict[Any, Kind]] = {}
_LIMIT = 4096


def agreed(call: ShardedCall, wanted: Wanted | None = None) -> ShardedCall:
    """Return the call with what its ranks agreed on; compare its facts if its kind is new.

    Raises:
        ValueError: naming the arguments in which ranks differ, on every rank.
    """
    alike = [None if t is None else (t.dtype, t.shape) for t in call.tensors]
    options = call.options._replace(scale=float(call.options.scale))
    key = call.place, options, wanted, call.tensors.q.device, *alike
    kind = agree(key, call.group, lambda: _facts(call, wanted))
    rows = kind.facts["rows of bias"]
    if rows == "either" and call.place.reduce_replicated and wanted is not None and wanted.bias:
        want = "reduce_replicated=False: own rows and one row for all cannot be distinguished"
        raise bad("bias", "one row on every rank, each with one query", want)
    return call._replace(bias_rows=rows, mask_rows=kind.facts["rows of mask"], plans=kind.plans)


def agree(key: Any, group: Group, facts: Callable[[], dict[str, str]]) -> Kind:
    """Return what ranks agree on for a kind: the facts, with "either" decided by other ranks.

    Raises:
        ValueError: naming the arguments in which ranks differ, on every rank.
    """
    known = _agreed.setdefault(group, {})
    found = known.get(key)
    if found is None:
        if len(known) >= _LIMIT:
            known.clear()
        found = known[key] = Kind(_compared(all_objects(facts(), group)), {})
    return found


def refuse_together(group: Group, error: Exception) -> NoReturn:
    """Raise the error of this rank's arguments, after other ranks have received it.

    An error while compiling is the same on every rank.
    """
    if group.size > 1 and not torch.compiler.is_compiling():
        all_objects({_ERROR: str(error)}, group)
    raise error


def _compared(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    errors = {rank: facts[_ERROR] for rank, facts in enumerate(each) if _ERROR in facts}
    if errors:
        rank, text = next(iter(errors.items()))
        raise ValueError(f"rowmax.distributed: rank {rank} refused this call: {text}")
    agreed, wrong = {}, []
    names = dict.fromkeys(name for facts in each for name in facts)
    if len({facts["call"] for facts in each}) > 1:
        names = {"call": None}  # other functions have other arguments
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(each):
            values.setdefault(facts.get(name, "no such argument"), []).append(rank)
        if len(values) > 1:
            values.pop("either", None)
        agreed[name] = next(iter(values))
        if len(values) > 1:
            got = " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            wrong.append(f"{name}: got {got}; want the same on every rank")
    if wrong:
        raise ValueError("rowmax.distributed: ranks differ. " + ". ".join(wrong))
    return agreed


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def digest(layout: Layout) -> str:
    """Return a layout in few words."""
    lengths = str(list(layout.lengths[:8]))[:-1] + (", ...]" if layout.ranks > 8 else "]")
    return f"a layout of lengths {lengths} ({_sha(layout.text)})"


def _short(documents: str) -> str:
    """Return offsets in few words."""
    count = documents.count(",")
    return f"those of {count} documents ({_sha(documents)})" if documents else ""


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _facts(call: ShardedCall, wanted: Wanted | None) -> dict[str, str]:
    """Return what all ranks of a call have in common, by the argument that says it."""
    t, o, place = call.tensors, call.options, call.place
    batch, n, hq, d = t.q.shape
    hk, dv = t.k.shape[2], t.v.shape[3]
    facts = {
        "call": "forward" if wanted is None else "backward",
        "dtype": str(t.q.dtype),
        "batch": str(batch),
        "heads": f"{hq} of q and {hk} of k",
        "head size": f"{d} and {dv}",
        "layout": digest(call.queries),
        "k_layout": digest(call.keys),
        "band of mask": f"left={o.left}, right={o.right}, align={o.align!r}",
        "mask": _features(call),
        "offsets of documents": _short(place.documents) or "not known to the host",
        "rows of mask": _rows(t.allowed, n),
        "rows of bias": _rows(t.bias, n),
        "scale": str(o.scale),
        "softcap": str(o.softcap),
        "dropout_p": str(o.dropout_p),
        "seed": "None" if place.drawn else _given(t.seed),
        "sink": _given(t.sink),
        "head terms": o.head_terms or "none",
        "deterministic": str(o.deterministic),
        "backend": repr(o.backend),
        "strategy": repr(place.strategy),
        "reduce_replicated": str(place.reduce_replicated),
    }
    for name, tensor in (("mask", t.allowed), ("bias", t.bias)):
        if tensor is not None:
            b, h, _, j = tensor.shape
            facts[f"shape of {name}"] = f"[{b}, {h}, rows, {j}]"
    if wanted is not None:
        facts["requires_grad of k or v"] = str(wanted.k or wanted.v)
        if place.reduce_replicated:
            replicated = (wanted.bias, wanted.sink, wanted.heads)
            facts["requires_grad of bias, sink, head terms"] = str(replicated)
    return facts


def _features(call: ShardedCall) -> str:
    t = call.tensors
    given = {
        "documents": t.k_ids if t.k_ids is not None else call.place.documents or None,
        "lengths": t.lengths,
        "prefix": t.prefix,
        "boolean tensor": t.allowed,
    }
    return " and ".join(name for name, one in given.items() if one is not None) or "none"


def _given(t: Tensor | None) -> str:
    return "none" if t is None else "a tensor"


def _rows(t: Tensor | None, n: int) -> str:
    """Return "one" for one row that serves all queries, "own" for a row of each own query."""
    if t is None:
        return "none"
    if t.shape[2] != 1:
        return "own"
    return "either" if n == 1 else "one"
