"""The rule by which an answer is right, and the two answers that it is measured by.

``ref`` is the dense definition in float64 and ``std`` the dense definition in the dtype of the
inputs, which is what standard attention would have given. An answer x is right when

    max |x - ref| <= factor max |std - ref| + 2 ulp(max |ref|)      (factor 2; gradients 3)
    norm(x - ref) <= limit norm(ref)                                (limit by dtype)

and when it is infinite exactly where ref is. NaN is never right.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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


def references(call: Call, dout: Tensor, dlse: Tensor | None) -> tuple[Answer, Answer]:
    """(ref, std) of a call. For float64, std is float32: see ``LIMITS``."""
    dtype = call.inputs[0].dtype
    ref = definition(call, dout, dlse, torch.float64)
    return ref, definition(call, dout, dlse, torch.float32 if dtype == torch.float64 else dtype)


def complaints(got: Answer, ref: Answer, std: Answer, dtype: torch.dtype) -> list[str]:
    """A sentence for each tensor that breaks the rule; none when all is right."""
    expected = {name: (r, s) for (name, r, _), (_, s, _) in zip(ref.items(), std.items(), strict=True)}
    found = [
        complaint(name, x, *expected[name], dtype, factor) for name, x, factor in got.items()
    ]
    return [text for text in found if text is not None]


def complaint(
    name: str, x: Tensor, ref: Tensor, std: Tensor, dtype: torch.dtype, factor: float = OUTPUT
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
    allowed = factor * theirs + 2 * _ulp(ref.abs().max().item(), x, dtype)
    if not error <= allowed:
        return f"{name}: max error {error:.3g}, allowed {allowed:.3g} (std has {theirs:.3g})"
    size, off = ref.norm().item(), (x - ref).norm().item()
    # Where std itself is past the limit (what cancels, such as dS of a row that sees one key,
    # has noise for a value), no answer of this dtype could keep it: the factor rules instead.
    limit = max(LIMITS[dtype] * size, factor * (std - ref).norm().item() * scale)
    if not off <= limit:
        return f"{name}: norm of the error {off:.3g}, allowed {limit:.3g}, of the answer {size:.3g}"
    return None


def _ulp(value: float, x: Tensor, dtype: torch.dtype) -> float:
    """The spacing of ``dtype``'s numbers at a value."""
    if value == 0:
        return 0.0
    return max(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value)), torch.finfo(dtype).tiny)


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
