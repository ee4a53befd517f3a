"""The rule by which an answer is right.

``ref`` is the dense definition in float64. ``std`` is the dense definition in the dtype of the
inputs, the result of standard attention. An answer x is right when

    max |x - ref| <= factor max |std - ref| + 2 ulp(max |ref|) + noise   factor 2; gradients 3
    norm(x - ref) <= limit norm(ref)                                     limit by dtype

and it is infinite exactly where ref is. NaN is never right. Next to the largest number of x's dtype
and past it, x, ref and std count as no larger than that number: there infinity is the rounding of
ref.

``noise`` is an error that the tile recurrence cannot avoid and standard attention may. Tiles hold
``P = exp(s - lse)`` and not ``exp(s - m) / l``. One rounding of s and one of lse, each by up to u
of its size in the accumulator, change P by ``u (|s| + |lse|)`` of itself; the exponential and the
product after it add ``2 u``. The terms of ``dS = P (dP - Delta + dLSE)`` carry these errors also
where they cancel. So x may be off by the sum that defines it, over absolute values and times
``u (2 + |s| + |lse|)``. In float32 this is of the size of std's own error; in half precision it is
negligible. Where terms cancel exactly in std (dS of a row that sees one key), ref is 0 and x is
only noise: where norm(ref) is no more than norm(noise), the second line allows norm(noise).

Tensor cores of a GPU compute float32 as three products of tf32. They truncate each sum where others
round, so errors of additions have one sign and grow with the number of additions. A sum over n
takes 3 n / 8 additions; the mean error of each is u of the partial sum (at most 2 u), and partial
sums grow evenly: the total is ``3 n / 16`` u of the sum. Scores are such sums over D, and dP over
Dv. A score ``x = sum q_d k_d`` may be small where its partial sums are large: the rule takes
``|x| + sqrt(sum (q_d k_d)^2)`` as their size. Measured on an H100 (triton 3.6.0), n = 512, where
the term is 96 u: 21 u of that root in the mean square and 101 u at the most, and 18 u of |x| in the
mean where |x| is large; PyTorch's own float32 products: 2.3 u, 12.5 u and 0.2 u. noise contains the
term, and its norm (``cut``) is added to the second line.

In half precision GPUs compute a softcap as ``c (1 - 2 / (exp2(y) + 1))``. The exponential is right
to 4 u of itself, of which at most half reaches the quotient; the quotient and the difference add
2 u. So s is off by up to ``4 c u``, however small it is: in the mean square by ``4 c u / sqrt(3)``.
Measured on an H100: ``0.75 c u`` in the mean square of 3296 rows. lse has the mean error of its
scores. In a row that sees one key, lse is that score, and may be as small. noise contains the term,
and its norm is added to the second line as that of truncation is.

A backward in half precision reads rounded o for ``Delta = dO . o``. The errors of the numbers of o
are independent: each is at most u of half precision and has the mean square ``u^2 / 3``. At four
standard deviations the error of Delta is ``4 u / sqrt(3) sqrt(sum (dO o)^2)``. It is visible where
dP and Delta cancel, as in rows that see one key. The errors of rows are independent, and each
changes every dS of its row by P times itself: the norms of these changes, at one standard
deviation, are added to the second line.

A score ``x = sum q_d k_d`` has D rounded partial sums. Each rounding is of u times ``|x| + sqrt(sum
(q_d k_d)^2)`` at most, and they are independent: in the mean square x is off by ``sqrt(D / 3)`` of
that, times the derivative of s by x. std has such an error too. But in few pairs it may be small by
chance: where a softcap leaves it only to pairs with a small x, where one query sees few keys, where
one row has most of the gradient of a sink. In float32 noise takes it at two standard deviations.
The errors of pairs are independent, and their norms, in the mean square, are added to the second
line. lse has the mean error of its scores, and so has every P of its row.

dP is such a sum too, over Dv, and so is Delta. Standard attention takes Delta from the same dP, so
the error of dP cancels where dP and Delta do. Tiles take ``Delta = dO . o``, and there it stays: in
rows that see few keys, and in sums of dS over keys. Errors of pairs are independent, and so are
those of rows. In float32 the norms of both, in the mean square, are added to the second line.

lse is stored in the accumulator. It is rounded once as a natural logarithm, and once in base 2.
Each error is at most ``u |lse|``, both together ``sqrt(2 / 3) u |lse|`` in the mean square. P and
dS of the row change by that part of themselves. Three standard deviations are added to the second
line of float32: a far key of ALiBi makes |lse| thousands. Errors of rows are independent, except
where rows differ by a number without rounding, as under ALiBi. So a gradient that is one number a
head takes the sum over rows of the sizes of their parts.

A number below the least normal one of float32 may be computed as 0: each term of the sum over rows
that is the gradient of a sink may be off by that number.

Tangents are outputs and second derivatives are gradients: the same factors and limits. Their noise
is that of the weights alone, in the formulas of ``rules/tangent.py``: P is off by ``u (2 + |s| +
|lse|)`` of itself, each other factor by 2 u, and all terms are taken by their absolute values. The
numbers b and c of a row are rounded as Delta is.

Standard attention in half precision overflows with a large scale or softcap. Where ref is finite
and std is not, ``limit`` times max |ref| and times its norm replaces std's error.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.inputs import HEAD_TERMS, Cotangents, Results, Tangents, parameters_of, part_of
from ..call.problem import Problem, Tensors, each_sequence
from ..rules import bound, score
from ..rules.score import ScoreTerms
from . import dense

OUTPUT, GRADIENT = 2.0, 3.0
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
#: a rounding error is proportional to the unit roundoff to first order, so float64 has the limits
#: of float32, scaled; its std is computed in float32
TO_FLOAT64 = 2.0**-29
LIMITS[torch.float64] = LIMITS[torch.float32] * TO_FLOAT64


class Noise(NamedTuple):
    """The noise of a tensor's elements: the largest, and the norm of all.

    ``cut`` is the norm of further errors: tensor cores' truncation, a softcap, dP, Delta, lse.
    """

    largest: float
    norm: float
    cut: float = 0.0


NO_NOISE = Noise(0.0, 0.0)


def complaint(x: Tensor, *given: Any, **rule: Any) -> str | None:
    """Return a sentence on how x breaks the rule, or None; arguments are those of ``compared``."""
    found = compared(x, *given, **rule)
    if not isinstance(found, Bounds):
        return found
    if not found.error <= found.allowed:
        text = f"max error {found.error:.3g}, allowed {found.allowed:.3g}"
        return f"{text} (std has {found.theirs:.3g})"
    if not found.off <= found.limit:
        text = f"norm of the error {found.off:.3g}, allowed {found.limit:.3g}"
        return f"{text}, of the answer {found.size:.3g}"
    return None


def compared(
    x: Tensor,
    ref: Tensor,
    std: Tensor,
    dtype: torch.dtype,
    factor: float = OUTPUT,
    noise: Noise = NO_NOISE,
) -> Bounds | str | None:
    """Return the errors of x and what is allowed, or how x is wrong; None if all are infinite."""
    if x.shape != ref.shape:
        return f"shape {list(x.shape)}, want {list(ref.shape)}"
    x, ref, std = within_range(x.detach(), ref, std, dtype)
    if x.isnan().any():
        where = x.isnan().nonzero()[0].tolist()
        return f"{int(x.isnan().sum())} of {x.numel()} are NaN, the first at {where}"
    finite = ref.isfinite()
    if not torch.equal(x.isfinite(), finite):
        return "not infinite where the definition is"
    if not finite.all():  # an index takes half of the time
        if not torch.equal(x[~finite], ref[~finite]):
            return "not infinite where the definition is"
        x, ref, std = x[finite], ref[finite], std[finite]
    if not ref.numel():
        return None
    return bounds(x, ref, std, dtype, factor, noise)


def within_range(
    x: Tensor, ref: Tensor, std: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, ref and std in float64, clamped to x's dtype where ref nears its end or passes it.

    Numbers within a share ``limit`` of the largest one are near.
    """
    most = torch.finfo(x.dtype).max
    x, ref, std = x.double(), ref.double(), std.double()
    edge = ref.isfinite() & (ref.abs() > most * (1 - LIMITS[dtype]))
    if not edge.any():
        return x, ref, std
    return tuple(torch.where(edge, t.clamp(-most, most), t) for t in (x, ref, std))  # pyright: ignore


class Bounds(NamedTuple):
    """The errors of an answer next to those that the rule allows."""

    error: float  # the largest of an element
    allowed: float
    theirs: float  # the largest error of std
    off: float  # the norm of all errors
    limit: float
    size: float  # the norm of ref

    @property
    def share(self) -> float:
        """Return the error as a share of what is allowed, the larger of both comparisons."""
        pairs = ((self.error, self.allowed), (self.off, self.limit))
        return max(x / most if most else math.inf if x else 0.0 for x, most in pairs)


def bounds(
    x: Tensor, ref: Tensor, std: Tensor, dtype: torch.dtype, factor: float, noise: Noise
) -> Bounds:
    """Return the errors of x and what the rule allows, over numbers in float64 that are finite."""
    scale = TO_FLOAT64 if dtype == torch.float64 else 1.0
    error, largest = (x - ref).abs().max().item(), ref.abs().max().item()
    theirs = (std - ref).abs().max().item() * scale
    their_norm = (std - ref).norm().item() * scale
    if not math.isfinite(theirs):
        theirs, their_norm = LIMITS[dtype] * largest, LIMITS[dtype] * ref.norm().item()
    allowed = factor * theirs + 2 * ulp(largest, dtype) + noise.largest
    size, off = ref.norm().item(), (x - ref).norm().item()
    # If std itself exceeds the limit (dS of a row that sees one key cancels, and is noise),
    # every answer of this dtype would: the factor decides instead.
    limit = max(LIMITS[dtype] * size, factor * their_norm)
    if size <= noise.norm:
        limit = max(limit, noise.norm)
    return Bounds(error, allowed, theirs, off, limit + noise.cut, size)


def share(x: Tensor, *given: Any, **rule: Any) -> float:
    """Return the error of x as a share of what the rule allows, inf if x is wrong otherwise."""
    found = compared(x, *given, **rule)
    if isinstance(found, str):
        return math.inf
    return 0.0 if found is None else found.share


def relative_error(x: Tensor, ref: Tensor) -> float:
    """Return ``norm(x - ref) / norm(ref)`` where ref is finite."""
    finite = ref.isfinite()
    off, size = (x.double() - ref)[finite].norm().item(), ref[finite].norm().item()
    return off / size if size else off


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the spacing of ``dtype``'s numbers at a value."""
    if value == 0:
        return 0.0
    info = torch.finfo(dtype)
    return max(info.eps * 2.0 ** math.floor(math.log2(value)), info.tiny)


def noise(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> dict[str, Noise]:
    """Return the noise of out, lse and each gradient, from the definition's out and lse.

    All have a batch dimension. Numbers of k and v that are not finite count as masked.
    """
    every = (tensors.q, tensors.k, tensors.v, dout, out)
    q, k, v, dO, o = (t.abs() for t in _heads_first(*every))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    dL = torch.zeros_like(lse) if dlse is None else dlse.double().abs()
    P = _weights(problem._replace(dropout_p=0.0), tensors)
    R = _weights(problem, tensors) if problem.dropout_p else P
    size = lse.masked_fill(lse.isinf(), 0.0)[..., None]
    s = (size + P.log()).masked_fill(P == 0, 0.0).abs()
    products = (dO @ v.transpose(2, 3)), (dO * o).sum(-1, keepdim=True) + dL[..., None]
    sigma = lse if tensors.sink is None else tensors.sink.detach().double()[:, None]
    by_parameter = _by_parameter(problem, tensors)

    def sums(weight: Tensor, of_sink: Tensor, of_dP: float, delta: Tensor) -> dict[str, Tensor]:
        """Return the sums over absolute values: P times weight, dP and Delta with more."""
        dP = R * (weight + of_dP) * products[0]
        dS = dP + P * dP.sum(-1, keepdim=True) + P * (weight * products[1] + delta)
        found = {"out": (R * weight) @ v, "lse": (P * weight).sum(-1)}
        found["dv"] = (R * weight).transpose(2, 3) @ dO
        found["dq"] = problem.scale * dS @ k
        found["dk"] = problem.scale * dS.transpose(2, 3) @ q
        for name in ("dk", "dv"):
            found[name] = found[name].unflatten(1, (problem.hk, problem.group)).sum(2)
        if tensors.bias is not None:
            found["dbias"] = _of_bias(problem, tensors, dS)
        if tensors.sink is not None:
            row = of_sink * (sigma - lse).exp() * (products[1][..., 0] + dP.sum(-1))
            found["dsink"] = row.sum((0, 2))
        for name, each in by_parameter.items():
            found[f"d{name}"] = (dS * each).sum((0, 2, 3))
        return found

    ratio = torch.finfo(problem.dtype).eps / torch.finfo(problem.accumulator).eps
    rounded = 4 / math.sqrt(3) * ratio * (dO * o).square().sum(-1, keepdim=True).sqrt()
    delta = rounded if ratio > 1 else torch.zeros_like(rounded)
    of_score = torch.zeros_like(s)
    if ratio == 1:
        of_score = math.sqrt(problem.d / 3) * _partial_sums(problem, tensors)
    of_sink = sigma.abs() + lse.abs() + 2 * (P * of_score).norm(dim=-1)
    every = sums(2 + s + 2 * of_score + size.abs(), 2 + of_sink, 0.0, delta)
    cut = {name: torch.zeros_like(t) for name, t in every.items()}
    if problem.device == "cuda" and problem.dtype == torch.float32:
        c, off = 3 / 16, _partial_sums(problem, tensors)
        mean = (P * off).sum(-1, keepdim=True)  # LSE has the mean error of its scores
        weight, of_sink = c * problem.d * (off + mean), c * problem.d * mean[..., 0]
        cut = sums(weight, of_sink, c * problem.dv, torch.zeros_like(delta))
    elif problem.device == "cuda" and ratio > 1 and problem.softcap > 0:
        of_cap = 4 / math.sqrt(3) * problem.softcap * torch.ones_like(size)
        cut = sums(of_cap + of_cap, of_cap[..., 0], 0.0, torch.zeros_like(delta))
        cut["lse"] = cut["lse"] / 2  # without the error of lse in P
    u = torch.finfo(problem.accumulator).eps / 2
    if ratio > 1:
        spread = _spread(problem, tensors, P * delta / 4, by_parameter)
        spread["dsink"] = ((sigma - lse).exp() * delta[..., 0] / 4).norm().item()
    else:
        given = (out, lse, dout, dlse)
        spread = _of_independent_errors(problem, tensors, (P, R, of_score), given, by_parameter)
    flushed = _flushed(problem, lse)

    def norm_of_errors(name: str, t: Tensor) -> float:
        total = u * math.hypot(t.norm().item(), spread.get(name, 0.0))
        return total + flushed.get(name, 0.0) * math.sqrt(t.numel())

    return {
        name: Noise(
            (u * (t + cut[name]).max().item() if t.numel() else 0.0) + flushed.get(name, 0.0),
            u * t.norm().item(),
            norm_of_errors(name, cut[name]),
        )
        for name, t in every.items()
    }


def _flushed(problem: Problem, lse: Tensor) -> dict[str, float]:
    """Return the most that numbers computed as 0 change the sums over rows, by name."""
    tiny = torch.finfo(problem.accumulator).tiny * lse.numel() / problem.hq
    return {"dsink": tiny, "dtsink": tiny}


def _of_independent_errors(
    problem: Problem,
    tensors: Tensors,
    weights: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    by_parameter: dict[str, Tensor],
) -> dict[str, float]:
    """Return the norms of errors from roundings of scores, lse, dP and Delta, over u.

    Args:
        weights: P, P R, and the errors of scores over u, ``[B, Hq, Nq, Nk]``.
        given: out, lse, dout and dlse.
    """
    (P, R, of_score), (out, lse, dout, dlse) = weights, given
    q, k, v, dO, o = _heads_first(tensors.q, tensors.k, tensors.v, dout, out)
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    dP, delta = dO @ v.transpose(2, 3), (dO * o).sum(-1, keepdim=True)
    of_row = delta if dlse is None else delta - dlse.double()[..., None]
    dS = R * dP - P * of_row

    of_sum = math.sqrt(problem.dv / 3)
    of_dP = of_sum * (dP.abs() + (dO.square() @ v.square().transpose(2, 3)).sqrt())
    of_delta = of_sum * (delta.abs() + (dO * o).square().sum(-1, keepdim=True).sqrt())
    from_scores = ((R * dP - P * delta) * of_score).norm(dim=-1, keepdim=True)
    of_delta = torch.hypot(of_delta, from_scores)
    mean = (P * of_score).norm(dim=-1, keepdim=True)  # the error of lse from its scores
    far = lse.masked_fill(lse.isinf(), 0.0).abs()[..., None]
    of_lse = torch.hypot(3 * math.sqrt(2 / 3) * far, mean)

    pairs = (R * of_dP).square() + (dS * of_score).square()
    weighed = (R * of_score).square() + (R * of_lse).square()
    found = {
        "out": (weighed @ v.square()).sum().sqrt(),
        "lse": mean.norm(),
        "dv": (weighed.transpose(2, 3) @ dO.square()).sum().sqrt(),
        "dq": problem.scale * (pairs @ k.square()).sum().sqrt(),
        "dk": problem.scale * (pairs.transpose(2, 3) @ q.square()).sum().sqrt(),
        "dbias": pairs.sum().sqrt(),
    }
    for name, each in by_parameter.items():
        rows = (dS * of_lse * each).sum(3).abs().sum((0, 2)).norm()
        found[f"d{name}"] = torch.hypot((pairs * each.square()).sum().sqrt(), rows)
    if tensors.sink is not None:
        of_sink = (tensors.sink.detach().double()[:, None] - lse).exp()
        parts = (of_sink[..., None] * of_row * of_lse).abs().sum((0, 2)).norm()
        found["dsink"] = torch.hypot(parts, (of_sink[..., None] * of_delta).norm())
    found = {name: t.item() for name, t in found.items()}
    of_rows = _spread(problem, tensors, torch.hypot(dS * of_lse, P * of_delta), by_parameter)
    return {name: math.hypot(norm, of_rows.get(name, 0.0)) for name, norm in found.items()}


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return ``[B, H, N, D]`` in float64, numbers that are not finite as 0."""
    return [t.detach().double().nan_to_num(0.0, 0.0, 0.0).transpose(1, 2) for t in tensors]


def _spread(
    problem: Problem, tensors: Tensors, dS: Tensor, by_parameter: dict[str, Tensor]
) -> dict[str, float]:
    """Return the norms of the gradients' errors from independent errors of rows.

    dS ``[B, Hq, Nq, Nk]`` is the change by the error of its row, at one standard deviation.
    """
    q, k = _heads_first(tensors.q, tensors.k)
    k = k.repeat_interleave(problem.group, 1)
    found = {
        "dq": problem.scale * (dS @ k).norm().item(),
        "dk": problem.scale * (dS.square().transpose(2, 3) @ q.square()).sum().sqrt().item(),
    }
    if tensors.bias is not None:
        each = _by_sequence(problem, tensors, dS) if problem.varlen else dS
        if tensors.bias.shape[3] == 1:
            each = each.sum(3)  # the pairs of a row have one error
        found["dbias"] = each.norm().item()
    for name, each in by_parameter.items():
        found[f"d{name}"] = (dS * each).sum(3).norm().item()
    return found


def second_noise(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: Results,
    cotangents: Cotangents,
) -> dict[str, Noise]:
    """Return the noise of tout, tlse and each gradient of inputs (dq) and tangents (dtq).

    ``results`` is of the definition; all have a batch dimension.
    """

    def size(t: Tensor | None, like: Tensor) -> Tensor:
        t = torch.zeros_like(like, dtype=torch.float64) if t is None else t.detach().double()
        return t.nan_to_num(0.0, 0.0, 0.0).abs()

    def rows(t: Tensor | None, like: Tensor) -> Tensor:
        return size(t, like).transpose(1, 2)

    out, lse, tout, tlse = results
    (q, tq), (k, tk), (v, tv) = (
        (rows(getattr(tensors, n), tensors.q), rows(getattr(tangents, n), getattr(tensors, n)))
        for n in "qkv"
    )
    k, tk, v, tv = (t.repeat_interleave(problem.group, 1) for t in (k, tk, v, tv))
    e, g = (rows(t, out) for t in (cotangents.out, cotangents.tout))
    a, at = (size(t, lse)[..., None] for t in (cotangents.lse, cotangents.tlse))
    o, to, tl = rows(out, out), rows(tout, out), size(tlse, lse)[..., None]
    P = _weights(problem._replace(dropout_p=0.0), tensors)
    R = _weights(problem, tensors) if problem.dropout_p else P
    far = lse.masked_fill(lse.isinf(), 0.0)[..., None]
    s = (far + P.log()).masked_fill(P == 0, 0.0).abs()
    w = 4 + s + far.abs()  # the error of P, and 2 u of the factor next to it
    bend = 1.0 / problem.softcap if problem.softcap > 0 else 0.0
    x = problem.scale * (tq @ k.transpose(2, 3) + q @ tk.transpose(2, 3))  # |x'|
    each = _by_parameter(problem, tensors)
    ts = x
    if tangents.bias is not None:
        tb = size(tangents.bias, tensors.q)
        ts = ts + (_placed(problem, tensors, tb) if problem.varlen else tb)
    if tangents.heads is not None:
        for row, by in zip(size(tangents.heads, tensors.q), each.values(), strict=True):
            ts = ts + row[:, None, None] * by
    vt = v.transpose(2, 3)
    ratio = torch.finfo(problem.dtype).eps / torch.finfo(problem.accumulator).eps
    half = 4 / math.sqrt(3) * ratio if ratio > 1 else 0.0
    b = (g * o).sum(-1, keepdim=True) + at
    c = (g * to).sum(-1, keepdim=True) + (e * o).sum(-1, keepdim=True) + a
    off_b = half * (g * o).square().sum(-1, keepdim=True).sqrt()
    off_c = half * ((g * to).square() + (e * o).square()).sum(-1, keepdim=True).sqrt()
    D = ts + tl
    dts = R * w * (g @ vt) + P * (w * b + off_b)
    ds = R * w * (g @ tv.transpose(2, 3) + e @ vt) + P * (w * c + off_c) + D * dts
    dx = ds + 2 * bend * x * dts
    found = {"tlse": (P * w * ts).sum(-1)}
    found["tout"] = (R * w) @ tv + (R * w * D) @ v + found["tlse"][..., None] * o
    found["dv"] = (R * w * D).transpose(2, 3) @ g + (R * w).transpose(2, 3) @ e
    found["dtv"] = (R * w).transpose(2, 3) @ g
    found["dq"] = problem.scale * (dx @ k + dts @ tk)
    found["dtq"] = problem.scale * dts @ k
    found["dk"] = problem.scale * (dx.transpose(2, 3) @ q + dts.transpose(2, 3) @ tq)
    found["dtk"] = problem.scale * dts.transpose(2, 3) @ q
    for name in ("dk", "dtk", "dv", "dtv"):
        found[name] = found[name].unflatten(1, (problem.hk, problem.group)).sum(2)
    for prefix, d in (("d", ds), ("dt", dts)):
        if tensors.bias is not None:
            found[f"{prefix}bias"] = _of_bias(problem, tensors, d)
        for name, by in each.items():
            found[f"{prefix}{name}"] = (d * by).sum((0, 2, 3))
    if tensors.sink is not None:
        sigma = tensors.sink.detach().double()[:, None]
        weight = (sigma - lse).exp() * (4 + sigma.abs() + lse.abs())
        away = tl[..., 0] + size(tangents.sink, tensors.sink)[:, None]
        found["tlse"] = found["tlse"] + weight * (away - tl[..., 0])
        row_b, row_c = (t[..., 0] + off[..., 0] for t, off in ((b, off_b), (c, off_c)))
        found["dtsink"] = (weight * row_b).sum((0, 2))
        found["dsink"] = (weight * (row_c + away * row_b)).sum((0, 2))
    return _second_noise(found, problem, lse)


def _second_noise(found: dict[str, Tensor], problem: Problem, lse: Tensor) -> dict[str, Noise]:
    """Return the noise of sums over absolute values, in units of the roundoff."""
    u, flushed = torch.finfo(problem.accumulator).eps / 2, _flushed(problem, lse)
    return {
        name: Noise(
            (u * t.max().item() if t.numel() else 0.0) + flushed.get(name, 0.0),
            u * t.norm().item(),
            flushed.get(name, 0.0) * math.sqrt(t.numel()),
        )
        for name, t in found.items()
    }


def _placed(problem: Problem, tensors: Tensors, bias: Tensor) -> Tensor:
    """Return ``[1, Hq, total_q, total_k]`` of the bias of a packed call; inverts _by_sequence."""
    whole = bias.new_zeros(1, problem.hq, problem.total_q, problem.total_k)
    for b, (rows, cols, one, _) in enumerate(each_sequence(problem, tensors)):
        own = {"b": slice(b, b + 1), "i": slice(one.nq), "j": slice(one.nk)}
        whole[:, :, rows, cols] = part_of("bias", bias, **own)  # pyright: ignore
    return whole


def _partial_sums(problem: Problem, tensors: Tensors) -> Tensor:
    """Return the size of each score's partial sums, times the derivative of the score by q.k."""
    x = _products(problem, tensors)
    squares = (t.detach().double().square() for t in (tensors.q, tensors.k))
    norms = _products(problem, tensors._replace(**dict(zip("qk", squares, strict=True)))).sqrt()
    size = problem.scale * (x.abs() + norms)
    if problem.softcap > 0:
        size = size * (1 - torch.tanh(problem.scale * x / problem.softcap).square())
    return size


def _products(problem: Problem, tensors: Tensors) -> Tensor:
    """Return ``q_i . k_j``, ``[B, Hq, Nq, Nk]``; numbers that are not finite count as 0."""
    q, k = _heads_first(tensors.q, tensors.k)
    return q @ k.repeat_interleave(problem.group, 1).transpose(2, 3)


def _weights(problem: Problem, tensors: Tensors) -> Tensor:
    """Return P R, ``[B, Hq, Nq, Nk]``: attention over values that are the keys' unit vectors."""
    n = tensors.k.shape[1]
    each = torch.eye(n, dtype=torch.float64, device=tensors.q.device)[None, :, None]
    each = each.expand(tensors.k.shape[0], n, problem.hk, n)
    with torch.no_grad():
        out, _ = dense.attention(problem._replace(dv=n), tensors._replace(v=each))
    return out.transpose(1, 2)


def _by_parameter(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    """Return the size of the derivative of each score by each parameter of heads.

    By the argument's name, with the parameter's where it has several (``stanh.a``).
    """
    if tensors.heads is None:
        return {}
    names = parameters_of(problem.heads)
    rows = dict(zip(names, tensors.heads.detach().double()[:, :, None, None], strict=True))
    x = _products(problem, tensors)
    distance = _distances(problem, tensors) if problem.distance else None
    terms = ScoreTerms(problem.scale, distance=distance, **rows)
    if problem.softcap > 0:
        terms = terms._replace(inner=problem.scale / problem.softcap, cap=problem.softcap)
    _, y = bound(score.score, tanh=torch.tanh)(x, terms)
    one = torch.ones_like(x)
    return {
        term if len(HEAD_TERMS[term].parameters) == 1 else f"{term}.{name}": (
            score.head_gradient(one, x, y, terms, name).abs()
        )
        for term in problem.heads
        for name in HEAD_TERMS[term].parameters
    }


def _distances(problem: Problem, tensors: Tensors) -> Tensor:
    """Return ``|i + offset - j|``, ``[B|1, 1, Nq, Nk]``, or ``[1, 1, total_q, total_k]``."""
    if problem.varlen:
        whole = tensors.q.new_zeros(1, 1, problem.total_q, problem.total_k, dtype=torch.float64)
        for rows, cols, one, parts in each_sequence(problem, tensors):
            whole[:, :, rows, cols] = _distances(one, parts)
        return whole
    i, j = dense._positions(problem, tensors)
    shift = 0 if problem.positions is None else problem.positions.shift
    return (i + shift - j).abs().double()


def _of_bias(problem: Problem, tensors: Tensors, dS: Tensor) -> Tensor:
    """Return the sums of dS over the axes that the bias broadcasts."""
    assert tensors.bias is not None
    each = _by_sequence(problem, tensors, dS) if problem.varlen else dS
    over = [n for n in range(4) if tensors.bias.shape[n] == 1]
    return each.sum(over) if over else each


def _by_sequence(problem: Problem, tensors: Tensors, dS: Tensor) -> Tensor:
    """Return ``[S, Hq, Nq, Nk]`` of ``[1, Hq, total_q, total_k]``, zero where there is no pair."""
    parts = dS.new_zeros(problem.batch, problem.hq, problem.nq, problem.nk)
    for b, (rows, cols, one, _) in enumerate(each_sequence(problem, tensors)):
        parts[b, :, : one.nq, : one.nk] = dS[0, :, rows, cols]
    return parts
