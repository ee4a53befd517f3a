"""The context that distributes the calls of a model, for integrations.

Other libraries read lengths of the rows that they see. In a context those are the rows of one rank.
"""

from __future__ import annotations

from typing import Any

from ..call import around


def context() -> Any:
    """Return the ``context_parallel`` of this thread that distributes its calls, or None."""
    return around.current() if around.used else None


def lengths(nq: int, nk: int) -> tuple[int, int]:
    """Return the numbers of queries and of keys of the whole call, of those that a rank sees."""
    found = context()
    if found is None:
        return nq, nk
    queries, keys = found.layouts
    return queries.n, keys.n


def check_refusal(function: str, reason: str) -> None:
    """Raise in a context: another library would attend to the rows of this rank alone.

    Raises:
        NotImplementedError: with the reason for which rowmax does not compute a call.
    """
    if context() is not None:
        raise NotImplementedError(
            f"{function}: {reason}. In context_parallel want a call that rowmax computes: torch "
            "would attend to the rows of one rank alone. For rows that every rank has, use "
            "context_parallel(mesh, None)"
        )
