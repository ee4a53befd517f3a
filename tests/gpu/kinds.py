"""The kinds of checks that ``check.py`` runs: each a function that yields its checks."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from rowmax.call import dispatch
from rowmax.testing import (
    CASES,
    COVERING,
    Answer,
    Call,
    Case,
    answer,
    complaints,
    cotangents,
    directions,
    expected,
    make,
    poisoned,
    refusal,
    second_answer,
    second_complaints,
    second_expected,
    tagged,
)
from tests import documents, extreme_bias
from tests.drawn import Drawn, RefusedError, wrong
from tests.few_queries import with_few_queries
from tests.gpu import extremes

REPEATS = 200  # calls of a check of the kind repeats
LONG = 600.0  # seconds
#: backends that take every case; a refusal of theirs is wrong
GENERAL = ("triton", "cpu", "torch", "reference")


class Check(NamedTuple):
    """A function of its arguments that returns what is wrong, or ["refused: reason"]."""

    kind: str
    name: str
    dtype: str
    variant: str
    function: Callable[..., list[str]]
    args: tuple[Any, ...]
    may_refuse: bool = False
    slow: bool = False  # begins before the others
    alone: bool = False  # on its GPU
    fresh: bool = False  # in a process of its own
    limit: float = 0.0  # seconds, if not those of the runner
    gpus: int = 1

    @property
    def key(self) -> tuple[str, ...]:
        return self[:4]


Kind = Callable[[Namespace], Iterator[Check]]


def run(check: Check) -> Iterator[str]:
    """Yield the result of a check, in the form of its row."""
    try:
        found = check.function(*check.args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        yield "fault: " + traceback.format_exc(limit=-3)[-700:]
        return
    text = "; ".join(found) or "right"
    yield "wrong: " + text if text.startswith("refused") and not check.may_refuse else text


def takes_dtype(dtype: str, backend: str) -> bool:
    return dtype not in {"hopper": ("float32", "float64"), "triton": ("float64",)}.get(backend, ())


# --- through the public call -------------------------------------------------------------------


def check_case(case: Case, dtype: str, size: int, backend: str, device: str) -> list[str]:
    """Return what is wrong with a case whose lengths are multiplied by ``size``."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = case.with_constant_slopes() if backend == "hopper" else case
    call = make(case, device, getattr(torch, dtype), size=size)
    if reason := refusal(call, backend):
        return [f"refused: {reason}"]
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend=backend)
    return complaints(got, want)


def wrong_tangents(call: Call, seed: int, backend: str) -> list[str]:
    """Return what is wrong with the tangents and second derivatives of a call.

    Raises:
        RefusedError: the backend does not take them.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    for job in dispatch.SECOND_ORDER:
        if reason := dispatch.refusal(backend, call.problem()[0], job):
            raise RefusedError(reason)
    along = directions(call, seed)
    want = second_expected(call, along)
    with poisoned():
        got = second_answer(call, along, backend=backend)
    return second_complaints(got, want)


def check_tangents(case: Case, dtype: str, size: int, backend: str, device: str) -> list[str]:
    try:
        call = make(case, device, getattr(torch, dtype), size=size)
        return wrong_tangents(call, 2, backend)
    except RefusedError as error:
        return [f"refused: {error}"]


def check_repeated_tangents(case: Case, backend: str, device: str) -> list[str]:
    """Return the first tangent or second derivative that differs from call to call."""
    call = make(case, device, torch.bfloat16)
    if reason := dispatch.refusal(backend, call.problem()[0], "tangent_backward"):
        return [f"refused: {reason}"]
    along = directions(call)
    first = second_answer(call, along, backend=backend)
    for n in range(REPEATS // 4):
        again = second_answer(call, along, backend=backend)
        differing = [name for name, x in first.items() if not torch.equal(x, again[name])]
        if differing:
            return [f"{differing[0]} differs in repeat {n}"]
    return []


def check_repeats(case: Case, backend: str, device: str, times: int = REPEATS) -> list[str]:
    """Return the first result that differs from call to call.

    Hopper's sums in dq have an order only in deterministic mode.
    """
    torch.use_deterministic_algorithms(backend == "hopper", warn_only=True)
    case = case.with_constant_slopes() if backend == "hopper" else case
    call = make(case, device, torch.bfloat16)
    if reason := refusal(call, backend):
        return [f"refused: {reason}"]
    grads = cotangents(call)
    first = answer(call, *grads, backend=backend)
    for n in range(times):
        again = answer(call, *grads, backend=backend)
        for (name, a, _), (_, b, _) in zip(first.items(), again.items(), strict=True):
            if not torch.equal(a, b):
                return [f"{name} differs in repeat {n}"]
    return []


def check_replays(case: Case, dtype: str, backend: str, device: str) -> list[str]:
    """Return the results of repeated launches that differ from those of first calls.

    The second call of a kind is recorded, and those after it repeat its launches. Inputs of two
    seeds take turns: a result of the numbers before would be wrong.
    """
    from tests.gpu.launches import different

    case = case.with_constant_slopes() if backend == "hopper" else case
    calls = [make(case, device, getattr(torch, dtype), seed) for seed in range(2)]
    if reason := refusal(calls[0], backend):
        return [f"refused: {reason}"]
    along = [cotangents(call) for call in calls]

    def found(n: int) -> Answer:
        with poisoned():
            return answer(calls[n], *along[n], backend=backend, deterministic=True)

    first = [found(n) for n in range(2)]
    return [
        f"{name} of seed {n} differs in turn {turn}"
        for turn in range(2)
        for n in range(2)
        for name in different(first[n], found(n))
    ]


def check_extreme(name: str, backend: str, device: str) -> list[str]:
    try:
        return getattr(extremes, name)(backend, device)
    except ValueError as error:
        if not str(error).startswith("backend: got"):
            raise
        return [f"refused: {error}"]


def check_known_fault(case: Case, dtype: str, backend: str, device: str) -> list[str]:
    try:
        return wrong(Drawn(case, dtype, 0), backend, device)
    except RefusedError as error:
        return [f"refused: {error}"]


def every_backend(kind: Kind) -> Kind:
    """Repeat the checks of a kind for each backend, with (backend, device) as last arguments."""

    def checks(given: Namespace) -> Iterator[Check]:
        for backend in given.backends:
            for check in kind(given):
                if takes_dtype(check.dtype, backend):
                    yield check._replace(
                        variant=f"{backend} {check.variant}".strip(),
                        args=(*check.args, backend, given.device),
                        may_refuse=check.may_refuse or backend not in GENERAL,
                    )

    return checks


@every_backend
def cases(given: Namespace) -> Iterator[Check]:
    """Yield the table at 8 times its lengths, and at its own in other dtypes; odd lengths."""
    size = 1 if given.device == "cpu" else 8
    if given.tag:
        items = [(case, "bfloat16", 1) for case in tagged(given.tag)]
    else:
        items = [(c, "bfloat16", size) for c in (COVERING if given.quick else CASES)]
        items += [(c, d, 1) for c in COVERING for d in ("float32", "float16")]
        if not given.quick:
            items += [(c, "float32", 1) for c in CASES if c not in COVERING]
            items += [(c, "bfloat16", 1) for c in tagged("odd lengths", "long")]
    for case, dtype, n in items:
        variant = f"x{n}" if n > 1 else ""
        yield Check("cases", case.name, dtype, variant, check_case, (case, dtype, n))


@every_backend
def few_queries(given: Namespace) -> Iterator[Check]:
    """Yield the table with few queries of 32 times as many keys, which programs share."""
    every = tagged(given.tag) if given.tag else COVERING if given.quick else CASES
    for case in map(partial(with_few_queries, times=32), every):
        for dtype in ("bfloat16",) if given.quick else ("bfloat16", "float16", "float32"):
            yield Check("few-queries", case.name, dtype, "", check_case, (case, dtype, 1))
        args = "few-queries", case.name, "bfloat16", "repeats", check_repeats, (case,)
        if "repeats" in case.tags:
            yield Check(*args, slow=True)


@every_backend
def tangents(given: Namespace) -> Iterator[Check]:
    """Yield tangents and second derivatives of the table; some must agree to the bit."""
    size = 1 if given.device == "cpu" else 4
    items = [(c, "bfloat16", size) for c in (COVERING if given.quick else CASES)]
    items += [(c, d, 1) for c in COVERING for d in ("float32", "float16")]
    if given.tag:
        items = [(case, "bfloat16", 1) for case in tagged(given.tag)]
    for case, dtype, n in items:
        if make(case).leaves:
            args, variant = (case, dtype, n), f"x{n}" if n > 1 else ""
            found = Check("tangents", case.name, dtype, variant, check_tangents, args)
            yield found._replace(may_refuse=True)
    for case in tagged(given.tag or "repeats"):
        args = "tangents", case.name, "bfloat16", "repeats", check_repeated_tangents, (case,)
        yield Check(*args, may_refuse=True, slow=True)


@every_backend
def repeats(given: Namespace) -> Iterator[Check]:
    """Yield calls that must agree to the bit, 200 times."""
    for case in tagged(given.tag or "repeats"):
        yield Check("repeats", case.name, "bfloat16", "", check_repeats, (case,), slow=True)


@every_backend
def replays(given: Namespace) -> Iterator[Check]:
    """Yield calls whose launches are repeated with other numbers."""
    for case in tagged(given.tag) if given.tag else COVERING if given.quick else CASES:
        for dtype in ("bfloat16",) if given.quick else ("bfloat16", "float32"):
            yield Check("replays", case.name, dtype, "", check_replays, (case, dtype))


@every_backend
def document_offsets(given: Namespace) -> Iterator[Check]:
    """Yield documents of one sequence, by offsets, next to packed calls."""
    for seed in range(12 if given.quick else 60):
        for dtype in ("bfloat16",) if given.quick else ("bfloat16", "float16", "float32"):
            args = (seed, dtype)
            yield Check("offsets", f"seed {seed}", dtype, "", documents.check, args)


@every_backend
def all_extremes(given: Namespace) -> Iterator[Check]:
    """Yield checks of more than 2^31 elements, CUDA graphs, streams, NaN, offsets out of range."""
    for name in (*extremes.LARGE, *extremes.SMALL):
        large = name in extremes.LARGE
        check = Check("extremes", name, "", "", check_extreme, (name,), alone=large, slow=not large)
        if given.device != "cpu" or name in extremes.ON_CPU:
            yield check


@every_backend
def extreme_biases(given: Namespace) -> Iterator[Check]:
    """Yield calls with biases and sinks as large as their dtype allows."""
    for case in tagged(given.tag or "extreme biases"):
        for dtype, bias_dtype in extreme_bias.pairs_of(case):
            name, args = str(dtype).removeprefix("torch."), (case, dtype, bias_dtype)
            variant = "" if bias_dtype == dtype else "float32 bias"
            yield Check("extreme-biases", case.name, name, variant, extreme_bias.check, args)


@every_backend
def known_faults(given: Namespace) -> Iterator[Check]:
    """Yield calls that triton 3.6.0 compiled wrongly, each in a process of its own."""
    for case in tagged(given.tag or "known faults"):
        args = (case, "float32")
        yield Check("known-faults", case.name, "float32", "", check_known_fault, args, fresh=True)


@every_backend
def launches(given: Namespace) -> Iterator[Check]:
    """Yield checks of every way of launching a kernel.

    The time in which Triton's own launch compiles is not measured.
    """
    from tests.gpu.launches import check

    for case in tagged(given.tag or "launches"):
        flags = {"fresh": True, "limit": LONG}
        yield Check("launches", case.name, "float16", "", check, (case,), **flags)


# --- Hopper's kernels called directly ----------------------------------------------------------


def hopper_forward(given: Namespace) -> Iterator[Check]:
    """Yield cases of the Hopper forward without dispatch and autograd."""
    from tests.gpu.hopper_direct import cases, check_forward

    for case in tagged(given.tag) if given.tag else cases("forward"):
        for dtype in given.half_dtypes:
            args = (case, dtype, given.repeats, given.device, given.reference)
            yield Check("hopper-forward", case.name, dtype, "", check_forward, args, True)


def hopper_gaps(given: Namespace) -> Iterator[Check]:
    """Yield drawn calls of the Hopper forward with a gap between their queries."""
    from tests.gpu.hopper_direct import check_gap

    for seed in range(96):
        dtype = given.half_dtypes[seed % len(given.half_dtypes)]
        args = (seed, dtype, 4096 if seed % 8 == 0 else 1024, given.device)
        yield Check("hopper-gaps", f"gap-{seed}", dtype, "", check_gap, args, True)


def hopper_lagging(given: Namespace) -> Iterator[Check]:
    """Yield cases of the Hopper forward with a reference that lags: few score terms, or pairs."""
    from tests.gpu.hopper_direct import PAIRS, cases, check_lagging

    for case in tagged(given.tag) if given.tag else cases("forward"):
        terms = case.alibi or case.softcap or case.documents or case.dropout
        if terms or (case.bias and case not in PAIRS):
            continue
        args = (case, "bfloat16", given.repeats, given.device, given.reference)
        yield Check("hopper-lagging", case.name, "bfloat16", "", check_lagging, args, True)


def hopper_backward(given: Namespace) -> Iterator[Check]:
    """Yield cases of the Hopper backward without dispatch and autograd."""
    from tests.gpu.hopper_direct import cases, check_backward

    for case in tagged(given.tag) if given.tag else cases("backward"):
        if "forward only" in case.tags:
            continue
        for dtype in given.half_dtypes:
            for flag in (False, True):
                args = (case, dtype, flag, given.repeats, given.device, given.reference)
                variant = "deterministic" * flag
                yield Check(
                    "hopper-backward", case.name, dtype, variant, check_backward, args, True
                )


def hopper_long(given: Namespace) -> Iterator[Check]:
    """Yield cases of the Hopper backward by halves of a step."""
    from tests.gpu.hopper_direct import cases, check_long

    longer = [
        Case("long-ragged", b=1, nq=4131, nk=4231, hq=2, d=64, causal=True),
        Case("long-grouped", b=2, nq=2100, nk=4224, hq=4, hk=2, d=64),
    ]
    for case in tagged(given.tag) if given.tag else [*longer, *cases("backward")]:
        width = max(case.d, case.dv or case.d)
        if not (width <= 32 if case.bias else 80 < width <= 96 or 32 < width <= 64):
            continue
        for flag in (False, True):
            dtype = given.half_dtypes[flag % len(given.half_dtypes)]
            args = (case, dtype, flag, given.repeats, given.device, given.reference)
            variant = "deterministic" * flag
            yield Check("hopper-long", case.name, dtype, variant, check_long, args, True)


# --- on two devices ----------------------------------------------------------------------------


def two_devices(given: Namespace) -> Iterator[Check]:
    """Yield calls on a device that is not the current one, on a host with two GPUs."""
    from tests.gpu.two_devices import check

    for case in tagged(given.tag or "two devices"):
        for backend in (None, "hopper", "triton", "torch", "reference"):
            name, args = backend or "chosen", (case, backend)
            found = Check("two-devices", case.name, "bfloat16", name, check, args, may_refuse=True)
            yield found._replace(limit=LONG, gpus=2)


KINDS: dict[str, Kind] = {
    "cases": cases,
    "few-queries": few_queries,
    "tangents": tangents,
    "repeats": repeats,
    "replays": replays,
    "offsets": document_offsets,
    "extremes": all_extremes,
    "extreme-biases": extreme_biases,
    "known-faults": known_faults,
    "launches": launches,
    "hopper-forward": hopper_forward,
    "hopper-gaps": hopper_gaps,
    "hopper-lagging": hopper_lagging,
    "hopper-backward": hopper_backward,
    "hopper-long": hopper_long,
    "two-devices": two_devices,
}
#: kinds that need no GPU
ON_CPU = (
    "cases",
    "few-queries",
    "tangents",
    "repeats",
    "replays",
    "offsets",
    "extremes",
    "extreme-biases",
    "known-faults",
)
