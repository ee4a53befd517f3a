"""Explain which way a call of torch's attention functions takes, and why."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import rowmax

from . import dense, switch, varlen


@dataclass(frozen=True)
class Route:
    """The way of a call; ``str`` of it is a text to read.

    Attributes:
        by: "rowmax" or "torch", for the functions of this package, and torch's while enabled.
        reason: why rowmax does not take the call, or None.
        call: the explanation of rowmax's call, or None.
        enabled: True while ``enable()`` is in force: only then torch's own names take this way.
    """

    by: Literal["rowmax", "torch"]
    reason: str | None
    call: rowmax.Explanation | None
    enabled: bool

    def __str__(self) -> str:
        lines = [f"by        {self.by}" + (f": {self.reason}" if self.reason else "")]
        if not self.enabled:
            lines.append("disabled  torch's own names go to torch: see enable()")
        return "\n".join([*lines, *([] if self.call is None else [str(self.call)])])


def explain(*args: Any, **keywords: Any) -> Route:
    """Return the way of a ``scaled_dot_product_attention`` call; compute no attention.

    Reads masks, which waits for a GPU.

    Raises:
        TypeError: an argument that scaled_dot_product_attention does not have.

    >>> import torch
    >>> from rowmax.integrations import sdpa
    >>> q = torch.randn(1, 2, 8, 16)
    >>> sdpa.explain(q, q, q, dropout_p=1.0).reason
    'dropout_p is 1.0; rowmax takes 0 <= dropout_p < 1'
    """
    call = dense.Call(*args, **keywords)
    reason = dense.refusal(call)
    if reason is not None:
        return _by_torch(reason)
    return _by_rowmax(rowmax.explain(**dense.arguments(call)))


def explain_varlen(*args: Any, **keywords: Any) -> Route:
    """Return the way of a ``varlen_attn`` call with its keywords; compute no attention.

    Reads offsets and lengths, which waits for a GPU.

    Raises:
        TypeError: a keyword that varlen_attn does not have.

    >>> import torch
    >>> from rowmax.integrations import sdpa
    >>> q, cu = torch.randn(10, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> sdpa.explain_varlen(q, q, q, cu, cu, 7, 7, num_splits=1).reason
    'num_splits is 1; rowmax takes None'
    """
    call = varlen.Call(*args, **keywords)
    reason = varlen.refusal(call)
    if reason is not None:
        return _by_torch(reason)
    positional, given = varlen.arguments(call)
    return _by_rowmax(rowmax.explain(*positional, **given))


def _by_torch(reason: str) -> Route:
    return Route("torch", reason, None, switch.is_enabled())


def _by_rowmax(call: rowmax.Explanation) -> Route:
    return Route("rowmax", None, call, switch.is_enabled())


explain.__signature__ = signature(dense.scaled_dot_product_attention)  # pyright: ignore
explain_varlen.__signature__ = signature(varlen.varlen_attn)  # pyright: ignore
