"""Checks of an installation: each feature, on each backend, against the float64 definition.

Out, lse and every gradient must meet the rule of ``reference/tolerance.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..call import dispatch
from ..reference import tolerance
from ..reference.tolerance import GRADIENT, OUTPUT
from ..testing import Expected, answer, complaint, cotangents, expected, field_of
from .features import FEATURES, Feature

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
    problem, _ = FEATURES[0].make(device, usual_dtype(device), 0).problem()
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
    call = feature.make(device, usual_dtype(device), seed)
    dout, dlse = cotangents(call, seed + 1)
    want, (problem, _) = expected(call, dout, dlse), call.problem()
    results = {}
    for name in names:
        forward, backward = (dispatch.refusal(name, problem, c) for c in ("forward", "backward"))
        if forward is not None:
            results[name] = Result(refusal=forward)
            continue
        grads = () if backward is not None else tuple(call.leaves)
        lacking = {} if backward is not None else dispatch.lacks(name, problem, "backward")
        if lacking:
            backward = "; ".join(f"no {result}: {reason}" for result, reason in lacking.items())
            grads = tuple(leaf for leaf in grads if f"d{field_of(leaf)}" not in lacking)
        try:
            some = replace(call, case=replace(call.case, grads=grads))
            got = answer(some, dout, dlse, backend=name)
        except Exception as error:  # the table shows any error, and the other checks go on
            wrong = (f"{type(error).__name__}: {error}",)
            results[name] = Result(math.nan, math.nan, wrong)
        else:
            values = {of: x for of, x, _ in got.items()}
            results[name] = replace(judge(values, want), refusal=backward)
    return results


def judge(values: Values, want: Expected) -> Result:
    """Return the errors of the values, and a sentence for each that breaks the rule."""
    refs, stds = ({name: x for name, x, _ in known.items()} for known in (want.ref, want.std))
    errors: dict[float, list[float]] = {OUTPUT: [], GRADIENT: []}
    shares: dict[float, list[float]] = {OUTPUT: [], GRADIENT: []}
    wrong = []
    for name, x in values.items():
        factor = OUTPUT if name in ("out", "lse") else GRADIENT
        rule = (x, refs[name], stds[name], want.dtype, factor, want.noise[name])
        wrong.append(complaint(name, *rule))
        errors[factor].append(tolerance.relative_error(x, refs[name]))
        shares[factor].append(tolerance.share(*rule))
    forward, gradients = map(_worst, errors.values())
    parts = _worst(shares[OUTPUT]), _worst(shares[GRADIENT])
    return Result(forward, gradients, tuple(filter(None, wrong)), shares=parts)


def _worst(errors: list[float]) -> float | None:
    if not errors:
        return None
    return math.nan if any(map(math.isnan, errors)) else max(errors)
