"""Every way of launching a kernel gives the same numbers, on a GPU.

    python -m tests.gpu.launches
    TRITON_INTERPRET=1 python -m tests.gpu.launches   # the interpreter, on tensors of the GPU

Directly, with a launch hook of Triton's installed, and through Triton's public launch as where
the driver is of another kind. Prints a line for each check and exits with 1 if one fails.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs

from rowmax.call import dispatch as backends
from tests.cases import Case, make
from tests.tolerance import Answer, answer, complaints, cotangents, expected

compat = importlib.import_module("rowmax.gpu.compat")
compiled = importlib.import_module("rowmax.gpu.compiled")
CASES = [
    Case("causal", b=1, nq=150, hq=2, d=64, causal=True),
    Case("bias", b=2, nq=100, nk=136, hq=2, d=64, bias="1hqk", sink=True),
    Case("documents", b=1, nq=136, hq=2, d=64, documents="sorted", alibi=True),
    Case("packed", hq=2, hk=1, d=64, causal=True, sequences=((5, 90), (0, 17), (70, 70))),
]


def forget() -> None:
    """Have every plan made anew."""
    importlib.import_module("rowmax.gpu.triton.launch")._jobs.clear()
    importlib.import_module("rowmax.gpu.hopper.host")._PLANS.clear()
    importlib.import_module("rowmax.gpu.hopper.gradients.plans").PLANS.clear()
    importlib.import_module("rowmax.gpu.hopper.packed")._placing.cache_clear()


@contextlib.contextmanager
def hooked(found: list[str]) -> Iterator[None]:
    """A hook that is called at every launch."""
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    names = {metadata.get()["name"] for metadata in seen}
    if len(names) < 3:
        found.append(f"hooked: the hook was told of {sorted(names)} alone")


@contextlib.contextmanager
def public(found: list[str]) -> Iterator[None]:
    """A driver that launches in a way that is not known."""
    known, compat.is_known = compat.is_known, lambda run: False
    forget()
    try:
        yield
    finally:
        compat.is_known = known
        forget()


def differ(how: str, first: Answer, second: Answer) -> list[str]:
    return [
        f"{how}: {name} differs"
        for (name, x, _), (_, y, _) in zip(first.items(), second.items(), strict=True)
        if not torch.equal(x, y)
    ]


def check(case: Case, name: str) -> list[str]:
    call = make(case, "cuda", torch.float16)
    problem, _ = call.problem()
    for which in ("forward", "backward"):
        if reason := backends.refusal(name, problem, which):
            return [f"refused: {reason}"]
    grads = cotangents(call)
    want = expected(call, *grads)
    first = answer(call, *grads, backend=name, deterministic=True)
    found = complaints(first, want)
    if not compat.is_compiled(importlib.import_module("rowmax.gpu.triton.forward").forward_kernel):
        return found
    for context in (hooked, public):
        with context(found):
            found += differ(
                context.__name__,
                first,
                answer(call, *grads, backend=name, deterministic=True),
            )
    return found


def main() -> int:
    bad = 0
    for case in CASES:
        for name in ("triton", "hopper"):
            try:
                found = check(case, name)
            except Exception:
                found = [traceback.format_exc(limit=-3)]
            bad += bool(found) and not found[0].startswith("refused")
            print(case.name, name, *(found or ["right"]), flush=True)
    print(f"{bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
