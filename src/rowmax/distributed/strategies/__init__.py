"""The ways to distribute a call, a module each."""

from __future__ import annotations

from types import ModuleType

from ...errors import bad
from . import heads, keys

#: by name, the preferred ones first. Each module has ``forward`` and ``backward``
STRATEGIES: dict[str, ModuleType] = {"keys": keys, "heads": heads}


def chosen(name: object) -> str:
    """Return the name of the strategy of a call.

    Raises:
        ValueError: a name that is not there.
    """
    if name == "auto":
        return next(iter(STRATEGIES))
    if name not in STRATEGIES:
        raise bad("strategy", repr(name), "one of " + ", ".join(map(repr, ("auto", *STRATEGIES))))
    return str(name)
