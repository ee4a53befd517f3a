"""Make Triton's interpreter faster, without a change of what it computes.

Each call of one ``@triton.jit`` function by another looks through all names of ``triton.language``
for functions to replace, though the launch has replaced them. Each operation builds a table of
dtypes. Together they take a third of the time of our kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace the functions of ``triton.language`` once a launch, and keep dtypes."""
    patch = interpreter._patch_lang
    if hasattr(patch, "languages"):  # it is fast already
        return
    active: list[set[Any]] = []

    by_module: dict[int, set[Any]] = {}

    def languages(fn: Any) -> set[Any]:
        names = fn.__globals__
        if id(names) not in by_module:
            modules = {x for x in names.values() if inspect.ismodule(x)}
            by_module[id(names)] = modules & {tl, tl.core}
        return by_module[id(names)]

    def patch_once(fn: Any) -> Any:
        if active and languages(fn) <= active[-1]:
            return None  # the caller, a function within a launch, ignores it
        scope = patch(fn)
        if not active:  # a launch
            restore = scope.restore
            active.append(languages(fn))

            def restore_all() -> None:
                active.clear()
                restore()

            scope.restore = restore_all
        return scope

    patch_once.languages = languages  # pyright: ignore[reportFunctionMemberAccess]
    interpreter._patch_lang = patch_once
    np_dtype, known = interpreter._get_np_dtype, {}

    def known_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    interpreter._get_np_dtype = known_np_dtype
