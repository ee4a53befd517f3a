"""Elementary functions of numbers, as Numba compiles them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from ..rules.softmax import LOG2E
from . import numba_compat

# ``(2^f - 1) / f`` on [-1/2, 1/2], by the Remez algorithm: relative errors 1.1e-8 and 1.8e-17.
_EXP2_32 = (
    0.69314718792669302455,
    0.24022649794962323386,
    0.055503574336428407857,
    0.0096182374948951896772,
    0.0013390735477510891682,
    0.00015403512372125907769,
)
_EXP2_64 = (
    0.6931471805599453112,
    0.24022650695910097888,
    0.055504108664821236534,
    0.0096181291076070656695,
    0.0013333558146531632846,
    0.00015403530441480679679,
    0.00001525273370121467249,
    1.3215442724231275498e-6,
    1.0178121299157636101e-7,
    7.0725617019006722852e-9,
    4.4455372295661199996e-10,
)

#: compiles a function that only compiled functions call. Wrappers for Python and for C took a sixth
#: of the time to compile a kernel.
_ALONE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_OPTIONS = {**_ALONE, **numba_compat.PART}
inner: Any = partial(cast(Any, njit), **_OPTIONS)
#: as ``inner``, but optimised before a kernel inlines it; it calls no function of ``inner``
optimised: Any = partial(cast(Any, njit), **_ALONE)


def choice(choose: Any = None, **options: Any) -> Any:
    """Return a function for compiled code, which ``choose`` returns for the arguments' types."""
    if choose is None:
        return partial(choice, **options)

    @wraps(choose)
    def stands_for_it(*_: Any) -> None: ...

    cast(Any, overload)(stands_for_it, **(options or {"jit_options": _OPTIONS}))(choose)
    return stands_for_it


#: ``(address, n, like)``: the n numbers at an address, of ``like``'s dtype
array = numba_compat.array

STRICT = {"contract", "nsz"}  # keeps NaN, inf and the order of additions
SUMS = {"contract", "nsz", "reassoc"}  # allows a sum in the lanes of a vector


def of_dtype(choose: Callable[[Any], bool | int]) -> Any:
    """Return a function of an array, for compiled code: ``choose`` of its dtype, a constant."""

    def typed(typing, like):
        value = choose(like.dtype)
        kind = types.boolean if isinstance(value, bool) else types.int64

        def emit(context, builder, signature, arguments):
            return context.get_constant(kind, value)

        return kind(like), emit

    return intrinsic(typed)


def _number(typing, value, x):
    """Return a number in the type of x: a Python number would make the arithmetic double."""
    real = types.float64 if x == types.float64 else types.float32

    def emit(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], signature.args[0], real)

    return real(types.unliteral(value), x), emit


# Numba passes an intrinsic's first parameter itself: a call has one fewer.
number: Any = intrinsic(_number)


@choice
def exponential(x) -> Any:
    """Return (2^r, g) with ``2^x = 2^r + 2^r g``, g = 2^(x - r) - 1 small.

    2^r is 0 from -127 (-1023) down.
    """
    return _exponential64 if x == types.float64 else _exponential32


def _exponential32(x):
    x = np.float32(-127) if x < np.float32(-127) else x  # in this order a NaN stays
    x = np.float32(128) if x > np.float32(128) else x
    r = np.floor(x + np.float32(0.5))
    f = x - r
    g = np.float32(_EXP2_32[5])
    g = g * f + np.float32(_EXP2_32[4])
    g = g * f + np.float32(_EXP2_32[3])
    g = g * f + np.float32(_EXP2_32[2])
    g = g * f + np.float32(_EXP2_32[1])
    g = g * f + np.float32(_EXP2_32[0])
    power = np.int32((np.int32(r) + np.int32(127)) << np.int32(23))  # int32 sums are int64 here
    return power.view(np.float32), g * f


def _exponential64(x):
    x = -1023.0 if x < -1023.0 else x
    x = 1024.0 if x > 1024.0 else x
    r = np.floor(x + 0.5)
    f = x - r
    g = _EXP2_64[10]
    for n in range(9, -1, -1):
        g = g * f + _EXP2_64[n]
    power = np.int64((np.int64(r) + np.int64(1023)) << np.int64(52))
    return power.view(np.float64), g * f


@inner(fastmath=STRICT)
def exp2(x):
    """Return ``2^x``."""
    power, g = exponential(x)
    return power + power * g


@inner(fastmath=STRICT)
def tanh(x):
    """Return ``(e^2x - 1) / (e^2x + 1)`` from ``e^2x - 1`` itself, which is accurate near 0."""
    one = number(1, x)
    power, g = exponential(x * number(2 * LOG2E, x))
    minus1 = (power - one) + power * g
    return one if x > number(20, x) else minus1 / (minus1 + number(2, x))


@inner
def bfloat_to_float(bits):
    """Return a bfloat16 as float32, given its bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inner(fastmath=STRICT)
def half_to_float(bits):
    """Return a float16 as float32, given its bits.

    A product widens subnormals, but not inf and NaN.
    """
    magnitude = np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13))
    value = magnitude.view(np.float32) * np.float32(2.0**112)
    special = np.uint32(magnitude | np.uint32(0x7F800000)).view(np.float32)
    value = special if magnitude >= np.uint32(0x0F800000) else value
    return -value if bits & np.uint16(0x8000) else value
