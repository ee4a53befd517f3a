"""The rules of ``rowmax.rules``, bound to Triton's language and compiled for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ..rules import band, bound, dropout, mask, row_stats, softmax, tangent
from ..rules import score as scores
from . import compat

# a kernel may read only globals that are constexpr
LOG2E = tl.constexpr(softmax.LOG2E)
LN2 = tl.constexpr(softmax.LN2)


def _late(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(tl, name)(*args)


def compiled(rule: Callable[..., Any], **functions: Any) -> Any:
    """Return a rule that kernels call; a string names a function of ``tl``.

    The interpreter replaces the functions of ``tl`` while a kernel runs. There the rule stays a
    Python function that looks them up at each call.
    """

    def bound_to(find: Callable[[str], Any]) -> Any:
        return bound(
            rule, **{name: find(x) if isinstance(x, str) else x for name, x in functions.items()}
        )

    kernel = triton.jit(bound_to(lambda name: getattr(tl, name)))
    return kernel if compat.is_compiled(kernel) else bound_to(_late)


@triton.jit
def tanh(x):
    """Return tanh x from one exponential."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def tanh_precise(x):
    """Return tanh to float32's accuracy: by an odd polynomial near 0, where ``tanh`` cancels."""
    z = x * x
    u = -5.70498872745e-3 * z + 2.06390887954e-2
    u = u * z - 5.37397155531e-2
    u = u * z + 1.33314422036e-1
    u = u * z - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, u * z * x + x, tanh(x))


@triton.jit
def multiply(a, b):
    """Return the high and the low word of a product of uint32."""
    return tl.umulhi(a, b), a * b


any_range = compiled(band.any_range, max="maximum", min="minimum")
all_range = compiled(band.all_range, max="maximum", min="minimum")
back_of_key = compiled(band.back_of_key, where="where")
touched_tiles = compiled(band.touched_tiles, max="maximum")
filled_tiles = compiled(band.filled_tiles, max="maximum", min="minimum")
touches, fills = compiled(band.touches), compiled(band.fills)
may_be_equal, are_equal = compiled(mask.may_be_equal), compiled(mask.are_equal)
score = compiled(scores.score, tanh=tanh)
score_precise = compiled(scores.score, tanh=tanh_precise)
product_gradient = compiled(scores.product_gradient)
head_gradient = compiled(scores.head_gradient)
score_tangent = compiled(scores.score_tangent)
product_curvature = compiled(scores.product_curvature)
_numbers = {"LOG2E": LOG2E, "inf": tl.constexpr(softmax.inf)}
moved = compiled(softmax.moved, max="maximum", where="where", inf=_numbers["inf"])
with_sink = compiled(softmax.with_sink, max="maximum", where="where", exp2="exp2", **_numbers)
score_gradient = compiled(softmax.score_gradient)
score_gradients = compiled(tangent.score_gradients)
sink_in_tangent = compiled(tangent.sink_in_tangent, where="where", exp2="exp2", **_numbers)
out_tangent = compiled(tangent.out_tangent)
tangent_base = compiled(tangent.tangent_base, where="where", inf=_numbers["inf"])
without_weights = compiled(row_stats.without_weights, where="where", inf=_numbers["inf"])
natural_weight = compiled(row_stats.natural_weight, exp2="exp2", LOG2E=LOG2E)
philox_round = compiled(
    dropout.philox_round,
    multiply=multiply,
    M0=tl.constexpr(dropout.M0),
    M1=tl.constexpr(dropout.M1),
)
philox = compiled(
    dropout.philox_rounds,
    philox_round=philox_round,
    unrolled="static_range",
    ROUNDS=tl.constexpr(dropout.ROUNDS),
    INCREMENT_0=tl.constexpr(dropout.INCREMENT_0),
    INCREMENT_1=tl.constexpr(dropout.INCREMENT_1),
    WORD=tl.constexpr(dropout.WORD),
)
