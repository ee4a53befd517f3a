"""The mathematics, each rule once.

A rule is a plain Python function of numbers or tiles. It names the elementwise functions that it
needs (``max``, ``min``, ``abs``, ``where``, ``tanh``, ...) as globals. A backend binds its own
functions to these names with ``bound`` and compiles the result: the same text runs on the host,
over torch tensors, and under Numba, Triton and Gluon. A rule calls no other rule, because Triton
compiles a function alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def bound(rule: Callable[..., Any], **functions: Any) -> Callable[..., Any]:
    """Return the rule with ``functions`` in place of the globals of these names.

    Raises:
        NameError: the rule uses no such name.
    """
    assert isinstance(rule, FunctionType)
    unknown = set(functions) - set(rule.__code__.co_names)
    if unknown:
        raise NameError(f"{rule.__qualname__} uses no {', '.join(sorted(unknown))}")
    copy = FunctionType(
        rule.__code__, rule.__globals__ | functions, rule.__name__, rule.__defaults__
    )
    copy.__qualname__, copy.__module__ = rule.__qualname__, rule.__module__
    copy.__doc__ = rule.__doc__
    return copy
