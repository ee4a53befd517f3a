"""Tangents and second derivatives of the CPU backend, compared by the rule of tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rowmax
from demo.memory import Memory
from rowmax import tiled
from rowmax.call import dispatch
from rowmax.call.inputs import HEAD_TERMS, Cotangents, Tangents, Wanted, WantedSecond
from rowmax.testing import (
    COVERING,
    Case,
    directions,
    make,
    poisoned,
    second_answer,
    second_complaints,
    second_expected,
)

from .drawn import Drawn, drawn

cpu: Any = pytest.importorskip("rowmax.cpu")

# torch's own: forward mode imports scripted functions
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")

CASES = [case for case in COVERING if make(case).leaves]
TERMS: dict[str, Any] = {"bias": "1hqk", "sink": True, "softcap": 2.0, "alibi": True}


def _wrong(call: Any, seed: int = 2, **cotangents: bool) -> list[str]:
    along = directions(call, seed)
    if cotangents:
        kept = {name: getattr(along.cotangents, name) for name in cotangents}
        along = along._replace(cotangents=Cotangents(**kept))
    with poisoned():
        got = second_answer(call, along, backend="cpu")
    return second_complaints(got, second_expected(call, along))


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_float32(case: Case) -> None:
    assert not _wrong(make(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[1::6], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert not _wrong(make(case, dtype=dtype))


@pytest.mark.parametrize("name", ["out", "tout", "tlse"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_cotangent_alone(name: str, packed: bool) -> None:
    options = TERMS | {"causal": True, "hk": 2, "dropout": 0.2}
    options |= {"sequences": ((40, 90), (70, 300))} if packed else {"nq": 70, "nk": 600}
    assert not _wrong(make(Case("one", **options)), **{name: True})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**31 - 1))
def test_drawn_calls(dtype: str, seed: int) -> None:
    """Random calls. Of a few elements errors are random: a fault is one of most of the numbers."""
    one = drawn(seed, dtype, budget=20_000, backend="cpu")
    found = _faults(one, 0)
    if found:
        again = [_faults(one, n) for n in range(1, 6)]
        always = [name for name in found if sum(name in more for more in again) > 3]
        assert not always, one.snippet("cpu", "cpu")


def _faults(one: Drawn, n: int) -> list[str]:
    call = Drawn(one.case, one.dtype, one.seed + n).call()
    return [text.split(":")[0] for text in _wrong(call, n)] if call.leaves else []


# --- the jobs ------------------------------------------------------------------------------------


def _jobs(call: Any, backend: str, absent: tuple[str, ...] = ()) -> list[Any]:
    """Return the results of both jobs along random tangents, except the absent ones."""
    problem, tensors = call.problem()
    chosen: Any = dispatch.choose(problem, "tangent", backend).first
    torch.manual_seed(1)
    along = {n: getattr(tensors, n) for n in Tangents._fields}
    along = {n: None if t is None else torch.randn_like(t) for n, t in along.items()}
    wanted = Wanted(*(t is not None for t in along.values()))
    tangents = Tangents(**{n: None if n in absent else t for n, t in along.items()})
    results = chosen.tangent(problem, tensors, tangents)
    cotangents = Cotangents(*(torch.randn_like(t) for t in results))
    given = (tensors, tangents, results, cotangents, WantedSecond(wanted, wanted))
    return [*results, *(g for half in chosen.tangent_backward(problem, *given) for g in half)]


@pytest.mark.parametrize(
    "absent", [("q", "k"), ("q", "v"), ("k", "bias", "sink", "heads")], ids=str
)
def test_absent_tangents(absent: tuple[str, ...]) -> None:
    """Gradients of these are wanted all the same."""
    call = make(Case("absent", nq=70, nk=300, hk=2, **TERMS), dtype=torch.float64)
    found = [_jobs(call, name, absent) for name in ("cpu", "reference")]
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def test_values_of_a_tangent_are_those_of_the_forward() -> None:
    call = make(Case("same", nq=200, nk=600, causal=True, dropout=0.1, **TERMS))
    problem, tensors = call.problem()
    want = tiled.forward(problem, tensors)
    with poisoned():
        found = cpu.tangent(problem, tensors, Tangents(q=torch.randn_like(tensors.q)))
    torch.testing.assert_close(found[:2], want)


@pytest.mark.parametrize("heads", [1, 3])
def test_same_bits_every_time(heads: int) -> None:
    """Tasks share the sums of a head where heads are few."""
    call = make(Case("bits", nq=300, hq=heads, causal=True, bias="11qk", dropout=0.1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        first = _jobs(call, "cpu")
        for _ in range(5):
            for a, b in zip(first, _jobs(call, "cpu"), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_a_sink_that_outweighs_far_keys() -> None:
    """The mean of s' over the keys is in the thousands, and LSE' is the sink's tangent."""
    far = Case("far", nq=70, nk=5, alibi=True, sink=True, positions=(-5000, 0, 0, 0, 0))
    assert not _wrong(make(far))


@pytest.mark.parametrize("causal", [False, True])
def test_tangents_of_slopes_at_long_distances(causal: bool) -> None:
    """They differ by hundreds from tile to tile; a row of weights sees a few of them."""
    assert not _wrong(make(Case("far", b=1, nq=100, nk=2000, hq=2, alibi=True, causal=causal)))


# --- numbers -------------------------------------------------------------------------------------


def test_a_common_part_of_the_tangents_cancels() -> None:
    """A bias that moves as a whole moves lse and leaves out where it is."""
    q, k, v = (torch.randn(1, 600, 2, 16) for _ in range(3))
    bias = torch.randn(600, 600)
    _, (tout, tlse) = torch.func.jvp(
        lambda bias: rowmax.attention(q, k, v, bias=bias, return_lse=True, backend="cpu"),
        (bias,),
        (torch.full_like(bias, 1e6),),
    )
    assert tout.abs().max() < 1e-3
    torch.testing.assert_close(tlse, torch.full_like(tlse, 1e6))


@pytest.mark.parametrize("value", [3e38, -3e38, torch.finfo(torch.float32).min])
def test_biases_as_large_as_their_dtype(value: float) -> None:
    """No product changes them: every weight of a row is 1 / n. lse has lost log n."""
    shapes = ((1, 70, 2, 16), (1, 300, 2, 16), (1, 300, 2, 16))
    numbers = [*(torch.randn(s) for s in shapes), torch.full((70, 1), value)]

    def results(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in numbers]
        out = rowmax.attention(*leaves[:3], bias=leaves[3], backend=backend)  # pyright: ignore
        assert isinstance(out, Tensor)
        found = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        total = sum(t.square().sum() for t in found[:3])
        return torch.autograd.grad(total, leaves)  # pyright: ignore

    names = zip(results("cpu", torch.float32), results("reference", torch.float64), strict=True)
    for got, want in names:
        assert (got - want).norm() <= 1e-4 * want.norm() + 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_do_not_cross_the_mask(bad: float) -> None:
    """Keys that no query sees, and a query that sees none."""
    shapes = (70, 300, 300)
    leaves = [torch.randn(1, n, 2, 16) for n in (*shapes, *shapes)]
    seen = torch.rand(70, 300) < 0.7
    seen[5], seen[:, 280:] = False, False

    def results(number: float) -> list[Tensor]:
        own = [t.clone() for t in leaves]
        for t in own:
            t[:, 5 if t.shape[1] == 70 else slice(280, None)] = number
        problem, tensors = make(Case("bad")).problem()  # its options; other tensors
        given = tensors._replace(q=own[0], k=own[1], v=own[2], allowed=seen[None, None])
        problem = problem._replace(
            batch=1, nq=70, nk=300, total_q=70, total_k=300, hq=2, hk=2, d=16, dv=16,
            allowed=(1, 1, 70, 300), softcap=2.0,
        )  # fmt: skip
        tangents = Tangents(*own[3:])
        found = cpu.tangent(problem, given, tangents)
        torch.manual_seed(3)
        cotangents = Cotangents(*(torch.randn_like(t) for t in found))
        wanted = Wanted(True, True, True, False, False)
        both = cpu.tangent_backward(
            problem, given, tangents, found, cotangents, WantedSecond(wanted, wanted)
        )
        return [*found, *(t for half in both for t in half if t is not None)]

    for got, want in zip(results(bad), results(0.0), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_memory_is_linear() -> None:
    """At N 8192 one score matrix would be 256 MiB; operands, results and sums are 2 MiB each."""
    call = Case("memory", b=1, nq=8192, hq=1, d=64, left=256, causal=True)
    _jobs(make(Case("small", b=1, nq=64, hq=1, d=64)), "cpu")
    big = make(call)
    memory = Memory(torch.device("cpu"))
    _jobs(big, "cpu")
    peak = memory.peak()
    assert peak is not None
    assert peak < 120 * 2**20


def test_refuses_tangents_of_terms_that_bend_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = make(Case("alibi", alibi=True)).problem()
    assert cpu.supports(problem, "tangent_backward") is None
    monkeypatch.setitem(HEAD_TERMS, "alibi", HEAD_TERMS["alibi"]._replace(added=False))
    for call in ("tangent", "tangent_backward"):
        assert cpu.supports(problem, call) == "it has no tangent of alibi"
    assert cpu.supports(problem, "backward") is None
