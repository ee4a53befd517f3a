"""Private parts of Numba: functions whose code is compiled only as a part of a kernel.

Numba optimises each compiled function with all that it calls, and makes machine code of it. A
kernel contains its functions, so most of that code never runs. Functions with the options ``PART``
stay unoptimised LLVM code, which the kernel that calls them links in and optimises once.

Where Numba has other names for these parts, ``PART`` is empty: functions then compile as Numba's
own do, more slowly.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

_HOOKS = ("_optimize_final_module", "_finalize_final_module", "_finalize_dynamic_globals")


class _NoEnvironments:
    """Numba's code generator for a library without machine code."""

    def set_env(self, name: str, env: object) -> None:
        """Store nothing: as in kernels loaded from disk, code that is linked in has none."""


class _Part(JITCodeLibrary):
    """The LLVM code of a function and of what it calls, as kernels link it."""

    codegen: Any = _NoEnvironments()

    def _optimize_final_module(self) -> None:
        """Do nothing: the kernel optimises its whole module."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        self._ensure_finalized()
        return 0


class _PartCompiler(Compiler):
    """Numba's compiler, which keeps the code of functions in a ``_Part``."""

    def define_pipelines(self) -> Any:
        state = self.state
        if state.library is None:
            state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


def part_options(library: type = JITCodeLibrary) -> dict[str, Any]:
    """Return Numba's options for functions that only compiled functions call."""
    known = all(callable(getattr(library, name, None)) for name in _HOOKS)
    return {"pipeline_class": _PartCompiler} if known else {}


PART = part_options()
