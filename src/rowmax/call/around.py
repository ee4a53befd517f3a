"""A hook around the public calls: contexts that compute them across ranks.

The context of a thread is an attribute of ``threading.local`` and no ``ContextVar``: Dynamo reads
and guards the first, so a graph made in one context never runs in another.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ..torch_compat import is_in_backward


class Context(Protocol):
    """A context that computes the calls made in it."""

    def attention(self, *tensors: Any, **options: Any) -> Any: ...
    def attention_varlen(self, *tensors: Any, **options: Any) -> Any: ...
    def is_local(self) -> bool: ...
    def differs(self) -> bool: ...


class _Here(threading.local):
    """The context of this thread, and those around it."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.outer: list[Context | None] = []


here = _Here()
#: True once this process has entered a context. Until then this is all that a call reads
used = False
#: True once this process has entered a context in which calls have other results
_differed = False


def enter(context: Context) -> None:
    """Let a context compute the calls of this thread."""
    global used, _differed
    used = True
    _differed = _differed or context.differs()
    here.outer.append(here.context)
    here.context = context


def leave() -> None:
    """Return to the context before the last ``enter`` of this thread."""
    here.context = here.outer.pop()


def current() -> Context | None:
    """Return the context that computes the calls of this thread, or None: this device does.

    Raises:
        RuntimeError: in a backward without a context. The call then is one of activation
            checkpointing, and its forward may have had one.
    """
    context = here.context
    if context is None:
        if _differed and is_in_backward():
            raise RuntimeError(
                "rowmax.attention: called in a backward, as activation checkpointing does, without "
                "the context_parallel of its forward; want torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False, context_fn=rowmax.distributed.checkpoint_contexts)"
            )
        return None
    return None if context.is_local() else context
