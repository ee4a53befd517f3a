"""The rule passes the answers of standard attention and catches wrong ones. The table of cases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rowmax import tiled
from rowmax.call.inputs import Gradients, Tensors, Wanted
from rowmax.reference import dense
from rowmax.reference import tolerance as rule
from rowmax.reference.tolerance import Noise
from rowmax.testing import (
    CASES,
    COVERING,
    Answer,
    Case,
    Expected,
    answer,
    complaints,
    cotangents,
    expected,
    make,
    poisoned,
    tagged,
)
from rowmax.testing.table import pairwise

from .drawn import Drawn, wrong

CASE = Case("rule", causal=True, bias="1hqk", sink=True, allowed="11qk", empty_rows=True)


def _given(dtype: torch.dtype, case: Case = CASE) -> tuple[Answer, Expected]:
    call = make(case, dtype=dtype)
    grads = cotangents(call)
    return answer(call, *grads, backend="reference"), expected(call, *grads)


def _with(got: Answer, name: str, t: Tensor) -> Answer:
    if name in ("out", "lse"):
        return replace(got, **{name: t})
    return replace(got, gradients={**got.gradients, name[1:]: t})


NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers_are_caught(name: str, dtype: torch.dtype) -> None:
    got, want = _given(dtype)
    assert complaints(got, want) == []
    x = {n: t for n, t, _ in got.items()}[name].contiguous()
    broken = x.clone()
    broken.view(-1)[-1] = math.nan
    assert "NaN" in complaints(_with(got, name, broken), want)[0]
    broken.view(-1)[-1] = math.inf
    assert "infinite" in complaints(_with(got, name, broken), want)[0]
    finite = x.isfinite()
    relative = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 3e-2)
    assert complaints(_with(got, name, x * (1 + relative)), want)
    one = x.clone()
    place = finite.view(-1).nonzero()[0]
    one.view(-1)[place] += 10 * relative * x[finite].abs().max()
    assert complaints(_with(got, name, one), want)
    assert "shape" in complaints(_with(got, name, x[..., None]), want)[0]


def test_a_row_of_nothing_must_be_minus_infinity() -> None:
    got, want = _given(torch.float32)
    assert (got.lse == -math.inf).sum() == 0  # there is a sink
    got, want = _given(torch.float32, replace(CASE, sink=False))
    assert (got.lse == -math.inf).any()
    finite = got.lse.nan_to_num(neginf=-1e9)
    assert "infinite" in complaints(replace(got, lse=finite), want)[0]


@pytest.mark.parametrize(
    ("x", "ref", "right"),
    [
        (math.inf, 1e5, True),
        (math.inf, 65530.0, True),  # rounds to infinity
        (65504.0, 65530.0, True),
        (math.inf, 65480.0, True),  # within the error that is allowed
        (-math.inf, 1e5, False),
        (math.inf, 6e4, False),
        (6e4, 1e5, False),
    ],
)
def test_past_the_largest_number(x: float, ref: float, right: bool) -> None:
    """Infinity is the rounding of a finite number past the largest one of the dtype."""
    given = (torch.tensor([1.0, n], dtype=torch.float64) for n in (x, ref, ref))
    got, want, std = given
    text = rule.complaint(got.half(), want, std.half(), torch.float16)
    assert (text is None) == right, text


def test_float32_is_not_tf32() -> None:
    """An answer from operands of ten bits breaks the rule of float32."""
    got, want = _given(torch.float32, Case("plain"))
    call = make(Case("plain"))
    rounded = {n: t.half().float() for n, t in call.leaves.items()}
    coarse = answer(call.with_leaves(rounded), *cotangents(call), backend="reference")
    assert len(complaints(coarse, want)) == 5
    assert complaints(got, want) == []


def test_poison() -> None:
    with poisoned():
        for t in (torch.empty(3), torch.zeros(3).new_empty(3), torch.empty_like(torch.zeros(3))):
            assert t.isnan().all()
        assert torch.empty_strided((2,), (1,)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# --- the table ---------------------------------------------------------------------------------


def test_pairwise_meets_every_pair() -> None:
    factors = {"a": (1, 2, 3), "b": "xy", "c": (None, True), "d": (0.1, 0.2, 0.3, 0.4)}
    rows = pairwise({name: tuple(values) for name, values in factors.items()})
    for a in factors:
        for b in factors:
            if a < b:
                met = {(row[a], row[b]) for row in rows}
                assert met == {(x, y) for x in factors[a] for y in factors[b]}
    assert len(rows) <= 16


def test_the_same_numbers_for_the_same_seed() -> None:
    one, same, other = (make(CASE, generator=seed).inputs[0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_sizes_scale() -> None:
    for case in CASES:
        problem, _ = make(case, size=2).problem()
        small, _ = make(case).problem()
        assert (problem.total_q, problem.total_k) == (2 * small.total_q, 2 * small.total_k)
        assert (problem.hq, problem.d, problem.batch) == (small.hq, small.d, small.batch)


def test_the_norm_of_noise_is_allowed_only_where_the_answer_is_noise() -> None:
    noise = Noise(1e-6, 1e-6 * 10)
    zero, one = torch.zeros(100, dtype=torch.float64), torch.ones(100, dtype=torch.float64)
    off = torch.full((100,), 1e-6, dtype=torch.float64)
    dtype = torch.float32
    assert rule.complaint(zero + off, zero, zero, dtype, 3.0, noise) is None
    assert "norm" in (rule.complaint(zero + off, zero, zero, dtype, 3.0, Noise(1e-6, 0.0)) or "")
    assert rule.complaint(zero + 3 * off, zero, zero, dtype, 3.0, noise) is not None
    wide = Noise(1.0, 5.0)  # less than the answer: the usual limit stands
    assert "norm" in (rule.complaint(one + 100 * off, one, one, dtype, 3.0, wide) or "")


def test_cases_are_found_by_tag() -> None:
    assert tagged("covering") == COVERING
    assert len(tagged("covering", "repeats")) == len(COVERING) + len(tagged("repeats"))
    assert tagged("covering", "every backend") == CASES
    with pytest.raises(ValueError, match="tag: got no such; want blocks, covering, every backend"):
        tagged("no such")


def test_every_feature_is_in_the_covering_part() -> None:
    default = Case("")
    drawn = ("dout", "transposed", "shift", "wide_offsets", "grads", "dlse", "deterministic")
    for name in vars(default):
        if name == "positions":  # which have cases of their own
            assert all(c.positions is not None for c in tagged("blocks"))
        elif name not in ("name", "bias_float32", *drawn):  # only ``drawn.py`` varies those
            assert any(getattr(c, name) != getattr(default, name) for c in COVERING), name


def test_a_softcap_is_off_by_its_size_on_gpus() -> None:
    """In half precision, lse of a row that sees one key is a score, however small."""
    case = Case("one-key", left=0, causal=True, scale=1e-4, softcap=30.0)
    problem, tensors = make(case, dtype=torch.float16).problem()
    out, lse = dense.attention(problem, tensors, torch.float64)
    for device, softcap, want in (("cuda", 30.0, True), ("cuda", 0.0, False), ("cpu", 30.0, False)):
        one = problem._replace(device=device, softcap=softcap)
        noise = rule.noise(one, tensors, out, lse, torch.ones_like(out), None)
        assert (noise["lse"].cut > 0) is want
        if want:  # a row: 2.3 roundings of the cap
            row = noise["lse"].cut / math.sqrt(lse.numel())
            assert row == pytest.approx(4 / math.sqrt(3) * 30 * 2**-24)


@pytest.mark.parametrize("features", [{"bias": "bhqk"}, {"bias": "1hq1", "sink": True}])
@pytest.mark.parametrize("dropout", [0.0, 0.9])
def test_the_error_of_delta_is_as_large_as_the_rule_says(features: Any, dropout: float) -> None:
    """Compare backwards whose Delta reads o, rounded and not."""
    case = Case("rounded", nq=60, nk=60, hq=4, hk=2, d=32, dropout=dropout, **features)
    call = make(case, dtype=torch.float16)
    dout, _ = cotangents(call)
    problem, tensors = call.problem()
    wide = torch.float64
    given = Tensors(
        *(t.to(wide) if t is not None and t.dtype == torch.float16 else t for t in tensors)
    )
    exact = problem._replace(dtype=wide)
    out, lse = tiled.forward(exact, given)
    wanted = Wanted(True, True, True, True, "sink" in features)

    def gradients(o: Tensor) -> Gradients:
        return tiled.backward(exact, given, o, lse, dout.to(wide), None, wanted)

    noise = rule.noise(problem, tensors, out, lse, dout, None)
    found = zip(Gradients._fields, gradients(out), gradients(out.half().to(wide)), strict=True)
    for name, right, rounded in found:
        if right is not None and name != "v":
            error = (rounded - right).norm().item()
            assert 0.5 < error / noise[f"d{name}"].cut < 1.3, name


@pytest.mark.parametrize("shift", [-5000, 0])
def test_the_error_of_a_rounded_lse_is_as_large_as_the_rule_says(shift: int) -> None:
    """Compare backwards that read lse, rounded twice and not: with far keys, and without."""
    positions = (shift, 0, 0, 0, 0)
    case = Case("far", nq=64, nk=64, hq=8, d=9, alibi=True, positions=positions)
    call = make(case, dtype=torch.float32)
    dout, dlse = (t.double() if t is not None else t for t in cotangents(call))
    problem, tensors = call.problem()
    floats = (torch.float32,)
    given = Tensors(*(t.double() if t is not None and t.dtype in floats else t for t in tensors))
    exact = problem._replace(dtype=torch.float64)
    out, lse = tiled.forward(exact, given)
    wanted = Wanted(True, True, True, False, False, True)

    def gradients(lse: Tensor) -> Gradients:
        return tiled.backward(exact, given, out, lse, dout, dlse, wanted)

    in_base_2 = (lse.float().double() * math.log2(math.e)).float().double()
    rounded = gradients(in_base_2 / math.log2(math.e))
    noise = rule.noise(problem, tensors, out, lse, dout, dlse)
    for name, right, got in zip(Gradients._fields, gradients(lse), rounded, strict=True):
        if right is None:
            continue
        known = noise["dalibi" if name == "heads" else f"d{name}"]
        error, limit = (got - right).norm().item(), 1e-5 * right.norm().item()
        assert error < known.cut
        # far keys make it larger than the limit; where |lse| is small it is not seen
        if shift and name in ("v", "heads"):
            assert known.cut > limit
            assert error > 0.1 * limit
        elif not shift:
            assert known.cut < 2 * limit


@pytest.mark.parametrize("features", [{"bias": "b1q1", "sink": True}, {"bias": "bhqk"}])
def test_the_error_of_rounded_products_is_as_large_as_the_rule_says(features: Any) -> None:
    """Compare backwards whose dP and Delta are summed in float32 and in float64."""
    case = Case("few", nq=64, nk=64, hq=4, hk=2, d=32, dv=160, causal=True, left=1, **features)
    call = make(replace(case, dropout=0.9), dtype=torch.float32)
    dout, _ = cotangents(call)
    problem, tensors = call.problem()
    out, lse = dense.attention(problem, tensors, torch.float64)
    wanted = Wanted(True, True, True, True, "sink" in features)

    def gradients(dtype: torch.dtype) -> Gradients:
        here = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]
        kind = problem._replace(dtype=dtype)
        return tiled.backward(
            kind, Tensors(*here), out.to(dtype), lse.to(dtype), dout.to(dtype), None, wanted
        )

    noise = rule.noise(problem, tensors, out, lse, dout, None)
    found = zip(Gradients._fields, gradients(torch.float64), gradients(torch.float32), strict=True)
    for name, right, rounded in found:
        if right is not None and name != "v":
            error = (rounded - right).norm().item()
            assert 0.02 < error / noise[f"d{name}"].cut < 1, name


#: errors of rounding alone, which the error of standard attention does not cover by chance
ROUNDED = {
    "dsink, one row": Drawn(
        Case(
            "drawn", b=1, nq=80, nk=80, hk=1, d=104, dv=144, scale=5.0, documents="batched",
            lengths=(1.0, 1.0, 1.0, 0.77), bias="k", sink=True, transposed=True,
        ),
        "float32", 1135514318,
    ),
    "out, one query": Drawn(
        Case(
            "drawn", nq=1, nk=93, hq=2, hk=1, d=128, dv=128, scale=1.0, documents="sorted",
            alibi=True, sink=True, dropout=0.05, layout="sliced/bhnd/expanded",
            positions=(5000, 1045727, 19389568, 4, 1048576), grads=("q", "k", "v", "alibi"),
            dlse=False,
        ),
        "float32", 359283427,
    ),
    "dbias, sums over keys": Drawn(
        Case(
            "drawn", b=1, nq=32, nk=32, hq=8, hk=1, d=48, dv=48, scale=5.0, causal=True, right=34,
            documents="queries", allowed="11qk", bias="b1q1", sink=True, dropout=0.95, shift=1,
            dlse=False,
        ),
        "float32", 821329943,
    ),
    "dk, few keys": Drawn(
        Case(
            "drawn", b=1, nq=179, nk=179, hq=1, hk=1, d=117, dv=192, scale=1.0, causal=True,
            left=1, documents="sorted", step=7, allowed="Bhqk", empty_rows=True, alibi=True,
            dropout=0.95, layout="sliced/bhnd/strided", transposed=True, shift=1, grads=("k", "v"),
        ),
        "float32", 1410425391,
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_not_wrong(name: str, backend: str) -> None:
    assert wrong(ROUNDED[name], backend, "cpu") == []


def test_a_small_score_of_large_products_is_off_by_their_roundings() -> None:
    """The errors of sums of D products in float32, over the size that the rule takes."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4000, 74, generator=generator) for _ in "qk")
    exact = (q.double() * k.double()).sum(-1)
    total = torch.zeros(4000)
    for x, y in zip(q.unbind(1), k.unbind(1), strict=True):
        total = total + x * y
    root = (q.double() * k.double()).square().sum(-1).sqrt()
    size = 2**-24 * math.sqrt(74 / 3) * (exact.abs() + root)
    assert 0.1 < ((total - exact) / size).square().mean().sqrt() < 1


def test_numbers_below_the_least_normal_one_may_be_zero() -> None:
    case = Case("tiny", sink=True, dlse=False)
    problem, tensors = make(case).problem()
    out, lse = dense.attention(problem, tensors, torch.float64)
    noise = rule.noise(problem, tensors, out, lse, torch.zeros_like(out), None)
    rows = lse.numel() / problem.hq
    assert noise["dsink"].largest == pytest.approx(rows * torch.finfo(torch.float32).tiny)
    assert noise["dq"].largest == 0


def test_references_allow_for_the_device_that_answers() -> None:
    """Tensor cores truncate the sums of float32, wherever the references are computed."""
    call = make(Case("plain", nq=40, nk=300, d=128))
    here, there = (expected(call, *cotangents(call), device) for device in (None, "cuda"))
    assert there.noise["dq"].cut > 10 * here.noise["dq"].cut > 0.0
    assert there.noise["dq"].largest > here.noise["dq"].largest
