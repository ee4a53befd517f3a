"""Make Triton's interpreter faster, without a change of what it computes.

Our kernels take a third of the time. Without this the interpreter spends the rest on types. It
looks through ``triton.language`` at each call of a function, and makes each type of a result again.
It computes whether integers overflow, for an assertion that is off.
"""

from __future__ import annotations

import types
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_DONE = "rowmax_tests_sped_up"


def speed_up() -> None:
    """Replace parts of the interpreter, once in a process."""
    if hasattr(interpreter, _DONE):
        return
    setattr(interpreter, _DONE, True)
    _patch_once_a_launch()
    _keep_dtypes()
    _keep_shapes()
    _skip_checks_of_equal_types()


def _patch_once_a_launch() -> None:
    """Replace the functions of ``triton.language`` once a launch, not at each call of a function.

    The calls of the library's own functions look through ``triton.language.core``, which no kernel
    names, so both modules are replaced at once.
    """
    patch = interpreter._patch_lang
    both = types.SimpleNamespace(__globals__={"tl": tl, "core": core})
    active: list[Any] = []

    def patch_once(fn: Any) -> Any:
        if active:
            return None  # the caller, a function within a launch, ignores it
        scope = patch(both)
        active.append(scope)
        restore = scope.restore

        def restore_all() -> None:
            active.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def _keep_dtypes() -> None:
    """Keep the numpy dtype of each dtype, and whether an array fits it."""
    np_dtype, known = interpreter._get_np_dtype, {}
    fits, known_fits = interpreter._validate_np_data_size, {}

    def known_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    def known_to_fit(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        if key not in known_fits:
            known_fits[key] = fits(array, dtype)
        return known_fits[key]

    interpreter._get_np_dtype = known_np_dtype
    interpreter._validate_np_data_size = known_to_fit


def _keep_shapes() -> None:
    """Keep what types and tensors hold of each shape. Types of one shape then share the tuple."""
    init, with_element = core.block_type.__init__, core.block_type.with_element_ty
    shapes: dict[Any, Any] = {}
    no_shape = core.constexpr(1), core.tuple([])

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(n, "value", n) for n in shape])
        if key not in shapes:
            init(self, element_ty, shape)
            of_tensor = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in key])
            shapes[key] = self.shape, self.numel, of_tensor
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor = shapes[key]
        self.name = f"<{key}, {element_ty.name}>"
        self.others = {}

    def other_element(self: Any, scalar_ty: Any) -> Any:
        name = scalar_ty.name
        if name not in self.others:
            self.others[name] = with_element(self, scalar_ty)
        return self.others[name]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else no_shape

    core.block_type.__init__ = init_type
    core.block_type.with_element_ty = other_element
    core.tensor.__init__ = init_tensor


def _skip_checks_of_equal_types() -> None:
    """Return operands of one type and shape as they are, and check no overflow in vain."""
    check = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    unwrap = core._unwrap_if_constexpr
    equal = core.dtype.__eq__
    overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_types(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if lhs.__class__ is core.tensor and rhs.__class__ is core.tensor and not div_or_mod:
            a, b = lhs.type, rhs.type
            if (a is b or a.name == b.name) and a.scalar.__class__ is core.dtype:
                return lhs, rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def check_overflow(self: Any, *args: Any) -> None:
        if self.builder.options.debug:  # else the assertion of what this computes does nothing
            overflow(self, *args)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def unwrap_constant(x: Any) -> Any:
        return x if x.__class__ in plain else unwrap(x)

    plain = core.tensor, core.dtype, int, float, bool

    TritonSemantic.binary_op_type_checking_impl = check_types
    TritonSemantic.broadcast_impl_value = broadcast_values
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    core.dtype.__eq__ = is_equal
    core._unwrap_if_constexpr = unwrap_constant
