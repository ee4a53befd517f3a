"""The reference: against plain formulas, against torch, against itself by another road."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

import rowmax
from rowmax.reference import online
from rowmax.testing import CASES, Call, Case, answer, complaints, cotangents, expected, make

attention = functools.partial(rowmax.attention, backend="reference", return_lse=True)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch's own decompositions for forward mode are still scripted
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]


def normal(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=grad)


# --- against plain formulas --------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, **terms: Any) -> tuple[Tensor, Tensor]:
    """Compute one head by the definition, in Python loops: q ``[Nq, D]``, k, v -> out, lse.

    Terms: allowed (i, j) -> bool, bias (i, j) -> number, softcap, sink.
    """
    outs, lses = [], []
    for i in range(q.shape[0]):
        scores, values = [], []
        for j in range(k.shape[0]):
            if "allowed" in terms and not terms["allowed"](i, j):
                continue
            s = scale * (q[i] * k[j]).sum()
            if "softcap" in terms:
                s = terms["softcap"] * torch.tanh(s / terms["softcap"])
            if "bias" in terms:
                s = s + terms["bias"](i, j)
            scores.append(s.exp())
            values.append(v[j])
        total = sum(scores) + (terms["sink"].exp() if "sink" in terms else 0)
        if not torch.is_tensor(total):
            outs.append(torch.zeros_like(v[0]))
            lses.append(q.new_tensor(-math.inf))
            continue
        outs.append(sum((s / total * x for s, x in zip(scores, values)), torch.zeros_like(v[0])))  # noqa: B905
        lses.append(total.log())
    return torch.stack(outs), torch.stack(lses)


def test_every_term_against_scalars() -> None:
    """Two heads of one sequence with everything on, and every gradient of it."""
    nq, nk, hq, hk, d, dv = 5, 7, 4, 2, 3, 2
    q, k, v = (
        normal(1, nq, hq, d, grad=True),
        normal(1, nk, hk, d, grad=True),
        normal(1, nk, hk, dv),
    )
    v.requires_grad_()
    bias, sink = normal(1, hq, nq, nk, grad=True), normal(hq, grad=True)
    alibi = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    out, lse = attention(
        q, k, v, causal=True, mask=rowmax.Window(3), bias=bias, sink=sink, alibi=alibi,
        scale=0.8, softcap=1.2,
    )  # fmt: skip
    offset = nk - nq
    want = [
        plain(
            q[0, :, h],
            k[0, :, h // 2],
            v[0, :, h // 2],
            0.8,
            allowed=lambda i, j: i + offset - 3 <= j <= i + offset,
            softcap=1.2,
            bias=lambda i, j, h=h: bias[0, h, i, j] - alibi[h] * abs(i + offset - j),
            sink=sink[h],
        )
        for h in range(hq)
    ]
    want_out = torch.stack([o for o, _ in want], 1)[None]
    want_lse = torch.stack([e for _, e in want])[None]
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    leaves = [q, k, v, bias, sink]
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    for a, b in zip(
        got, torch.autograd.grad([want_out, want_lse], leaves, [dout, dlse]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_rows_of_nothing() -> None:
    """out 0, lse -inf (with a sink, the sink), gradients 0, and no NaN."""
    q, k, v = (normal(1, 4, 2, 3, grad=True) for _ in range(3))
    sink = normal(2, grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out, lse = attention(q, k, v, mask=mask)
    assert not out[0, 1].any()
    assert (lse[0, :, 1] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, [0, 2, 3]].sum(), (q, k, v))
    assert not dq[0, 1].any()
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    out, lse = attention(q, k, v, mask=mask, sink=sink)
    assert not out[0, 1].any()
    assert torch.equal(lse[0, :, 1], sink)
    (dsink,) = torch.autograd.grad(lse[0, :, 1].sum(), sink)
    assert torch.equal(dsink, torch.ones_like(sink))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_against_torch(causal: bool, heads: tuple[int, int], bias: bool) -> None:
    (hq, hk), n = heads, 30
    q, k, v = normal(2, n, hq, 8, grad=True), *(normal(2, n, hk, 8, grad=True) for _ in range(2))
    extra = normal(2, hq, n, n, grad=True) if bias else None
    out, _ = attention(q, k, v, causal=causal, bias=extra)
    added = extra  # torch takes causal or a mask, not both
    if extra is not None and causal:
        added = extra.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
    want = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=added,
        is_causal=causal and added is None,
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(out, want)
    leaves = [q, k, v, *([extra] if bias else [])]
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b)


# --- gradcheck ---------------------------------------------------------------------------------

_TERMS = {
    "plain": Case("t"),
    "causal": Case("t", causal=True),
    "window": Case("t", left=2, right=1),
    "documents": Case("t", documents="queries"),
    "lengths": Case("t", lengths=(0.5, 1.0)),
    "mask": Case("t", allowed="bhqk", empty_rows=True),
    "bias": Case("t", bias="bhqk"),
    "bias-broadcast": Case("t", bias="1h1k"),
    "alibi": Case("t", alibi=True),
    "softcap": Case("t", softcap=1.5),
    "sink": Case("t", sink=True),
    "sink-mask": Case("t", sink=True, allowed="b1qk", empty_rows=True),
    "dropout": Case("t", dropout=0.4),
    "gqa": Case("t", hk=1),
    "wide": Case("t", dv=5),
    "everything": Case("t", causal=True, bias="1hqk", softcap=2.0, sink=True, dropout=0.3, hk=1),
    "packed": Case("t", sequences=((2, 3), (0, 1), (4, 2)), causal=True, sink=True),
}


def _small(case: Case, nq: int = 4, nk: int = 5) -> Call:
    options = {"b": 2, "nq": nq, "nk": nk, "hq": 2, "d": 3}
    return make(Case(**{**vars(case), **options}), dtype=torch.float64)


def _function(call: Call, backend: str) -> tuple[Any, list[Tensor]]:
    """Return a call as a function of its leaves, with 0 as the lse of rows of nothing."""
    leaves = {name: t.clone().requires_grad_() for name, t in call.leaves.items()}

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.with_leaves(dict(zip(leaves, tensors, strict=True)))(backend=backend)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    return function, list(leaves.values())


@pytest.mark.parametrize("term", _TERMS)
def test_gradcheck(term: str, backend: str) -> None:
    function, leaves = _function(_small(_TERMS[term]), backend)
    assert gradcheck(function, leaves, fast_mode=False)


@pytest.mark.parametrize("term", _TERMS)
def test_in_both_modes_and_twice(term: str) -> None:
    """The definition is differentiable in every way, through the public calls."""
    function, leaves = _function(_small(_TERMS[term], nq=3, nk=4), "reference")
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)


def test_the_second_derivative_is_no_zero() -> None:
    """By hand: one query, two keys, v = (1, 0) and D = 1: out is the logistic function."""
    q = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
    out, _ = attention(q.view(1, 1, 1, 1), k, k, scale=1.0)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first, q, create_graph=True)
    (third,) = torch.autograd.grad(second, q)
    p = torch.sigmoid(q.detach())
    torch.testing.assert_close(first, p * (1 - p))
    torch.testing.assert_close(second, p * (1 - p) * (1 - 2 * p))
    torch.testing.assert_close(third, p * (1 - p) * (1 - 6 * p + 6 * p**2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_derivatives_beside_a_masked_nan(bad: float) -> None:
    """They are right in every slice of ``vmap`` too, where no value can be read."""
    q, k, v = (normal(2, 1, 4, 1, 2) for _ in range(3))

    def second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return attention(q, k, v, causal=True)[0][:, :3].square().sum()

        return torch.func.hessian(loss)(q)

    want = torch.stack([second(*slices) for slices in zip(q, k, v, strict=True)])
    for t in (k, v):
        t[:, :, 3] = bad  # which the last query alone may see
    got = torch.stack([second(*slices) for slices in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got[:, :, :3], want[:, :, :3])
    torch.testing.assert_close(torch.vmap(second)(q, k, v)[:, :, :3], want[:, :, :3])


def test_compiled_it_has_two_derivatives_and_no_silent_zero() -> None:
    torch._dynamo.reset()
    q, k, v = (normal(1, 5, 2, 3, grad=True) for _ in range(3))

    def total(q: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(f(q), (q, k, v)) for f in (compiled, total))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    for transform in (torch.func.hessian, torch.func.jacfwd):
        whole = torch.compile(transform(total), backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(q.detach()), transform(total)(q.detach()))
    third = torch.func.grad(lambda q: torch.func.hessian(total)(q).sum())
    assert third(q.detach()).abs().sum() > 0
    with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException)):
        torch.compile(third, backend="eager", fullgraph=True)(q.detach())


def test_backend_gives_what_autograd_does() -> None:
    for case in CASES:
        if case.name in ("causal", "packed-unequal-sink", "empty-keys-sink", "lengths-zero"):
            call = make(case)
            grads = cotangents(call)
            assert not complaints(answer(call, *grads, backend="reference"), expected(call, *grads))


# --- the recurrence ----------------------------------------------------------------------------


def test_online_softmax() -> None:
    x = [0.3, -2.0, 700.0, 699.0, -math.inf, 701.5]
    want = torch.tensor(x, dtype=torch.float64).softmax(0)
    got = torch.tensor(online.online_softmax(x), dtype=torch.float64)
    torch.testing.assert_close(got, want)
    assert online.online_softmax([-math.inf] * 3) == [0.0] * 3
    assert online.online_softmax([]) == []


@pytest.mark.parametrize("block", [1, 3, 8, 20])
def test_block_softmax(block: int) -> None:
    x = 30 * normal(6, 17)
    x[2, :5] = -math.inf
    x[3] = -math.inf
    want = x.softmax(1).nan_to_num(0.0)
    torch.testing.assert_close(online.block_softmax(x, block), want)
    assert online.block_softmax(x[:, :0], block).shape == (6, 0)


@pytest.mark.parametrize("block", [1, 4, 16, 64])
def test_attention_by_tiles(block: int) -> None:
    q, k, v = normal(13, 4), normal(19, 4), normal(19, 5)
    out, lse = online.attention(q, k, v, 0.5, block)
    want_out, want_lse = attention(q[None, :, None], k[None, :, None], v[None, :, None], scale=0.5)
    torch.testing.assert_close(out, want_out[0, :, 0])
    torch.testing.assert_close(lse, want_lse[0, 0])


# --- merge -------------------------------------------------------------------------------------


def _parts(count: int, packed: bool = False) -> list[tuple[Tensor, Tensor]]:
    lead = () if packed else (2,)
    return [(normal(*lead, 5, 3, 4), normal(*lead, 3, 5)) for _ in range(count)]


def test_merge_is_attention_over_all_keys() -> None:
    q, k, v = normal(2, 6, 4, 8), normal(2, 15, 2, 8), normal(2, 15, 2, 5)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    want = attention(*leaves)
    cuts = [slice(0, 4), slice(4, 5), slice(5, 5), slice(5, 15)]
    got = rowmax.merge(*(attention(q, k[:, c], v[:, c]) for c in cuts))
    grads = [torch.randn_like(t) for t in want]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(got, leaves, grads),
        torch.autograd.grad(want, leaves, grads),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_merge_in_any_order_and_grouping() -> None:
    a, b, c = _parts(3)
    want = rowmax.merge(a, b, c)
    for got in (
        rowmax.merge(c, a, b),
        rowmax.merge(rowmax.merge(a, b), c),
        rowmax.merge(a, rowmax.merge(b, c)),
    ):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
    for x, y in zip(rowmax.merge(a), a, strict=True):
        torch.testing.assert_close(x, y)


def test_merge_with_parts_of_nothing() -> None:
    """A row that saw nothing in a part takes nothing from it, in value or gradient."""
    (out, lse), (zero, none) = _parts(2)
    zero, none = torch.zeros_like(zero), torch.full_like(none, -math.inf)
    none[0, 0, 0] = 0.5
    leaves = [t.clone().requires_grad_() for t in (out, lse, zero, none)]
    got = rowmax.merge((leaves[0], leaves[1]), (leaves[2], leaves[3]))
    torch.testing.assert_close(got[0][1], out[1])
    torch.testing.assert_close(got[1][1], lse[1])
    torch.testing.assert_close(got[1][0, 0, 0], torch.logaddexp(lse[0, 0, 0], none[0, 0, 0]))
    grads = torch.autograd.grad(got[0].sum() + got[1].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[2][1].any()
    assert not grads[3][1].any()
    # nothing at all, in every part
    nothing = (torch.zeros_like(out).requires_grad_(), torch.full_like(lse, -math.inf))
    merged = rowmax.merge(nothing, nothing)
    assert not merged[0].any()
    assert (merged[1] == -math.inf).all()
    (grad,) = torch.autograd.grad(merged[0].sum(), nothing[0])
    assert not grad.any()


@pytest.mark.parametrize("packed", [False, True])
def test_merge_gradcheck(packed: bool) -> None:
    leaves = [t.requires_grad_() for part in _parts(3, packed) for t in part]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return rowmax.merge(*zip(tensors[::2], tensors[1::2], strict=True))

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


def test_merge_of_half_precision() -> None:
    q = torch.randn(1, 12, 2, 8, dtype=torch.bfloat16)
    parts = [attention(q, q[:, c], q[:, c]) for c in (slice(0, 7), slice(7, 12))]
    out, lse = rowmax.merge(*parts)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    want = attention(q, q, q)
    torch.testing.assert_close(out, want[0], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, want[1])
