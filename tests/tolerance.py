"""The rule by which an answer is right, and the answers that it is measured by.

``ref`` is the dense definition in float64 and ``std`` the dense definition in the dtype of the
inputs, which is what standard attention would have given. An answer x is right when

    max |x - ref| <= factor max |std - ref| + 2 ulp(max |ref|) + noise   (factor 2; gradients 3)
    norm(x - ref) <= limit norm(ref)                                     (limit by dtype)

and when it is infinite exactly where ref is. NaN is never right.

``noise`` is what the tile recurrence cannot avoid and standard attention may. Tiles hold
``P = exp(s - lse)`` and not ``exp(s - m) / l``, so one rounding of s and one of lse, each by up
to u of its size in the accumulator, move P by ``u (|s| + |lse|)`` of itself; another ``2 u`` is
that of the exponential and the product after it. And dS is a difference, ``dP - Delta + dLSE``,
whose terms carry these errors also where they cancel. So x may be off by the sum that defines it,
taken over absolute values and weighed with ``u (2 + |s| + |lse|)``. In float32 this is of the
size of std's own error; for half precision it vanishes beside it.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmax.problem import Problem, Tensors, each_sequence
from rowmax.reference import dense

from .cases import Call

OUTPUT, GRADIENT = 2.0, 3.0
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
#: to first order a rounding error is proportional to the unit roundoff, so what float64 may do
#: is what float32 may do, scaled
LIMITS[torch.float64] = LIMITS[torch.float32] * 2.0**-29


@dataclass(frozen=True)
class Answer:
    """What a call and its backward give."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]

    def items(self) -> Iterator[tuple[str, Tensor, float]]:
        """(name, tensor, factor of the rule)."""
        yield "out", self.out, OUTPUT
        yield "lse", self.lse, OUTPUT
        for name, t in self.gradients.items():
            yield f"d{name}", t, GRADIENT


def cotangents(call: Call, generator: torch.Generator | int = 1) -> tuple[Tensor, Tensor]:
    """Random dout and dlse of a call, in the shapes and dtypes that it returns."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    q, v = call.inputs[0], call.inputs[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = torch.randn(shape, generator=generator, device=generator.device)
        return t.to(device=q.device, dtype=dtype)

    return normal((*q.shape[:-1], v.shape[-1]), q.dtype), normal(rows, wide)


def answer(call: Call, dout: Tensor, dlse: Tensor | None, **overrides: object) -> Answer:
    """What rowmax gives, forward and backward through autograd."""
    leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
    out, lse = call.with_leaves(leaves)(**overrides)
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    got = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return Answer(out.detach(), lse.detach(), dict(zip(leaves, got, strict=True)))


def definition(call: Call, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Answer:
    """What the dense definition gives, every step of it in ``dtype``."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in call.leaves.items()}
    problem, tensors = call.problem()
    q, k, v = (leaves[n][None] if call.case.packed else leaves[n] for n in "qkv")
    named = {name: leaves[name] for name in ("bias", "sink") if name in leaves}
    if "bias" in named and tensors.bias is not None:
        named["bias"] = named["bias"].view(tensors.bias.shape)
    tensors = tensors._replace(q=q, k=k, v=v, **named)
    out, lse = dense.attention(problem, tensors, dtype)
    if call.case.packed:
        out, lse = out[0], lse[0]
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    got = torch.autograd.grad(
        outputs,
        list(leaves.values()),
        [g.to(dtype) for g in grads],
        allow_unused=True,
    )
    gradients = {
        name: torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(leaves.items(), got, strict=True)
    }
    return Answer(out.detach(), lse.detach(), gradients)


@dataclass(frozen=True)
class Expected:
    """What an answer is held to."""

    dtype: torch.dtype
    ref: Answer
    std: Answer
    noise: dict[str, float]


def expected(call: Call, dout: Tensor, dlse: Tensor | None) -> Expected:
    """The references of a call. For float64, std is float32: see ``LIMITS``."""
    dtype = call.inputs[0].dtype
    ref = definition(call, dout, dlse, torch.float64)
    std = definition(call, dout, dlse, torch.float32 if dtype == torch.float64 else dtype)
    return Expected(dtype, ref, std, _noise(call, dout, dlse, ref))


def _noise(call: Call, dout: Tensor, dlse: Tensor | None, ref: Answer) -> dict[str, float]:
    """The noise of each tensor: see above. The letters are those of the backward's formulas."""
    problem, tensors = call.problem()
    packed, group = call.case.packed, problem.group
    q, k, v, dO, o = (
        (t[None] if packed else t).double().abs().transpose(1, 2)
        for t in (*call.inputs[:3], dout, ref.out)
    )
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    lse = ref.lse[None] if packed else ref.lse
    dL = torch.zeros_like(lse) if dlse is None else (dlse[None] if packed else dlse).double().abs()
    P = _weights(problem._replace(dropout_p=0.0), tensors)
    PR = _weights(problem, tensors) if problem.dropout_p else P
    size = lse.masked_fill(lse.isinf(), 0.0)[..., None]
    s = (size + P.log()).masked_fill(P == 0, 0.0)
    weight = 2 + s.abs() + size.abs()
    row = (dO * o).sum(-1, keepdim=True) + dL[..., None]
    PR = PR * weight
    dP = PR * (dO @ v.transpose(2, 3))
    dS = dP + P * dP.sum(-1, keepdim=True) + P * weight * row
    sums = {"out": PR @ v, "lse": (P * weight).sum(-1), "dv": PR.transpose(2, 3) @ dO}
    sums["dq"] = problem.scale * dS @ k
    sums["dk"] = problem.scale * dS.transpose(2, 3) @ q
    for name in ("dk", "dv"):
        sums[name] = sums[name].unflatten(1, (problem.hk, group)).sum(2)
    if tensors.bias is not None:
        dS = _by_sequence(problem, tensors, dS) if packed else dS
        over = [n for n in range(4) if tensors.bias.shape[n] == 1]
        sums["dbias"] = dS.sum(over) if over else dS
    if tensors.sink is not None:
        sigma = tensors.sink.double()[:, None]
        P_sink = (2 + sigma.abs() + lse.abs()) * (sigma - lse).exp()
        sums["dsink"] = (P_sink * (row[..., 0] + dP.sum(-1))).sum((0, 2))
    u = torch.finfo(problem.accumulator).eps / 2
    return {name: u * t.max().item() if t.numel() else 0.0 for name, t in sums.items()}


def _weights(problem: Problem, tensors: Tensors) -> Tensor:
    """P R, ``[B, Hq, Nq, Nk]``: what attention gives when each value stands for its own key."""
    n = tensors.k.shape[1]
    each = torch.eye(n, dtype=torch.float64, device=tensors.q.device)[None, :, None]
    each = each.expand(tensors.k.shape[0], n, problem.hk, n)
    out, _ = dense.attention(problem._replace(dv=n), tensors._replace(v=each))
    return out.transpose(1, 2)


def _by_sequence(problem: Problem, tensors: Tensors, dS: Tensor) -> Tensor:
    """``[1, Hq, total_q, total_k]`` -> ``[S, Hq, Nq, Nk]``, zero where there is no pair."""
    parts = dS.new_zeros(problem.batch, problem.hq, problem.nq, problem.nk)
    for b, (rows, cols, one, _) in enumerate(each_sequence(problem, tensors)):
        parts[b, :, : one.nq, : one.nk] = dS[0, :, rows, cols]
    return parts


def complaints(got: Answer, want: Expected) -> list[str]:
    """A sentence for each tensor that breaks the rule; none when all is right."""
    found = [
        complaint(name, x, ref, std, want.dtype, factor, want.noise[name])
        for (name, x, factor), (_, ref, _), (_, std, _) in zip(
            got.items(), want.ref.items(), want.std.items(), strict=True
        )
    ]
    return [text for text in found if text is not None]


def complaint(
    name: str,
    x: Tensor,
    ref: Tensor,
    std: Tensor,
    dtype: torch.dtype,
    factor: float = OUTPUT,
    noise: float = 0.0,
) -> str | None:
    """What is wrong with x by the rule, or None."""
    if x.shape != ref.shape:
        return f"{name}: shape {list(x.shape)}, want {list(ref.shape)}"
    x, ref, std = x.detach().double(), ref.double(), std.double()
    if x.isnan().any():
        where = x.isnan().nonzero()[0].tolist()
        return f"{name}: {int(x.isnan().sum())} of {x.numel()} are NaN, the first at {where}"
    finite = ref.isfinite()
    if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite], ref[~finite]):
        return f"{name}: not infinite where the definition is"
    x, ref, std = x[finite], ref[finite], std[finite]
    if x.numel() == 0:
        return None
    scale = 2.0**-29 if dtype == torch.float64 else 1.0
    error, theirs = (x - ref).abs().max().item(), (std - ref).abs().max().item() * scale
    allowed = factor * theirs + 2 * _ulp(ref.abs().max().item(), dtype) + noise
    if not error <= allowed:
        return f"{name}: max error {error:.3g}, allowed {allowed:.3g} (std has {theirs:.3g})"
    size, off = ref.norm().item(), (x - ref).norm().item()
    # Where std itself is past the limit (what cancels, such as dS of a row that sees one key,
    # has noise for a value), no answer of this dtype could keep it: the factor rules instead.
    limit = max(LIMITS[dtype] * size, factor * (std - ref).norm().item() * scale)
    if not off <= limit:
        return f"{name}: norm of the error {off:.3g}, allowed {limit:.3g}, of the answer {size:.3g}"
    return None


def _ulp(value: float, dtype: torch.dtype) -> float:
    """The spacing of ``dtype``'s numbers at a value."""
    if value == 0:
        return 0.0
    return max(
        torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value)), torch.finfo(dtype).tiny
    )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised is full of NaN (integers: the largest).

    What forgets to write a part of its result is seen at once. Covers ``torch.empty``,
    ``empty_like``, ``new_empty``, ``empty_strided``, on every device; not numpy's ``empty``.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
