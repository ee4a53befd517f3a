"""Checks of an installation: each feature, on each backend, against the float64 definition.

Out, lse and every gradient must meet the rule of ``reference/tolerance.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import rowmax

from ..attention import arguments
from ..call import dispatch
from ..call.inputs import Tensors
from ..call.normalize import normalized
from ..call.problem import Problem, problem_of
from ..reference import dense, tolerance
from ..testing.cases import field_of
from .features import FEATURES, Call, Feature, Maker

Values = dict[str, Tensor]  # out, lse, dq, dk, dv, and dbias and dsink where the call has them


@dataclass(frozen=True)
class Result:
    """One feature on one backend."""

    forward: float | None = None  # |x - ref| / |ref|, the worst of out and lse; None if refused
    gradients: float | None = None  # the worst of the gradients
    wrong: tuple[str, ...] = ()  # a sentence for each tensor that breaks the rule
    refusal: str | None = None  # why the backend refuses the call, or some of its gradients
    left_out: bool = False  # not run: no time was left
    #: the errors of forward and gradients as shares of what the rule allows
    shares: tuple[float | None, float | None] = (None, None)

    @property
    def ok(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Checks:
    """A table of results: a row a feature, a column a backend."""

    device: str
    dtype: str
    backends: tuple[str, ...]
    absent: dict[str, str]  # the reason why a backend does not run here, by its name
    rows: dict[str, dict[str, Result]]

    @property
    def ok(self) -> bool:
        return all(result.ok for row in self.rows.values() for result in row.values())

    @property
    def count(self) -> tuple[int, int]:
        """Return (right, checked); a refused call is not checked."""
        results = [r for row in self.rows.values() for r in row.values() if r.forward is not None]
        return sum(r.ok for r in results), len(results)

    @property
    def largest_share(self) -> float | None:
        """Return the largest error as a share of what the rule allows, None if none is known."""
        results = [r for row in self.rows.values() for r in row.values()]
        return max((x for r in results for x in r.shares if x is not None), default=None)

    @property
    def left_out(self) -> int:
        """Return the number of checks that did not fit into the time."""
        return sum(result.left_out for row in self.rows.values() for result in row.values())

    @property
    def errors(self) -> list[str]:
        """Return a line for each tensor that breaks the rule."""
        return [
            f"{feature}, {name}: {text}"
            for feature, row in self.rows.items()
            for name in self.backends
            for text in row[name].wrong
        ]


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that attention mostly runs in on this device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def find_backends(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends that run on a device, and the reason of each other one."""
    call = FEATURES[0].make(Maker(device, usual_dtype(device), 0))
    problem, _ = _build_problem(call, call.leaves())
    candidates = [name for name in dispatch.NAMES if name != "reference"]
    reasons = {name: dispatch.refusal(name, problem, "forward") for name in candidates}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    return tuple(name for name in candidates if name not in absent), absent


def run_checks(
    device: torch.device,
    names: tuple[str, ...] | None = None,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
    features: tuple[Feature, ...] = FEATURES,
) -> Checks:
    """Check every feature on the named backends, by default on all that run here."""
    runnable, absent = find_backends(device)
    names = runnable if names is None else names
    rows: dict[str, dict[str, Result]] = {}
    for feature in features:
        show(progress_line(len(rows) * len(names), len(features) * len(names), feature, names))
        rows[feature.name] = check_feature(feature, device, names, seed)
    return collect(device, names, absent, rows)


def progress_line(done: int, total: int, feature: Feature, names: tuple[str, ...]) -> str:
    """Return the line of progress before a check."""
    return f"Checks: {done} of {total} done; next: {feature.name}, on {' and '.join(names)}"


def collect(
    device: torch.device,
    names: tuple[str, ...],
    absent: dict[str, str],
    rows: dict[str, dict[str, Result]],
) -> Checks:
    """Return the table of results."""
    dtype = str(usual_dtype(device)).removeprefix("torch.")
    return Checks(str(device), dtype, names, absent, rows)


def check_feature(
    feature: Feature, device: torch.device, names: tuple[str, ...], seed: int
) -> dict[str, Result]:
    """Return the result of one feature on each of the backends."""
    maker = Maker(device, feature.dtype or usual_dtype(device), seed)
    call = feature.make(maker)
    dout = maker.normal(*call.q.shape[:-1], call.v.shape[-1])
    dlse = maker.normal(*call.q.shape[:-3], call.q.shape[-2], call.q.shape[-3], wide=True)
    judge, leaves = Judge(call, dout, dlse), call.leaves()
    problem = judge.problem
    results = {}
    for name in names:
        forward, backward = (dispatch.refusal(name, problem, c) for c in ("forward", "backward"))
        if forward is not None:
            results[name] = Result(refusal=forward)
            continue
        lacking = {} if backward is not None else dispatch.lacks(name, problem, "backward")
        if lacking:
            backward = "; ".join(f"no {result}: {reason}" for result, reason in lacking.items())
        try:
            without = set(leaves) if backward and not lacking else set()
            without |= {name for name in leaves if f"d{field_of(name)}" in lacking}
            values = _computed(call, dout, dlse, name, without)
        except Exception as error:  # the table shows any error, and the other checks go on
            wrong = (f"{type(error).__name__}: {error}",)
            results[name] = Result(math.nan, math.nan, wrong)
        else:
            results[name] = replace(judge(values), refusal=backward)
    return results


class Judge:
    """The definition of a call, and the rule that its values must meet."""

    def __init__(self, call: Call, dout: Tensor, dlse: Tensor) -> None:
        self.dtype = call.q.dtype
        half = torch.float32 if self.dtype == torch.float64 else self.dtype
        self.ref = _definition(call, dout, dlse, torch.float64)
        self.std = _definition(call, dout, dlse, half)
        self.problem, tensors = _build_problem(call, call.leaves())
        known = (self.ref["out"], self.ref["lse"], dout, dlse)
        known = tuple(t[None] for t in known) if self.problem.varlen else known
        self.noise = tolerance.noise(self.problem, tensors, *known)

    def __call__(self, values: Values) -> Result:
        """Return the errors of the values, and a sentence for each that breaks the rule."""
        return _judge(values, self.ref, self.std, self.noise, self.dtype)


def _judge(
    values: Values, ref: Values, std: Values, noise: dict[str, tolerance.Noise], dtype: torch.dtype
) -> Result:
    """Return the errors of the values, and a sentence for each that breaks the rule."""
    errors: dict[str, list[float]] = {"forward": [], "gradients": []}
    shares: dict[str, list[float]] = {"forward": [], "gradients": []}
    wrong = []
    for name, x in values.items():
        kind = "forward" if name in ("out", "lse") else "gradients"
        factor = tolerance.OUTPUT if kind == "forward" else tolerance.GRADIENT
        rule = (x, ref[name], std[name], dtype, factor, noise[name])
        text = tolerance.complaint(*rule)
        if text is not None:
            wrong.append(f"{name}: {text}")
        errors[kind].append(tolerance.relative_error(x, ref[name]))
        shares[kind].append(tolerance.share(*rule))
    forward, gradients = (_worst(x) for x in errors.values())
    parts = _worst(shares["forward"]), _worst(shares["gradients"])
    return Result(forward, gradients, tuple(wrong), shares=parts)


def _worst(errors: list[float]) -> float | None:
    if not errors:
        return None
    return math.nan if any(map(math.isnan, errors)) else max(errors)


# --- the definition and the backends -----------------------------------------------------------


def _build_problem(call: Call, leaves: Values) -> tuple[Problem, Tensors]:
    """Return the problem and the tensors that a backend takes for a call over these leaves."""
    given = arguments(cu_seqlens=call.offsets, **{**call.options, **leaves})
    tensors, found, _ = normalized(given)
    return problem_of(tensors, found), tensors


def _definition(call: Call, dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> Values:
    """Return the values of the dense definition, every step of it in ``dtype``."""
    leaves = call.leaves(dtype)
    problem, tensors = _build_problem(call, leaves)
    out, lse = dense.attention(problem, tensors, dtype)
    if call.offsets is not None:
        out, lse = out[0], lse[0]
    return _with_gradients(out, lse, leaves, dout, dlse)


def _computed(call: Call, dout: Tensor, dlse: Tensor, name: str, without: set[str]) -> Values:
    """Return the values of one backend, without the gradients of the inputs in ``without``."""
    leaves = {n: t.detach() if n in without else t for n, t in call.leaves().items()}
    options = {**call.options, **leaves, "return_lse": True, "backend": name}
    if call.offsets is None:
        out, lse = rowmax.attention(**options)
    else:
        first, second = call.offsets
        out, lse = rowmax.attention_varlen(cu_seqlens_q=first, cu_seqlens_k=second, **options)
    leaves = {n: t for n, t in leaves.items() if t.requires_grad}
    if not leaves:
        return {"out": out, "lse": lse}
    return _with_gradients(out, lse, leaves, dout, dlse)


def _with_gradients(out: Tensor, lse: Tensor, leaves: Values, dout: Tensor, dlse: Tensor) -> Values:
    cotangents = [dout.to(out.dtype), dlse.to(lse.dtype)]
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), cotangents)
    named = zip(leaves, gradients, strict=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{n}": g for n, g in named}
