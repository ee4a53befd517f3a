"""Private parts of Numba: functions whose code is compiled only as a part of a kernel.

Numba optimises each compiled function with all that it calls, and makes machine code of it. A
kernel contains its functions, so most of that code never runs. Functions with the options ``PART``
stay unoptimised LLVM code, which the kernel that calls them links in and optimises once.

Where Numba has other names for these parts, ``PART`` is empty: functions then compile as Numba's
own do, more slowly.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.datamodel import default_manager
from numba.core.datamodel.models import ArrayModel
from numba.extending import intrinsic, overload

from .vector import pointer_to

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


# --- arrays at an address ----------------------------------------------------------------------

_MEMBERS = {"meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides"}


def _array(typing, address, n, like):
    """Return the n numbers at an address, of ``like``'s dtype."""
    kind = types.Array(like.dtype, 1, "C")

    def emit(context, builder, signature, arguments):
        made = cgutils.create_struct_proxy(kind)(context, builder)
        for member in ("meminfo", "parent"):
            setattr(made, member, cgutils.get_null_value(getattr(made, member).type))
        size = context.get_abi_sizeof(context.get_data_type(like.dtype))
        made.data = builder.inttoptr(arguments[0], made.data.type)
        made.nitems, made.itemsize = arguments[1], context.get_constant(types.intp, size)
        made.shape = cgutils.pack_array(builder, [made.nitems])
        made.strides = cgutils.pack_array(builder, [made.itemsize])
        return made._getvalue()

    return kind(types.int64, types.intp, like), emit


def _carray(address, n, like) -> Any:
    """Compute ``_array`` by Numba's public function, which each call compiles again."""


@overload(_carray, inline="always")
def _carray_of(address, n, like):
    return lambda address, n, like: carray(pointer_to(address, like), n)


def array_function(model: type = ArrayModel) -> Any:
    """Return ``array(address, n, like)``: the n numbers at an address, of ``like``'s dtype."""
    kind = types.Array(types.float32, 1, "C")
    members = set(model(default_manager, kind)._fields)
    return intrinsic(_array) if members == _MEMBERS else _carray


array = array_function()
