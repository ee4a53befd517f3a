"""Every backend that a CPU can run, over the whole table, forward and backward.

GPU backends meet the same table in ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import rowmax
from rowmax.call.dispatch import choose, refusal
from rowmax.call.problem import Problem, Wanted
from rowmax.testing import (
    CASES,
    COVERING,
    LEAVES,
    Answer,
    Case,
    Expected,
    answer,
    complaints,
    cotangents,
    make,
    poisoned,
    tagged,
)
from tests import partial_sums
from tests.references import reference

HALF_AND_DOUBLE = [
    *COVERING,
    *(c for c in CASES if c.name in ("plain", "causal-deeper", "bias-float32", "packed-none")),
    *(c for c in CASES if c.name.startswith(("bias-float32-", "rows-nq=1-nk=1", "strides"))),
    *tagged("latent"),
]


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give torch's operations on small tensors one thread: others mostly wait for each other."""
    compiled = "backend" in request.fixturenames and request.getfixturevalue("backend") == "cpu"
    before = torch.get_num_threads()
    if not compiled:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _want_support(backend: str, problem: Problem) -> None:
    """Check that no backend of a CPU refuses a call."""
    for call in ("forward", "backward"):
        assert refusal(backend, problem, call) is None


def _right(got: Answer, want: Expected) -> None:
    wrong = complaints(got, want)
    assert not wrong, "\n".join(wrong)


def _check(case: Case, backend: str, dtype: torch.dtype) -> None:
    call, grads, want = reference(case, dtype)
    _want_support(backend, call.problem()[0])
    with poisoned():
        got = answer(call, *grads, backend=backend)
    _right(got, want)


@pytest.mark.parametrize("case", CASES + tagged("latent"), ids=str)
def test_float32(case: Case, backend: str) -> None:
    _check(case, backend, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HALF_AND_DOUBLE, ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_partial_sums_are_not_rounded(dtype: torch.dtype, backend: str) -> None:
    partial_sums.check(backend, dtype)


@pytest.mark.parametrize("case", [c for c in COVERING if c.sink or c.bias], ids=str)
def test_gradient_through_out_alone(case: Case, backend: str) -> None:
    call, grads, want = reference(case, with_dlse=False)
    _want_support(backend, call.problem()[0])
    with poisoned():
        got = answer(call, *grads, backend=backend)
    _right(got, want)


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_gradient_alone(name: str, backend: str, packed: bool) -> None:
    """Each gradient is the same, whichever others are wanted."""
    options = {"bias": "1hqk", "sink": True, "softcap": 2.0, "causal": True, "hk": 2}
    options |= {"alibi": True}
    options |= {"sequences": ((40, 90), (70, 20))} if packed else {}
    call = make(Case("one", **options))
    dout, dlse = cotangents(call)
    _want_support(backend, call.problem()[0])
    everything = answer(call, dout, dlse, backend=backend).gradients[name]
    leaf = call.leaves[name].detach().requires_grad_()
    with poisoned():
        out, lse = call.with_leaves({name: leaf})(backend=backend)
        alone = torch.autograd.grad([out, lse], [leaf], [dout, dlse])[0]
    torch.testing.assert_close(alone, everything, rtol=1e-6, atol=1e-6)


_SEEN_FROM: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"left": 20, "right": 3},
    "alibi": {"alibi": True},
}


@pytest.mark.parametrize("options", _SEEN_FROM.values(), ids=_SEEN_FROM)
def test_aligned_to_lengths_is_cut_to_lengths(options: dict[str, Any], backend: str) -> None:
    """On a cache that is filled in part, each sequence is as the call with its own keys alone."""
    used, nk = (0, 40, 70, 100, 200, 230), 200
    case = Case("cache", b=len(used), nq=70, nk=nk, hq=4, hk=2, d=16, **options)
    call = make(case.with_constant_slopes(), dtype=torch.float64)
    mask = rowmax.PrefixLengths(torch.tensor(used, dtype=torch.int32), align="lengths")
    mask = mask & call.keywords.get("mask", rowmax.Mask())
    dout, dlse = cotangents(call)
    with poisoned():
        got = answer(call, dout, dlse, backend=backend, mask=mask)
    for b, n in enumerate(used):
        rows, n = slice(b, b + 1), min(n, nk)
        q, k, v = (t[rows] for t in call.inputs)
        alone = replace(call, inputs=(q, k[:, :n], v[:, :n]))
        want = answer(alone, dout[rows], dlse[rows], backend="reference")
        for (name, x, _), (_, y, _) in zip(got.items(), want.items(), strict=True):
            if name in ("dk", "dv"):
                assert not x[rows, n:].any(), name  # nor NaN
            torch.testing.assert_close(x[rows, : y.shape[1]], y, rtol=1e-9, atol=1e-9)


def test_twice_the_same(backend: str) -> None:
    """Two deterministic runs agree to the bit."""
    case = Case("twice", b=2, nq=200, hq=4, hk=2, causal=True, bias="11qk", dropout=0.1, sink=True)
    call = make(case)
    grads = cotangents(call)
    _want_support(backend, call.problem()[0]._replace(deterministic=True))
    first, again = (answer(call, *grads, backend=backend, deterministic=True) for _ in range(2))
    for (name, a, _), (_, b, _) in zip(first.items(), again.items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_that_are_seen_propagate(backend: str, bad: float) -> None:
    """NaN and infinity in what a row may see are not hidden; other rows are clean."""
    call = make(Case("bad", b=1, nq=100, hq=2, d=16, causal=True))
    _, k, v = (t.clone() for t in call.inputs)
    v[0, 50, 0, 3] = bad
    _want_support(backend, call.problem()[0])
    out, lse = call.with_leaves({"v": v})(backend=backend)
    assert not out[0, 50:, 0, 3].isfinite().any()
    clean = torch.ones_like(out, dtype=torch.bool)
    clean[0, 50:, 0, 3] = False
    assert out[clean].isfinite().all()
    assert lse.isfinite().all()
    k[0, 60, 1, 0] = float("nan")
    out, lse = call.with_leaves({"k": k})(backend=backend)
    assert out[0, 60:, 1].isnan().all()
    assert lse[0, 1, 60:].isnan().all()
    assert out[0, :60].isfinite().all()
    assert out[0, :, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_results_are_as_promised(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Contiguous, of the promised shapes and dtypes: the fake kernels promise the compiler so."""
    problem, tensors = make(case, dtype=dtype).problem()
    chosen = choose(problem, "forward", backend).first
    out, lse = chosen.forward(problem, tensors)
    assert (out.shape, out.dtype) == (problem.out_shape, problem.dtype)
    assert (lse.shape, lse.dtype) == (problem.lse_shape, problem.accumulator)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    wanted = Wanted(*(getattr(tensors, name) is not None for name in Wanted._fields))
    dout = torch.randn(1, dtype=dtype).expand(out.shape)  # as the gradient of a sum comes
    gradients = chosen.backward(problem, tensors, out, lse, dout, None, wanted)
    for name, gradient in gradients._asdict().items():
        x = getattr(tensors, name)
        assert (gradient is None) == (x is None)
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype), name
            assert gradient.is_contiguous(), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_may_be_seen_counts_even_with_weight_0(backend: str, value: float) -> None:
    """As in the definition: 0 times it is NaN, dropped, underflown or under a bias of -inf."""
    q, k, v = (torch.randn(1, n, 1, 8) for n in (5, 300, 300))
    v[0, 7, 0, 2] = value
    bias = torch.zeros(5, 300)
    bias[2, 7], bias[3] = -1e9, -torch.inf
    mask = torch.ones(5, 300, dtype=torch.bool)
    mask[1, 7] = False
    for keywords in ({"bias": bias}, {"dropout_p": 0.97, "seed": 3}):
        out = rowmax.attention(q, k, v, mask=mask, **keywords, backend=backend)  # pyright: ignore
        assert out[0, 1].isfinite().all()
        assert not out[0, [0, 2, 3, 4], 0, 2].isfinite().any()
        assert out[..., [0, 1, 3, 4, 5, 6, 7]].isfinite().all()
