"""Answers of a call and their references, compared by the rule of ``reference/tolerance.py``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import dispatch
from ..reference import dense, tolerance
from ..reference.tolerance import GRADIENT, OUTPUT, Noise
from .cases import Call, field_of, laid_out


@dataclass(frozen=True)
class Answer:
    """The results of a call and of its backward."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]

    def items(self) -> Iterator[tuple[str, Tensor, float]]:
        """Yield (name, tensor, factor of the rule)."""
        yield "out", self.out, OUTPUT
        yield "lse", self.lse, OUTPUT
        for name, t in self.gradients.items():
            yield f"d{name}", t, GRADIENT

    def to(self, device: str | torch.device) -> Answer:
        """Return the same answer on another device."""
        gradients = {name: t.to(device) for name, t in self.gradients.items()}
        return Answer(self.out.to(device), self.lse.to(device), gradients)


def cotangents(call: Call, generator: torch.Generator | int = 1) -> tuple[Tensor, Tensor]:
    """Return random dout and dlse in the shapes and dtypes of a call's out and lse."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    q, v = call.inputs[0], call.inputs[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = torch.randn(shape, generator=generator, device=generator.device)
        return t.to(device=q.device, dtype=dtype)

    if call.case.dout == "bnhd":
        dout = normal((*q.shape[:-1], v.shape[-1]), q.dtype)
    else:
        shape = (*(1,) * (4 - q.dim()), *q.shape[:-1], v.shape[-1])
        dout = laid_out(lambda *sizes: normal(sizes, q.dtype), call.case.dout, shape)
        dout = dout[0] if call.case.packed else dout
    return dout, normal(rows, wide)


def answer(call: Call, dout: Tensor, dlse: Tensor | None, **overrides: object) -> Answer:
    """Return the answer of rowmax, forward and backward through autograd."""
    leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
    out, lse = call.with_leaves(leaves)(**overrides)
    if not leaves:
        return Answer(out, lse, {})
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    got = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return Answer(out.detach(), lse.detach(), dict(zip(leaves, got, strict=True)))


def inputs_of(call: Call, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return leaves of a call, or their tangents, as fields of ``Tensors``."""
    named, (_, tensors) = dict(leaves), call.problem()
    for name in "qkv":
        if call.case.packed and name in named:
            named[name] = named[name][None]
    if "bias" in named and tensors.bias is not None:
        named["bias"] = named["bias"].view(tensors.bias.shape)
    if "alibi" in named:
        named["heads"] = named.pop("alibi")[None]
    return named


def by_definition(
    call: Call, leaves: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the dense definition over these leaves."""
    problem, tensors = call.problem()
    tensors = tensors._replace(**inputs_of(call, leaves))
    out, lse = dense.attention(problem, tensors, dtype)
    return (out[0], lse[0]) if call.case.packed else (out, lse)


def definition(call: Call, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Answer:
    """Return the answer of the dense definition with every step in ``dtype``."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in call.leaves.items()}
    out, lse = by_definition(call, leaves, dtype)
    if not leaves:
        return Answer(out, lse, {})
    pairs = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse)]
    pairs = [(x, g.to(dtype)) for x, g in pairs if x.requires_grad]  # lse does not depend on v
    got: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        got = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    gradients = {
        name: torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(leaves.items(), got, strict=True)
    }
    return Answer(out.detach(), lse.detach(), gradients)


def refusal(call: Call, backend: str | None) -> str | None:
    """Return why the backend does not compute every result of a call, or None.

    None names no backend: then some backend computes each result.
    """
    if backend is None:
        return None
    problem, _ = call.problem()
    reason = dispatch.refusal(backend, problem, "forward")
    if reason is None and call.leaves:
        reason = dispatch.refusal(backend, problem, "backward")
        lacking = {} if reason else dispatch.lacks(backend, problem, "backward")
        missing = (lacking.get(f"d{field_of(name)}") for name in call.leaves)
        reason = reason or next(filter(None, missing), None)
    return reason


@dataclass(frozen=True)
class Expected:
    """The references of an answer and the noise of each tensor."""

    dtype: torch.dtype
    ref: Answer
    std: Answer
    noise: dict[str, Noise]

    def to(self, device: str | torch.device) -> Expected:
        """Return the same references on another device."""
        return replace(self, ref=self.ref.to(device), std=self.std.to(device))


def expected(call: Call, dout: Tensor, dlse: Tensor | None, device: str | None = None) -> Expected:
    """Return the references of a call. std of float64 is computed in float32: see ``LIMITS``.

    ``device`` is the type of the device that answers, if it is not the call's: the rule allows for
    the rounding of its products.
    """
    dtype = call.inputs[0].dtype
    ref = definition(call, dout, dlse, torch.float64)
    std = definition(call, dout, dlse, torch.float32 if dtype == torch.float64 else dtype)
    problem, tensors = call.problem()
    rows = (ref.out, ref.lse, dout, dlse)
    if call.case.packed:  # the rule needs a batch dimension
        rows = (t if t is None else t[None] for t in rows)
    problem = problem._replace(device=device or problem.device)
    return Expected(dtype, ref, std, tolerance.noise(problem, tensors, *rows))  # pyright: ignore


def complaints(got: Answer, want: Expected) -> list[str]:
    """Return a sentence for each tensor that breaks the rule."""
    found = [
        complaint(name, x, ref, std, want.dtype, factor, want.noise[name])
        for (name, x, factor), (_, ref, _), (_, std, _) in zip(
            got.items(), want.ref.items(), want.std.items(), strict=True
        )
    ]
    return [text for text in found if text is not None]


def complaint(name: str, *given: Any, **rule: Any) -> str | None:
    """Return a sentence if x breaks the rule, or None; arguments are ``tolerance.complaint``'s."""
    text = tolerance.complaint(*given, **rule)
    return text if text is None else f"{name}: {text}"


@contextlib.contextmanager
def poisoned(deterministic: bool = True) -> Iterator[None]:
    """Fill uninitialised memory of torch with NaN (integers: the largest).

    A kernel that does not write a part of its result fails at once. This covers ``torch.empty``,
    ``empty_like``, ``new_empty`` and ``empty_strided`` on every device, not numpy's ``empty``.

    torch fills memory only in deterministic mode. With ``deterministic=False`` rowmax reads that
    the mode is off.
    """
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    # not use_deterministic_algorithms, which imports the compiler (1.5 s of a process)
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    is_on = torch.are_deterministic_algorithms_enabled
    if not deterministic:
        torch.are_deterministic_algorithms_enabled = lambda: False  # read by rowmax
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.are_deterministic_algorithms_enabled = is_on
        torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore
        torch.set_deterministic_debug_mode(before)
