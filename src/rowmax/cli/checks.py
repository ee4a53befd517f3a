"""The installation checked: each feature, on each backend, against the float64 definition.

Outputs, lse and every gradient are held to the rule of ``reference/tolerance.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import rowmax

from ..call import dispatch as backends
from ..call.check import Arguments
from ..call.inputs import Tensors
from ..call.normalize import normalized
from ..call.problem import Problem, problem_of
from ..masks import Causal, as_mask
from ..reference import dense, tolerance
from .clock import Clock
from .compiling import Kernels
from .features import FEATURES, NEEDED, TELLING, Call, Feature, Maker

REST = 0.7  # the share of the time after which all ends, unless needed features are left

Values = dict[str, Tensor]  # out, lse, dq, dk, dv, and dbias, dsink where there are such


@dataclass(frozen=True)
class Result:
    """What came of one feature on one backend."""

    forward: float | None = None  # |x - ref| / |ref|, the worst of out and lse; None if refused
    gradients: float | None = None  # of the gradients
    wrong: tuple[str, ...] = ()  # a sentence for each tensor that breaks the rule
    refusal: str | None = None  # why the backend does not take it, or not all of its backward
    left_out: bool = False  # there was no time for it

    @property
    def ok(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Checks:
    """The table: a row a feature, a column a backend."""

    device: str
    dtype: str
    backends: tuple[str, ...]
    absent: dict[str, str]  # backends that do not run here, and why
    rows: dict[str, dict[str, Result]]

    @property
    def ok(self) -> bool:
        return all(result.ok for row in self.rows.values() for result in row.values())

    @property
    def count(self) -> tuple[int, int]:
        """(right, checked); what a backend refuses is not checked."""
        results = [r for row in self.rows.values() for r in row.values() if r.forward is not None]
        return sum(r.ok for r in results), len(results)

    @property
    def left_out(self) -> int:
        """Return how many checks did not fit into the time."""
        return sum(result.left_out for row in self.rows.values() for result in row.values())

    @property
    def enough(self) -> bool:
        """Return True if the needed features were checked on every backend."""
        rows = [self.rows[name] for name in NEEDED if name in self.rows]
        return not any(result.left_out for row in rows for result in row.values())


def usual_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which features are checked: what attention is mostly run in there."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def here(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backends that run on a device, and those that do not with the reason."""
    call = FEATURES[0].make(Maker(device, usual_dtype(device), 0))
    problem, _ = posed(call, call.leaves())
    candidates = [name for name in backends.NAMES if name != "reference"]
    reasons = {name: backends.refusal(name, problem, "forward") for name in candidates}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    return tuple(name for name in candidates if name not in absent), absent


def run(
    device: torch.device,
    names: tuple[str, ...] | None = None,
    seed: int = 0,
    on_check: Callable[[str], None] = lambda text: None,
    features: tuple[Feature, ...] = FEATURES,
    clock: Clock | None = None,
    kernels: Kernels | None = None,
) -> Checks:
    """Check every feature on the backends named (by default, all that run here).

    The most telling features come first. With a clock, checks that are predicted not to fit are
    left out; with kernels, a backend is checked as soon as its kernels are compiled.
    """
    usual = usual_dtype(device)
    found, absent = here(device)
    found = names if names is not None else found
    todo = dict.fromkeys(sorted(features, key=_place), found)
    rows: dict[str, dict[str, Result]] = {feature.name: {} for feature in features}
    clock = Clock(math.inf) if clock is None else clock
    soon = clock.until(REST)
    slowest, done, total = 0.0, 0, len(features) * len(found)
    while todo:
        needed = any(feature.name in NEEDED for feature in todo)
        end = clock if needed else soon
        feature, ready = _next(todo, usual, kernels)
        if feature is not None:
            if end.fits(slowest * len(ready)):
                on_check(f"{done} of {total} done; next: {feature.name}, on {' and '.join(ready)}")
                start = clock.now()
                maker = Maker(device, feature.dtype or usual, seed)
                rows[feature.name] |= check(feature.make(maker), maker, ready)
                # the first one also loads code, so that a slow one counts less and less
                slowest = max(0.8 * slowest, (clock.now() - start) / len(ready))
                done += len(ready)
                todo[feature] = tuple(name for name in todo[feature] if name not in ready)
                if not todo[feature]:
                    del todo[feature]
                continue
            if not needed or feature.name in NEEDED:
                break
        if kernels is None or not kernels.running or not end.left:
            break
        on_check(f"{done} of {total} done; {kernels.describe()}")
        kernels.wait()
    for feature, left in todo.items():
        rows[feature.name] |= {name: Result(left_out=True) for name in left}
    return Checks(str(device), str(usual).removeprefix("torch."), found, absent, rows)


def _place(feature: Feature) -> int:
    """Return where a feature comes in the order of checks."""
    return TELLING.index(feature.name) if feature.name in TELLING else len(TELLING)


def _next(
    todo: dict[Feature, tuple[str, ...]], usual: torch.dtype, kernels: Kernels | None
) -> tuple[Feature | None, tuple[str, ...]]:
    """Return the first feature with backends that can be called now, and these backends."""
    for feature, names in todo.items():
        dtype = feature.dtype or usual
        ready = tuple(n for n in names if kernels is None or kernels.ready(n, dtype))
        if ready:
            return feature, ready
    return None, ()


def check(call: Call, maker: Maker, names: tuple[str, ...]) -> dict[str, Result]:
    """One call on each backend."""
    dtype = call.q.dtype
    dout = maker.normal(*call.q.shape[:-1], call.v.shape[-1])
    dlse = maker.normal(*call.q.shape[:-3], call.q.shape[-2], call.q.shape[-3], wide=True)
    ref = _definition(call, dout, dlse, torch.float64)
    std = _definition(call, dout, dlse, torch.float32 if dtype == torch.float64 else dtype)
    problem, tensors = posed(call, call.leaves())
    given = (ref["out"], ref["lse"], dout, dlse)
    given = tuple(t[None] for t in given) if problem.varlen else given
    noise = tolerance.noise(problem, tensors, *given)
    results = {}
    for name in names:
        forward, backward = (backends.refusal(name, problem, c) for c in ("forward", "backward"))
        if forward is not None:
            results[name] = Result(refusal=forward)
            continue
        lacking = {} if backward is not None else backends.lacks(name, problem, "backward")
        if lacking:
            backward = "; ".join(f"no {result}: {reason}" for result, reason in lacking.items())
        try:
            without = {"q", "k", "v", "bias", "sink"} if backward and not lacking else set()
            without |= {result.removeprefix("d") for result in lacking}
            got = _computed(call, dout, dlse, name, without)
        except Exception as error:  # whatever it is, the other checks go on and the table tells it
            wrong = (f"{type(error).__name__}: {error}",)
            results[name] = Result(math.nan, math.nan, wrong)
        else:
            found = judged(got, ref, std, noise, dtype)
            results[name] = replace(found, refusal=backward)
    return results


def judged(
    got: Values, ref: Values, std: Values, noise: dict[str, tolerance.Noise], dtype: torch.dtype
) -> Result:
    """Hold what was computed to the rule."""
    errors, wrong = {"forward": [], "gradients": []}, []
    for name, x in got.items():
        kind = "forward" if name in ("out", "lse") else "gradients"
        factor = tolerance.OUTPUT if kind == "forward" else tolerance.GRADIENT
        text = tolerance.complaint(x, ref[name], std[name], dtype, factor, noise[name])
        if text is not None:
            wrong.append(f"{name}: {text}")
        errors[kind].append(tolerance.relative_error(x, ref[name]))
    return Result(_worst(errors["forward"]), _worst(errors["gradients"]), tuple(wrong))


def _worst(errors: list[float]) -> float | None:
    if not errors:
        return None
    return math.nan if any(map(math.isnan, errors)) else max(errors)


# --- the three answers -------------------------------------------------------------------------


def posed(call: Call, leaves: Values) -> tuple[Problem, Tensors]:
    """What a backend is given for a call over these leaves."""
    options = {
        "mask": None,
        "bias": None,
        "alibi": None,
        "scale": None,
        "softcap": 0.0,
        "sink": None,
        "dropout_p": 0.0,
        "seed": None,
        "deterministic": False,
        "backend": None,
        **call.options,
    }
    options |= {name: t for name, t in leaves.items() if name in options}
    mask = as_mask(options.pop("mask"))
    if options.pop("causal", False):
        mask = mask & Causal()
    q, k, v = (leaves[name] for name in "qkv")
    tensors, found, _ = normalized(
        Arguments(q, k, v, mask=mask, cu_seqlens=call.offsets, **options)
    )
    return problem_of(tensors, found), tensors


def _definition(call: Call, dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> Values:
    """The dense definition, every step of it in ``dtype``."""
    leaves = call.leaves(dtype)
    problem, tensors = posed(call, leaves)
    out, lse = dense.attention(problem, tensors, dtype)
    if call.offsets is not None:
        out, lse = out[0], lse[0]
    return _with_gradients(out, lse, leaves, dout, dlse)


def _computed(call: Call, dout: Tensor, dlse: Tensor, name: str, without: set[str]) -> Values:
    """Return the answer of rowmax, without the gradients of these inputs."""
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
