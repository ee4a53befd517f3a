"""The Triton kernels of tangents and of their backward, in Triton's interpreter, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rowmax.call import dispatch as backends
from rowmax.call.inputs import Cotangents, Tangents, Wanted, WantedSecond
from rowmax.testing import (
    CASES,
    Case,
    directions,
    make,
    poisoned,
    second_answer,
    second_complaints,
    second_expected,
)

interpreter = importlib.import_module("triton.runtime.interpreter")
tangent = importlib.import_module("rowmax.gpu.triton.tangent")
tangent_backward = importlib.import_module("rowmax.gpu.triton.tangent_backward")
launch = importlib.import_module("rowmax.gpu.launch")
tiles = importlib.import_module("rowmax.gpu.tiles")
triton_backend = importlib.import_module("rowmax.gpu.triton")
tiled = importlib.import_module("rowmax.tiled")

interpreted = pytest.mark.skipif(
    not isinstance(tangent.tangent_kernel, interpreter.InterpretedFunction),
    reason="the kernels were imported without TRITON_INTERPRET=1",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the interpreter's own, of numpy
    pytest.mark.usefixtures("one_thread"),
]

#: by the beginning of the name: together every term, mask and sum of a bias; each 0.5 to 4 seconds
CHOSEN = (
    *("pair1-", "pair5-", "pair7-", "pair9-", "pair14-", "pair16-", "pair23-", "pair29-"),
    *("packedpair1-", "packedpair3-", "packedpair5-", "packedpair9-", "packedpair12-"),
    *("lengths-zero-sink", "rows-nq=1-nk=200-causal", "rows-nq=239-nk=1-", "empty-keys-sink"),
    *("bias-bias=bhq1", "head-d=16-dv=64", "prefix-lengths", "aligned-window", "packed-none"),
    *("empty-batch", "dilated-causal", "padding-left-window"),
)
TABLE = [case for case in CASES if case.name.startswith(CHOSEN)]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends._DEVICES, "triton", ("cpu", "cuda", "xpu"))
    backends.choose.cache_clear()
    launch._jobs.clear()
    yield
    backends.choose.cache_clear()
    launch._jobs.clear()


def _wrong(case: Case, dtype: torch.dtype = torch.float32) -> list[str]:
    call = make(case, dtype=dtype)
    along = directions(call)
    with poisoned():
        got = second_answer(call, along, backend="triton")
    return second_complaints(got, second_expected(call, along))


@interpreted
@pytest.mark.parametrize("case", TABLE[1::2], ids=str)
def test_float32(case: Case) -> None:
    assert not _wrong(case)


@interpreted
@pytest.mark.parametrize("case", TABLE[::2], ids=str)
def test_float16(case: Case) -> None:
    assert not _wrong(case, torch.float16)


@interpreted
@pytest.mark.parametrize("more", [{"causal": True}, {"b": 3, "prefix": (0.4, 0.0, 1.3)}], ids=str)
def test_distances_of_hundreds_float16(more: dict[str, Any]) -> None:
    """Under ALiBi the number that is subtracted from s' moves from tile to tile."""
    assert not _wrong(Case("far", nq=5, nk=600, hk=1, alibi=True, **more), torch.float16)


@interpreted
def test_a_sink_that_outweighs_far_keys() -> None:
    """The mean of s' over the keys is in the thousands, and LSE' is the sink's tangent."""
    far = Case("far", nq=20, nk=5, alibi=True, sink=True, positions=(-5000, 0, 0, 0, 0))
    assert not _wrong(far, torch.float32)


@interpreted
def test_distances_of_thousands_float16() -> None:
    """Under a slope of 1/256 no tile of keys outweighs all tiles before it."""
    sizes = {"nq": 16, "nk": 2600, "hq": 3, "hk": 1, "d": 128, "dv": 128}
    slow = Case("slow", alibi=True, grads=("q", "k", "alibi"), **sizes)
    assert not _wrong(slow, torch.float16)


@interpreted
@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 32)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", b=1, nq=70, nk=90, hq=2, d=16, causal=True, dropout=0.2),
        Case("block", b=1, nq=40, nk=70, hq=2, d=16, dropout=0.3, positions=(0, 7, 64, 5, 3)),
        Case("shared", nq=40, nk=70, hq=4, hk=2, d=40, dv=80, bias="11qk", allowed="b1qk"),
        Case("packed", hq=2, hk=1, d=16, sequences=((20, 37), (0, 5), (50, 41)), causal=True),
    ],
    ids=str,
)
def test_tiles_of_any_shape(
    case: Case, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tiles.Tiles(*shape, 4, 2, True)
    monkeypatch.setattr(launch, "tiles_for", lambda *_: chosen)
    assert not _wrong(case)


def _numbers(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return (problem, tensors, tangents, cotangents) of random numbers."""
    problem, tensors = make(case, dtype=dtype).problem()
    given = {name: getattr(tensors, name) for name in Tangents._fields}
    along = Tangents(**{n: None if t is None else torch.randn_like(t) for n, t in given.items()})
    out, lse = problem.out_shape, problem.lse_shape
    shapes = out, lse, out, lse
    return problem, tensors, along, Cotangents(*(torch.randn(x).to(dtype) for x in shapes))


PRESENT = [
    ("v", "tout", "q"),
    ("q", "lse", "k"),
    ("k", "tlse", "v"),
    ("bias", "out", "bias"),
    ("sink", "tlse", "sink"),
    ("heads", "tout", "heads"),
    ("qkv", "tout", "qkv"),
]


@interpreted
@pytest.mark.parametrize(("along", "cotangent", "of"), PRESENT, ids=str)
def test_some_of_the_derivatives_float32(along: str, cotangent: str, of: str) -> None:
    """Compare the wanted gradients with the tiled backend's; compute no others."""
    case = Case("some", b=1, nq=40, nk=50, hq=2, d=16, bias="1hqk", alibi=True, sink=True)
    problem, tensors, tangents, cotangents = _numbers(replace(case, causal=True, softcap=2.0))

    def kept(name: str, names: str) -> bool:
        return name in names if names == "qkv" else name == names

    tangents = Tangents(*(t if kept(n, along) else None for n, t in tangents._asdict().items()))
    alone = Cotangents(**{cotangent: getattr(cotangents, cotangent)})
    flags = Wanted(*(kept(name, of) for name in Wanted._fields))
    none = Wanted(*(False for _ in Wanted._fields))
    want = tiled.tangent(problem, tensors, tangents)
    with poisoned():
        got = tangent.tangent(problem, tensors, tangents)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    for wanted in (WantedSecond(flags, none), WantedSecond(none, flags)):
        given = problem, tensors, tangents, want, alone, wanted
        with poisoned():
            got = tangent_backward.tangent_backward(*given)
        for mine, theirs in zip(got, tiled.tangent_backward(*given), strict=True):
            for x, y in zip(mine, theirs, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unseen_nan_does_not_matter_float32(bad: float) -> None:
    """A key that a row may not see has no part in its tangent, nor in its gradients."""
    case = Case("nan", b=1, nq=50, hq=1, d=16, causal=True)
    problem, tensors, tangents, cotangents = _numbers(case)
    every = Wanted(True, True, True, False, False)

    def results(tangents: Tangents, **inputs: Any) -> tuple[Any, ...]:
        given = problem, tensors._replace(**inputs), tangents
        found = tangent.tangent(*given)
        gradients = tangent_backward.tangent_backward(
            *given, found, cotangents, WantedSecond(every, every)
        )
        return found[2], found[3].transpose(1, 2), gradients[0].q, gradients[1].q

    clean = results(tangents)
    for name in ("k", "v"):
        x, t = getattr(tensors, name).clone(), getattr(tangents, name).clone()
        x[:, 30:], t[:, 30:] = bad, bad
        for got in (results(tangents, **{name: x}), results(tangents._replace(**{name: t}))):
            for a, b in zip(got, clean, strict=True):
                torch.testing.assert_close(a[:, :30], b[:, :30])


@interpreted
def test_a_common_part_of_the_tangents_cancels_float16() -> None:
    """A tangent that moves every score of a row alike has no rounding in out'."""
    problem, tensors, tangents, _ = _numbers(
        Case("common", b=1, nq=40, nk=100, hq=1, d=16, bias="11q1"), torch.float16
    )
    assert tangents.bias is not None
    far = Tangents(v=tangents.v, bias=torch.full_like(tangents.bias, 3000.0))
    near = tangent.tangent(problem, tensors, Tangents(v=tangents.v))
    got = tangent.tangent(problem, tensors, far)
    torch.testing.assert_close(got[2], near[2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[3], near[3] + 3000.0)


def test_calls_that_it_refuses() -> None:
    for d, dtype, taken in (
        (256, torch.bfloat16, True),
        (257, torch.float16, False),
        (128, torch.float32, True),
        (136, torch.float32, False),
    ):
        problem, _ = make(Case("wide", d=d), dtype=dtype).problem()
        for call in ("tangent", "tangent_backward"):
            reason = triton_backend.supports(problem, call)
            assert (reason is None) == taken
            assert taken or "head sizes up to 256, in float32 up to 128" in str(reason)
        assert triton_backend.supports(problem, "backward") is None


def test_triton_comes_before_the_tiled_backend() -> None:
    problem, _ = make(Case("plain", d=64)).problem()
    for call in backends.SECOND_ORDER:
        first = backends.choose(problem._replace(device="cuda"), call)
        assert first.jobs[0].backend == "triton"
        wide = backends.choose(problem._replace(device="cuda", d=512), call)
        assert wide.jobs[0].backend == "torch"
        double = problem._replace(device="cuda", dtype=torch.float64)
        assert backends.choose(double, call).jobs[0].backend == "torch"
