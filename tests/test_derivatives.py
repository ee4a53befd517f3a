"""Tangents and second derivatives: by the rule of tolerance, by finite differences, in training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax.call import dispatch
from rowmax.call.flops import tangent_backward_flops, tangent_flops
from rowmax.call.inputs import Cotangents, Tangents, Wanted, WantedSecond
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
from .small_calls import inputs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch's own: forward mode imports scripted functions
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]

BACKEND = "torch"
CASES = [case for case in COVERING if make(case).leaves]


def _wrong(call: Any, seed: int = 2) -> list[str]:
    along = directions(call, seed)
    with poisoned():
        got = second_answer(call, along, backend=BACKEND)
    return second_complaints(got, second_expected(call, along))


# --- the rule of tolerance -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case: Case) -> None:
    assert not _wrong(make(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert not _wrong(make(case, dtype=dtype))


@pytest.mark.parametrize("name", ["out", "lse", "tout", "tlse"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_cotangent_alone(name: str, packed: bool) -> None:
    options: dict[str, Any] = {"bias": "1hqk", "sink": True, "softcap": 2.0, "causal": True}
    options |= {"hk": 2, "alibi": True, "dropout": 0.2}
    options |= {"sequences": ((40, 90), (70, 20))} if packed else {"nq": 70}
    call = make(Case("one", **options))
    along = directions(call)
    alone = Cotangents(**{name: getattr(along.cotangents, name)})
    along = along._replace(cotangents=alone)
    got = second_answer(call, along, backend=BACKEND)
    assert not second_complaints(got, second_expected(call, along))


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
    one = drawn(seed, dtype, budget=10_000, backend="torch")
    found = _faults(one, 0)
    if found:
        again = [_faults(one, n) for n in range(1, 6)]
        always = [name for name in found if sum(name in more for more in again) > 3]
        assert not always, one.snippet(BACKEND, "cpu")


def _faults(one: Drawn, n: int) -> list[str]:
    call = Drawn(one.case, one.dtype, one.seed + n).call()
    return [text.split(":")[0] for text in _wrong(call, n)] if call.leaves else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[::6], ids=str)
def test_results_are_as_promised(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Contiguous, of the promised shapes and dtypes: the fake kernels promise the compiler so."""
    problem, tensors = make(case, dtype=dtype).problem()
    chosen: Any = dispatch.choose(problem, "tangent", backend).first
    given = {n: None if t is None else torch.randn_like(t) for n, t in _first(tensors).items()}
    tangents = Tangents(**given)
    results = chosen.tangent(problem, tensors, tangents)
    out, lse, tout, tlse = results
    for t in (out, tout):
        assert (t.shape, t.dtype) == (problem.out_shape, problem.dtype)
    for t in (lse, tlse):
        assert (t.shape, t.dtype) == (problem.lse_shape, problem.accumulator)
    assert all(t.is_contiguous() for t in (out, lse, tout, tlse))
    wanted = Wanted(*(t is not None for t in tangents))
    dtout = torch.randn(1, dtype=dtype).expand(out.shape)  # as the gradient of a sum comes
    found = chosen.tangent_backward(
        problem, tensors, Tangents(v=tangents.v), results,
        Cotangents(tout=dtout), WantedSecond(wanted, wanted),
    )  # fmt: skip
    for gradients in found:
        for name, gradient in gradients._asdict().items():
            x = getattr(tensors, name)
            assert (gradient is None) == (x is None)
            if gradient is not None:
                assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype), name
                assert gradient.is_contiguous(), name


def _first(tensors: Any) -> dict[str, Tensor | None]:
    return {name: getattr(tensors, name) for name in Tangents._fields}


@pytest.mark.parametrize("case", CASES[::9], ids=str)
def test_jobs_agree_with_those_of_the_reference(case: Case) -> None:
    """Also with tangents that are absent, and gradients of these."""
    problem, tensors = make(case, dtype=torch.float64).problem()
    given = {n: None if t is None else torch.randn_like(t) for n, t in _first(tensors).items()}
    wanted = Wanted(*(t is not None for t in given.values()))
    for absent in (("q", "k"), ("v",), ("k", "v", "bias", "sink", "heads")):
        tangents = Tangents(**{n: None if n in absent else t for n, t in given.items()})
        found = []
        for name in (BACKEND, "reference"):
            chosen: Any = dispatch.choose(problem, "tangent", name).first
            results = chosen.tangent(problem, tensors, tangents)
            torch.manual_seed(1)
            cotangents = Cotangents(*(torch.randn_like(t) for t in results))
            halves = chosen.tangent_backward(
                problem, tensors, tangents, results, cotangents, WantedSecond(wanted, wanted)
            )
            found.append((results, *halves))
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def test_twice_the_same() -> None:
    case = Case("twice", b=2, nq=200, hq=4, hk=2, causal=True, bias="11qk", dropout=0.1, sink=True)
    call = make(case)
    along = directions(call)
    first, again = (
        second_answer(call, along, backend=BACKEND, deterministic=True) for _ in range(2)
    )
    for name, t in first.items():
        assert torch.equal(t, again[name]), name


def test_a_common_part_of_the_tangents_cancels() -> None:
    """A bias that moves as a whole moves lse and leaves out where it is."""
    q, k, v = inputs(1, 300, dtype=torch.float32)
    bias = torch.randn(300, 300)
    moved = torch.full_like(bias, 1e6)
    _, (tout, tlse) = torch.func.jvp(
        lambda bias: rowmax.attention(q, k, v, bias=bias, return_lse=True, backend=BACKEND),
        (bias,),
        (moved,),
    )
    assert tout.abs().max() < 1e-3
    torch.testing.assert_close(tlse, torch.full_like(tlse, 1e6))


@pytest.mark.parametrize("masked", ["rows", "keys"])
def test_bad_numbers_do_not_cross_the_mask(masked: str) -> None:
    q, k, v = (torch.randn(1, 70, 2, 8) for _ in range(3))
    tangents = [torch.randn_like(t) for t in (q, k, v)]
    seen = torch.rand(70, 70) < 0.7
    if masked == "rows":
        seen[5] = False
    else:
        seen[:, 60:] = False

    rows, keys = (slice(5, 6), slice(0)) if masked == "rows" else (slice(0), slice(60, 70))

    def results(bad: float) -> list[Tensor]:
        leaves = [t.clone() for t in (q, k, v, *tangents)]
        for t, part in zip(leaves, 2 * (rows, keys, keys), strict=True):
            t[:, part] = bad
        leaves = [t.requires_grad_() for t in leaves]
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, leaves[:3], leaves[3:])
            out, lse = rowmax.attention(*duals, mask=seen, return_lse=True, backend=BACKEND)
            (o, to), (e, te) = (forward_ad.unpack_dual(t) for t in (out, lse))
        assert to is not None
        assert te is not None
        loss = o.square().sum() + to.sin().sum() + te.square().sum() + e.clamp(min=-9).sum()
        return [o.detach(), to.detach(), te.detach(), *torch.autograd.grad(loss, leaves)]

    for bad in (torch.nan, torch.inf):
        for got, want in zip(results(bad), results(0.0), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# --- finite differences --------------------------------------------------------------------------

#: sizes [Nq, Nk, Hq, Hk, D, Dv] and keywords; leaves are q, k, v and the tensors among these
_SMALL: dict[str, tuple[tuple[int, ...], Callable[[], dict[str, Any]]]] = {
    "causal": ((4, 5, 2, 1, 2, 3), lambda: {"causal": True}),
    "window-softcap-bias": (
        (4, 3, 1, 1, 2, 1),
        lambda: {"mask": rowmax.Window(2, 1), "softcap": 1.3, "bias": _normal(1, 4, 1)},
    ),
    "alibi-sink-dropout": (
        (3, 4, 2, 1, 2, 2),
        lambda: {"alibi": _normal(2), "sink": _normal(2), "dropout_p": 0.3, "seed": 5},
    ),
    "rows-that-see-nothing": (
        (3, 4, 1, 1, 1, 2),
        lambda: {"mask": torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()},
    ),
    "documents-softcap-sink": (
        (4, 4, 1, 1, 2, 1),
        lambda: {
            "mask": rowmax.Documents(torch.tensor([0, 0, 1, 1])),
            "softcap": 0.8,
            "sink": _normal(1),
        },
    ),
}


def _normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def _small(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return a call of its leaves, (out, lse), and the leaves."""
    (nq, nk, hq, hk, d, dv), draw = _SMALL[name]
    keywords = draw()
    leaves = [_normal(1, nq, hq, d), _normal(1, nk, hk, d), _normal(1, nk, hk, dv)]
    more = [n for n, t in keywords.items() if n in ("bias", "sink", "alibi")]
    leaves += [keywords.pop(n) for n in more]

    def call(q: Tensor, k: Tensor, v: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(more, terms, strict=True))
        out, lse = rowmax.attention(q, k, v, **named, **keywords, return_lse=True, backend=BACKEND)
        return out, lse.clamp(min=-50.0)  # finite differences of -inf are NaN

    return call, tuple(t.requires_grad_() for t in leaves)


@pytest.mark.parametrize("name", _SMALL)
def test_gradcheck_of_forward_mode(name: str) -> None:
    call, leaves = _small(name)
    assert torch.autograd.gradcheck(
        call,
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=False,  # by the older ``vmap``; ``jacfwd`` tests the newer
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("name", _SMALL)
def test_gradgradcheck(name: str) -> None:
    call, leaves = _small(name)
    assert torch.autograd.gradgradcheck(
        call, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("name", ["causal", "alibi-sink-dropout", "window-softcap-bias"])
def test_gradcheck_of_a_tangent(name: str) -> None:
    """Reverse mode over forward mode, of inputs and tangents."""
    call, leaves = _small(name)
    tangents = tuple(torch.randn_like(t).requires_grad_() for t in leaves)

    def tangent(*given: Tensor) -> Any:
        return torch.func.jvp(call, given[: len(leaves)], given[len(leaves) :])[1]

    assert torch.autograd.gradcheck(tangent, (*leaves, *tangents))


def test_packed_calls() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 3, 6])

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        out, lse = rowmax.attention_varlen(
            q, k, v, cu_q, cu_k, causal=True, softcap=1.5, bias=bias, return_lse=True,
            backend=BACKEND,
        )  # fmt: skip
        return out, lse.clamp(min=-50.0)

    leaves = [_normal(5, 2, 2), _normal(6, 1, 2), _normal(6, 1, 1), _normal(3, 1, 3, 3)]
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True)


# --- memory and work -----------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """The most numbers that any operation gave."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                stored = t.untyped_storage().nbytes() // t.itemsize
                self.numbers = max(self.numbers, min(t.numel(), stored))
        return result


@pytest.mark.parametrize("way", ["jvp", "double-backward"])
def test_memory_is_linear(way: str) -> None:
    n, heads, d = 4096, 1, 64
    q, k, v = (torch.randn(1, n, heads, d) for _ in range(3))

    def call(q: Tensor) -> Tensor:
        return rowmax.attention(q, k, v, mask=rowmax.Window(256, 0), softcap=9.0, backend=BACKEND)

    with _Largest() as largest:
        if way == "jvp":
            torch.func.jvp(call, (q,), (q,))
        else:
            _second(call, q)
    assert largest.numbers <= n * heads * d < n * n / 8


def _second(function: Callable[[Tensor], Tensor], q: Tensor) -> tuple[Tensor, ...]:
    q = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(function(q).square().sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def test_one_pass_and_its_flops() -> None:
    """A tangent computes the forward as well: one operator, no forward before it."""
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    call = functools.partial(rowmax.attention, causal=True, backend=BACKEND)
    problem, _ = make(Case("flops", b=1, nq=64, hq=2, d=8, causal=True)).problem()
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(call, (q, k, v), (q, k, v))
    counts = counter.get_flop_counts()["Global"]
    assert {str(name): n for name, n in counts.items()} == {
        "rowmax.tangent": tangent_flops(problem)
    }
    leaf = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(call(leaf, k, v).square().sum(), leaf, create_graph=True)
    with FlopCounterMode(display=False) as counter:
        dq.sum().backward()
    counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    assert counts["rowmax.tangent"] == tangent_flops(problem)
    assert counts["rowmax.tangent_backward"] == tangent_backward_flops(problem)


# --- a named backend -----------------------------------------------------------------------------


def test_no_backend_named_finds_one_that_can() -> None:
    q = torch.randn(1, 9, 2, 8)
    call = functools.partial(rowmax.attention, causal=True)
    got = torch.func.jvp(call, (q, q, q), (q, q, q))[1]
    named = functools.partial(call, backend=BACKEND)
    torch.testing.assert_close(got, torch.func.jvp(named, (q, q, q), (q, q, q))[1])
    problem, _ = make(Case("plain")).problem()
    first = BACKEND if find_spec("numba") is None else "cpu"
    for call_of in ("tangent", "tangent_backward"):
        assert dispatch.choose(problem, call_of).jobs[0].backend == first


def test_a_named_backend_without_tangents_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in dispatch.SECOND_ORDER:
        monkeypatch.delattr(f"rowmax.tiled.{name}")
    dispatch.choose.cache_clear()
    q = torch.randn(1, 9, 2, 8)

    def call(q: Tensor) -> Tensor:
        return rowmax.attention(q, q, q, backend=BACKEND)

    with pytest.raises(
        ValueError, match=r"cannot take this tangent \(forward mode\): torch: it comp"
    ):
        torch.func.jvp(call, (q,), (q,))
    problem, _ = make(Case("plain")).problem()
    assert "neither tangents" in str(dispatch.refusal(BACKEND, problem, "tangent_backward"))


# --- training ------------------------------------------------------------------------------------


class _Block(torch.nn.Module):
    """A field u(z, r, t) of a sequence: attention between two linear maps."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.qkv, self.out = torch.nn.Linear(6, 24), torch.nn.Linear(8, 4)
        self.sink = torch.nn.Parameter(torch.zeros(2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = torch.stack([r, t], -1)[:, None].expand(-1, z.shape[1], -1)
        q, k, v = self.qkv(torch.cat([z, times], -1)).unflatten(-1, (3, 2, 4)).unbind(2)
        out = rowmax.attention(q, k, v, causal=True, sink=self.sink, backend=self.backend)
        return self.out(out.flatten(2))


def _mean_flow(block: _Block, x: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """Return the MeanFlow loss: u must be v - (t - r) du/dt along the path."""
    v = noise - x
    z = (1 - t)[:, None, None] * x + t[:, None, None] * noise
    along = (v, torch.zeros_like(r), torch.ones_like(t))
    u, dudt = torch.func.jvp(block, (z, r, t), along)
    target = (v - (t - r)[:, None, None] * dudt).detach()
    return (u - target).square().mean() + 0.01 * dudt.square().mean()


def _trained(backend: str, compiler: str | None = None) -> list[float]:
    torch.manual_seed(0)
    block = _Block(backend).double()
    optimizer = torch.optim.Adam(block.parameters(), lr=0.03)
    loss_of = functools.partial(_mean_flow, block)
    x, losses = torch.randn(8, 7, 4, dtype=torch.float64), []
    for _ in range(12):
        noise = torch.randn_like(x)
        r, t = torch.rand(2, 8, dtype=torch.float64).sort(0)[0]
        loss = loss_of(x, noise, r, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_loss_with_a_jvp_in_it_trains() -> None:
    ours, dense = _trained(BACKEND), _trained("reference")
    torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-9)
    assert min(ours[-4:]) < ours[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_a_jvp(reentrant: bool) -> None:
    q, k, v = inputs(1, 12)

    def loss(q: Tensor) -> Tensor:
        def call(q: Tensor) -> Tensor:
            return rowmax.attention(q, k, v, dropout_p=0.4, seed=3, backend=BACKEND)

        return torch.func.jvp(call, (q,), (k,))[1]

    got, want = q.clone().requires_grad_(), q.clone().requires_grad_()
    checkpoint(loss, got, use_reentrant=reentrant).square().sum().backward()
    loss(want).square().sum().backward()
    torch.testing.assert_close(got.grad, want.grad)


def test_autocast() -> None:
    q, k, v = inputs(1, 20, dtype=torch.float32)

    def call(q: Tensor) -> Tensor:
        return rowmax.attention(q, k, v, backend=BACKEND)

    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = torch.func.jvp(call, (q,), (q,))
        second = torch.func.grad(
            lambda q: torch.func.grad(lambda q: call(q).float().square().sum())(q).square().sum()
        )(q)
    assert out.dtype == tangent.dtype == torch.bfloat16
    assert second.dtype == torch.float32
    want = torch.func.jvp(call, (q,), (q,))[1]
    torch.testing.assert_close(tangent.float(), want, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_distances_of_thousands(causal: bool) -> None:
    """Under ALiBi the number that is subtracted from s' moves from tile to tile."""
    call = make(Case("far", b=1, nq=100, nk=2000, hq=2, alibi=True, causal=causal))
    along = directions(call)
    got = second_answer(call, along, backend="torch")
    assert not second_complaints(got, second_expected(call, along))


def test_a_sink_that_outweighs_far_keys() -> None:
    """The mean of s' over the keys is in the thousands, and LSE' is the sink's tangent."""
    far = Case("far", nq=70, nk=5, alibi=True, sink=True, positions=(-5000, 0, 0, 0, 0))
    assert not _wrong(make(far))


def test_a_sink_of_no_weight_may_have_no_gradient() -> None:
    """Terms below the least normal number may be computed as 0, also in second derivatives."""
    case = Case("faint", nq=20, nk=20, hq=2, hk=2, sink=True)
    call = make(case)
    call = call.with_leaves({**call.leaves, "sink": torch.full((2,), -95.0)})
    along = directions(call)
    want = second_expected(call, along)
    got = second_answer(call, along, backend=BACKEND)
    assert 0 < want.ref["dsink"].abs().max() < torch.finfo(torch.float32).tiny
    none = {name: torch.zeros_like(got[name]) for name in ("dsink", "dtsink")}
    assert not second_complaints(got | none, want)
    more = {"dsink": torch.full_like(got["dsink"], 1e-30)}
    assert second_complaints(got | more, want)
