"""Every way of launching a kernel gives the same numbers.

Kernels are launched directly, with a launch hook of Triton's installed, and through Triton's
public launch, as with a driver of another kind. With TRITON_INTERPRET=1 only the first is checked.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs

from rowmax.testing import (
    Answer,
    Case,
    answer,
    complaints,
    cotangents,
    expected,
    make,
    refusal,
)

compat = importlib.import_module("rowmax.gpu.compat")


def forget_plans() -> None:
    """Empty every cache of launches, so that each is built again."""
    importlib.import_module("rowmax.call.normalize")._passed.clear()
    importlib.import_module("rowmax.gpu.launch")._jobs.clear()
    importlib.import_module("rowmax.gpu.hopper.host")._PLANS.clear()
    importlib.import_module("rowmax.gpu.hopper.backward_plan").PLANS.clear()
    importlib.import_module("rowmax.gpu.hopper.packed")._placing.cache_clear()


@contextlib.contextmanager
def hooked(found: list[str]) -> Iterator[None]:
    """Install a hook that Triton calls at every launch."""
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    names = {metadata.get()["name"] for metadata in seen}
    if len(names) < 3:
        found.append(f"hooked: the hook was called for {sorted(names)} only")


@contextlib.contextmanager
def public(found: list[str]) -> Iterator[None]:
    """Make every driver unknown, so that Triton's public launch is used."""
    known, compat.is_known = compat.is_known, lambda run: False
    forget_plans()
    try:
        yield
    finally:
        compat.is_known = known
        forget_plans()


def check(case: Case, backend: str, device: str) -> list[str]:
    """Return what is wrong with a case, and which results another launch changes."""
    call = make(case, device, torch.float16)
    if reason := refusal(call, backend):
        return [f"refused: {reason}"]
    grads = cotangents(call)
    want = expected(call, *grads)
    first = answer(call, *grads, backend=backend, deterministic=True)
    found = complaints(first, want)
    if not compat.is_compiled(importlib.import_module("rowmax.gpu.triton.forward").forward_kernel):
        return found
    for n in range(3):  # the second call of a kind is recorded, the third repeats its launches
        again = answer(call, *grads, backend=backend, deterministic=True)
        found += [f"repeated {n}: {name} differs" for name in different(first, again)]
    for context in (hooked, public):
        with context(found):
            again = answer(call, *grads, backend=backend, deterministic=True)
            found += [f"{context.__name__}: {name} differs" for name in different(first, again)]
    return found


def different(first: Answer, second: Answer) -> list[str]:
    """Return the names of results that are not equal to the bit."""
    both = zip(first.items(), second.items(), strict=True)
    return [name for (name, x, _), (_, y, _) in both if not torch.equal(x.cpu(), y.cpu())]
