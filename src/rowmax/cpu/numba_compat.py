"""Private parts of Numba: functions whose code is compiled only as a part of a kernel.

Numba optimises each compiled function with all that it calls, and makes machine code of it. A
kernel contains its functions, so most of that code never runs. Functions with the options ``PART``
stay unoptimised LLVM code. Kernels, with the options ``KERNEL``, link it in and optimise it once.

Where Numba has other names for what this file uses, the options are empty: functions then compile
as Numba's own do, in about 1.6 times the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from numba import carray, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils, registry
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.datamodel.models import ArrayModel
from numba.core.datamodel.registry import default_manager
from numba.extending import intrinsic, overload

from .vector import pointer_to

#: names of Numba's library of code that the classes below replace or read
_METHODS = ("add_linking_library", "finalize", "_optimize_functions", "_finalize_dynamic_globals")
_METHODS += ("get_pointer_to_function", "enable_object_caching", "_get_module_for_linking")
_DATA = ("codegen", "_codegen", "_finalized", "_linking_libraries")


class _NoEnvironments:
    """Numba's code generator for a library without machine code."""

    def set_env(self, name: str, env: object) -> None:
        """Store nothing: as in kernels loaded from disk, code that is linked in has none."""


class _Own:
    """The code of a part without what it calls, as a kernel links it."""

    def __init__(self, part: Any) -> None:
        self._get_module_for_linking = partial(JITCodeLibrary._get_module_for_linking, part)
        self._reload_init = part._reload_init


class _Part(JITCodeLibrary):
    """The LLVM code of a function that only compiled functions call."""

    codegen: Any = _NoEnvironments()

    def _get_module_for_linking(self) -> Any:
        """Return its code with all that it calls, for a function that is no kernel of rowmax."""
        module = super()._get_module_for_linking().clone()
        for library in self._linking_libraries:
            module.link_in(library._get_module_for_linking(), preserve=True)
        return module

    def _optimize_functions(self, ll_module: Any) -> None:
        """Do only what linking needs: the kernel optimises all its functions."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Neither link nor make machine code."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        self._ensure_finalized()
        return 0


class _Whole(JITCodeLibrary):
    """The code of a kernel, with that of all functions that it and its parts call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts: set[_Part] = set()

    def add_linking_library(self, library: Any) -> None:
        """Add a library; of a part its own code, and then what it calls."""
        if not isinstance(library, _Part):
            super().add_linking_library(library)
        elif library not in self._parts:
            self._parts.add(library)
            self._linking_libraries.append(_Own(library))
            for called in library._linking_libraries:
                self.add_linking_library(called)


class _PartCompiler(Compiler):
    """Numba's compiler, which keeps the code of a function in a ``_Part``."""

    library = _Part

    def define_pipelines(self) -> Any:
        state = self.state
        if state.library is None:
            state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
        return super().define_pipelines()


class _KernelCompiler(_PartCompiler):
    """Numba's compiler, which links a kernel with its parts."""

    library = _Whole


def pipelines(library: type = JITCodeLibrary) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Numba's options for kernels and for their parts; none if its names are others."""
    context = cast(Any, registry.cpu_target.target_context)
    sample = library(context.codegen(), "rowmax")
    if not all(hasattr(sample, name) for name in (*_METHODS, *_DATA)):
        return {}, {}
    return {"pipeline_class": _KernelCompiler}, {"pipeline_class": _PartCompiler}


KERNEL, PART = pipelines()

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
