"""The ways to distribute a call, a module each."""

from __future__ import annotations

from types import ModuleType

from ...errors import bad
from ..calls import ShardedCall
from . import grid, heads, keys, queries

#: by name, the preferred ones first. Each module has ``forward`` and ``backward``
STRATEGIES: dict[str, ModuleType] = {"keys": keys, "heads": heads, "queries": queries}

_OF_TWO = "of a mesh of two dimensions, whose second one distributes heads"
#: keys for each query, from which on "auto" compares the bytes of "queries" with those of "keys"
FEW = 8


def chosen(name: object) -> str:
    """Return the name of a strategy; of "auto" that of most calls.

    Raises:
        ValueError: a name that is not there.
    """
    if name == "auto":
        return next(iter(STRATEGIES))
    if not isinstance(name, str) or name not in STRATEGIES:
        raise bad("strategy", repr(name), "one of " + ", ".join(map(repr, ("auto", *STRATEGIES))))
    return name


def module_of(call: ShardedCall) -> ModuleType:
    """Return the module that computes a call."""
    return grid if call.group.parts else STRATEGIES[call.place.strategy]


def selected(name: object, call: ShardedCall) -> str:
    """Return the name of the strategy of a call, the same on every rank.

    Raises:
        ValueError: the strategy does not compute the call.
    """
    axes = call.group.axes
    if name == "heads" and axes:
        raise bad("strategy", f"'heads' {_OF_TWO}", "'auto', 'keys' or 'queries', for the first")
    reason = unable("queries", call)
    if name == "queries" and reason is not None:
        others = "'auto' or 'keys'" if axes else "'auto', 'keys' or 'heads'"
        raise bad("strategy", f"'queries' ({reason})", others)
    if axes == "heads":
        chosen(name)
        return "heads"
    if name != "auto":
        return chosen(name)
    return "queries" if reason is None and _few_bytes(call) else chosen(name)


def unable(name: str, call: ShardedCall) -> str | None:
    """Return why a strategy does not compute a call, or None."""
    if name == "queries" and call.options.align == "lengths":
        return "a rank's keys alone have no position aligned to the lengths"
    return None


def _few_bytes(call: ShardedCall) -> bool:
    """Return True if moving few queries copies less than half of what moving keys does."""
    nq, nk, left, right = call.queries.n, call.keys.n, call.options.left, call.options.right
    if nq * FEW > nk:
        return False
    if left is not None and right is not None:
        nk = min(nk, nq + max(left, 0) + max(right, 0))
    t = call.tensors
    hq, d, hk, dv = t.q.shape[2], t.q.shape[3], t.k.shape[2], t.v.shape[3]
    size, wide = t.q.dtype.itemsize, call.accumulator.itemsize
    return 2 * nq * hq * (d * size + (dv + 1) * wide) < nk * hk * (d + dv) * size
