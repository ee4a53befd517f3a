"""Checks that fit into a time, run while the CPU kernels compile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rowmax.cli.checks import Checks, Result, check_feature, progress_line, usual_dtype
from rowmax.cli.features import FEATURES, Feature

from .clock import Clock
from .compiling import Kernels

REST = 0.7  # the share of the time after which only needed features are still checked

#: features without which the demo does not pass
NEEDED = ("all of it at once", "every key", "causal")
#: features checked first, because a wrong kernel most likely fails one of them
FIRST = (
    *NEEDED,
    "boolean mask",
    "bias [H, N, N] with gradient",
    "grouped heads, 4 to 1",
    "packed sequences, one empty",
    "rows that may see nothing",
    "NaN in masked keys and values",
)

Pending = dict[Feature, tuple[str, ...]]  # the backends that are not yet checked for a feature


def run_checks(
    device: torch.device,
    names: tuple[str, ...],
    seed: int,
    clock: Clock,
    kernels: Kernels,
    show: Callable[[str], None],
) -> dict[str, dict[str, Result]]:
    """Check the features on these backends, except those that are predicted not to fit.

    A backend is checked as soon as its kernels are compiled.
    """
    usual = usual_dtype(device)
    pending: Pending = dict.fromkeys(sorted(FEATURES, key=_place), names)
    rows: dict[str, dict[str, Result]] = {feature.name: {} for feature in FEATURES}
    early = clock.until(REST)
    slowest, done, total = 0.0, 0, len(FEATURES) * len(names)
    while pending:
        needed = any(feature.name in NEEDED for feature in pending)
        end = clock if needed else early
        feature, ready = _next(pending, usual, kernels)
        if feature is not None:
            if end.fits(slowest * len(ready)):
                show(progress_line(done, total, feature, ready))
                start = clock.now()
                rows[feature.name] |= check_feature(feature, device, ready, seed)
                # the first check also loads code, so later times replace its time
                slowest = max(0.8 * slowest, (clock.now() - start) / len(ready))
                done += len(ready)
                pending[feature] = tuple(n for n in pending[feature] if n not in ready)
                if not pending[feature]:
                    del pending[feature]
                continue
            if not needed or feature.name in NEEDED:
                break
        if not kernels.running or not end.left:
            break
        show(f"Checks: {done} of {total} done; {kernels.describe()}")
        kernels.wait()
    for feature, left in pending.items():
        rows[feature.name] |= {name: Result(left_out=True) for name in left}
    return rows


def enough(checks: Checks) -> bool:
    """Return True if the needed features were checked on every backend."""
    rows = [checks.rows[name] for name in NEEDED]
    return not any(result.left_out for row in rows for result in row.values())


def _place(feature: Feature) -> int:
    """Return the place of a feature in the order of checks."""
    return FIRST.index(feature.name) if feature.name in FIRST else len(FIRST)


def _next(
    pending: Pending, usual: torch.dtype, kernels: Kernels
) -> tuple[Feature | None, tuple[str, ...]]:
    """Return the first feature with backends that can be called now, and these backends."""
    for feature, names in pending.items():
        ready = tuple(n for n in names if kernels.ready(n, feature.dtype or usual))
        if ready:
            return feature, ready
    return None, ()
