"""Make Triton's interpreter faster, without a change of what it computes.

Our kernels take a third of the time. Without this the interpreter spends the rest on types. It
looks through ``triton.language`` at each call of a function, and makes each type of a result again.
It computes whether integers overflow, for an assertion that is off.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_DONE = "rowmax_tests_sped_up"

#: functions that are replaced or called here, with their arguments in Triton 3.6 to 3.9
KNOWN: tuple[tuple[Any, str, str], ...] = (
    (interpreter, "_patch_lang", "fn"),
    (interpreter, "_patch_attr", "obj name member builder scope"),
    (interpreter, "_get_np_dtype", "tt_dtype"),
    (interpreter, "_validate_np_data_size", "np_array tl_dtype"),
    (interpreter.TensorHandle, "__init__", "self data dtype attr"),
    (interpreter.TensorHandle, "get_element_ty", "self"),
    (core.block_type, "__init__", "self element_ty shape"),
    (core.block_type, "with_element_ty", "self scalar_ty"),
    (core.tensor, "__init__", "self handle type"),
    (core.dtype, "__eq__", "self other"),
    (core, "_unwrap_if_constexpr", "o"),
    (TritonSemantic, "__init__", "self builder"),
    (
        *(TritonSemantic, "binary_op_type_checking_impl"),
        "self lhs rhs allow_lhs_ptr allow_rhs_ptr arithmetic_check div_or_mod",
    ),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", "self lhs rhs binary_op"),
    (TritonSemantic, "broadcast_impl_value", "self lhs rhs"),
    (TritonSemantic, "scalar_constant", "self value dtype"),
    (TritonSemantic, "cast", "self input dst_ty fp_downcast_rounding"),
    (TritonSemantic, "expand_dims", "self input axis"),
    (TritonSemantic, "arange", "self start end ret_ty"),
)


def speed_up() -> None:
    """Replace parts of the interpreter, once in a process. One of another form is left as it is."""
    if hasattr(interpreter, _DONE) or not _is_known():
        return
    setattr(interpreter, _DONE, True)
    _patch_once_a_launch()
    _call_builtins_directly()
    _keep_dtypes()
    _keep_shapes()
    _skip_checks_of_equal_types()
    _keep_results()


def _is_known() -> bool:
    """Return True if this release of Triton has everything that is replaced, in its known form."""
    for owner, name, arguments in KNOWN:
        found = getattr(owner, name, None)
        if found is None or " ".join(inspect.signature(found).parameters) != arguments:
            return False
    return True


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


def _call_builtins_directly() -> None:
    """Call what a builtin of the language wraps. The wrapper only checks that it has semantics.

    Operators of tensors go to numpy at once, by the types that Triton's own gave the first time.
    """
    semantics: dict[int, Any] = {}

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)
        semantic = semantics.setdefault(id(builder), TritonSemantic(builder))

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        known = obj is core.tensor and name in _OPERATORS
        scope.set_attr(obj, name, _operator(name, call) if known else call)

    interpreter._patch_attr = patch


#: operators of tensors, and the function of numpy that Triton's interpreter takes for each
_OPERATORS: dict[str, Any] = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__lt__": np.less,
    "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_NUMBERS = frozenset(("fp16", "fp32", "fp64", "int32", "int64"))  # numpy has them as they are


class Way(NamedTuple):
    """The way to compute an operator for two types of operands, as Triton did the first time."""

    casts: tuple[Any, Any]  # numpy dtypes that the operands become, or None
    bytes: int  # size of an element, if the first operand is a pointer; else 0
    element: Any  # the dtype of the result's handle
    type: Any


#: by operator and by the types of its operands
_ways: dict[str, dict[tuple[str, str | None], Way | None]] = {}


def _operator(name: str, call: Any) -> Any:
    """Return an operator of tensors that resolves each pair of types once."""
    function, ways = _OPERATORS[name], _ways.setdefault(name, {})
    handle_of, tensor, constant = interpreter.TensorHandle, core.tensor, core.constexpr

    def operate(x: Any, y: Any) -> Any:
        if y.__class__ is constant:
            y = y.value
        if y.__class__ is tensor:
            key = x.type.name, y.type.name
        elif x.dtype.name in _NUMBERS and _takes(x.dtype, y):
            key = x.type.name, None
        else:
            return call(x, y)
        if key not in ways:
            found = call(x, y)
            ways[key] = _way_of(name, x, y, found)
            return found
        way = ways[key]
        if way is None:
            return call(x, y)
        a, b = x.handle.data, y if key[1] is None else y.handle.data
        left, right = way.casts
        if left is not None:
            a = a.astype(left)
        if right is not None:
            b = b.astype(right)
        if way.bytes:
            b = way.bytes * b
        return tensor(handle_of(function(a, b), way.element), way.type)

    return operate


def _way_of(name: str, x: Any, y: Any, found: Any) -> Way | None:
    """Return the way in which ``found`` was computed, or None if there is no short one."""
    element, kinds = found.handle.dtype, interpreter._get_np_dtype
    if x.dtype.is_ptr():
        if name != "__add__" or y.__class__ is not core.tensor or y.dtype.name not in _NUMBERS:
            return None
        size = max(1, x.handle.get_element_ty().primitive_bitwidth // 8)
        return Way((None, np.uint64), size, element, found.type)
    if x.dtype.name not in _NUMBERS:
        return None
    if y.__class__ is not core.tensor:
        return Way((None, None), 0, element, found.type)
    if y.dtype.name not in _NUMBERS:
        return None
    wanted = kinds(element)
    casts = tuple(None if kinds(t.dtype) == wanted else wanted for t in (x, y))
    return Way(casts, 0, element, found.type)  # pyright: ignore


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
            shapes[key] = self.shape, self.numel, of_tensor, list(key)
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor, self.ints = shapes[key]
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
    """Return operands as they are where their types need no change.

    Numbers that become the other operand's type are kept, as constants of its shape. How shapes
    meet is kept as well. Overflow is not checked in vain.
    """
    check = TritonSemantic.binary_op_type_checking_impl
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
        if not div_or_mod:
            x, y = lhs.__class__ is core.tensor, rhs.__class__ is core.tensor
            if x and y:
                a, b = lhs.dtype, rhs.dtype
                offset = allow_lhs_ptr and a.__class__ is core.pointer_type and b.is_int()
                if offset or (a.__class__ is core.dtype and a.name == b.name):
                    return self.broadcast_impl_value(lhs, rhs)
            elif x and _takes(lhs.dtype, rhs):
                return lhs, _constant(self, lhs.type, rhs)
            elif y and _takes(rhs.dtype, lhs):
                return _constant(self, rhs.type, lhs), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def check_overflow(self: Any, *args: Any) -> None:
        if self.builder.options.debug:  # else the assertion of what this computes does nothing
            overflow(self, *args)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def unwrap_constant(x: Any) -> Any:
        return x if x.__class__ in plain else unwrap(x)

    plain = core.tensor, core.dtype, int, float, bool

    TritonSemantic.binary_op_type_checking_impl = check_types
    TritonSemantic.broadcast_impl_value = _broadcast_values()
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    core.dtype.__eq__ = is_equal
    core._unwrap_if_constexpr = unwrap_constant


def _keep_results() -> None:
    """Keep ranges, the types of expanded tensors, and those of casts that numpy knows."""
    cast, expand, arange = (getattr(TritonSemantic, x) for x in ("cast", "expand_dims", "arange"))
    handle_of, tensor = interpreter.TensorHandle, core.tensor
    ranges: dict[tuple[int, int], Any] = {}
    expanded: dict[tuple[str, int], Any] = {}

    def cast_numbers(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        kind, wanted = input.dtype, dst_ty.scalar
        if kind is wanted:
            return input
        if fp_downcast_rounding is None and kind.name in _NUMBERS and wanted.name in _NUMBERS:
            if kind.name == wanted.name:
                return input
            data = input.handle.data.astype(interpreter._get_np_dtype(wanted))
            type = input.type.with_element_ty(wanted) if input.type.is_block() else wanted
            return tensor(handle_of(data, wanted), type)
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def expand_dims(self: Any, input: Any, axis: int) -> Any:
        key = input.type.name, axis
        if key not in expanded:
            found = expand(self, input, axis)
            expanded[key] = found.type if input.type.is_block() else None
            return found
        if expanded[key] is None:
            return expand(self, input, axis)
        handle = input.handle
        data = handle.data[(*(slice(None),) * axis, None)]
        return tensor(handle_of(data, handle.dtype.scalar), expanded[key])

    def known_range(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            found = ranges[start, end] = arange(self, start, end)
            found.handle.data.flags.writeable = False  # others share it
        return ranges[start, end]

    TritonSemantic.cast = cast_numbers
    TritonSemantic.expand_dims = expand_dims
    TritonSemantic.arange = known_range


#: types that an int of 32 bits, or a float of their range, becomes next to a tensor of them
_FLOATS = frozenset(("fp16", "bf16", "fp32", "fp64"))
_TAKE = {int: _FLOATS | {"int32", "int64"}, float: _FLOATS}


def _takes(dtype: Any, x: Any) -> bool:
    """Return True if the number x becomes the dtype of the tensor next to it."""
    if dtype.__class__ is not core.dtype or dtype.name not in _TAKE.get(x.__class__, ()):
        return False
    # a float past the range of float32 is of float64
    return -(2**31) <= x < 2**31 if x.__class__ is int else x == 0 or 2**-126 <= abs(x) <= 2**127


def _constant(semantic: Any, type: Any, x: Any) -> Any:
    """Return a number as a tensor of a type."""
    key = type.name, x.__class__, x, str(x) if x == 0 else ""  # -0.0 equals 0.0
    found = _constants.get(key)
    if found is None:
        found = semantic.scalar_constant(x, dtype=type.scalar)
        if type.is_block():
            found = core.tensor(semantic.builder.create_splat(type, found.handle), type)
        found.handle.data.flags.writeable = False  # others share it
        if len(_constants) < 10_000:
            _constants[key] = found
    return found


_constants: dict[Any, Any] = {}


def _broadcast_values() -> Any:
    """Return the broadcast of two operands, which keeps the types that pairs of types become."""
    broadcast = TritonSemantic.broadcast_impl_value
    known: dict[Any, Any] = {}

    def to(self: Any, x: Any, type: Any) -> Any:
        if type is None:
            return x
        if x.type.is_block():
            return core.tensor(self.builder.create_broadcast(x.handle, type.ints), type)
        return core.tensor(self.builder.create_splat(type, x.handle), type)

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        key = a.name, b.name
        if key in known:
            to_a, to_b = known[key]
            return to(self, lhs, to_a), to(self, rhs, to_b)
        x, y = broadcast(self, lhs, rhs)
        ranks = {len(t.shape) for t in (a, b) if t.is_block()}
        if len(ranks) < 2:  # else an axis is added first
            known[key] = None if x is lhs else x.type, None if y is rhs else y.type
        return x, y

    return broadcast_values
