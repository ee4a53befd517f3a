"""The rules over torch tensors: against the definition, and against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rowmax.reference import dense
from rowmax.rules import band, mask, row_stats, score, softmax
from rowmax.rules import over_tensors as rules
from rowmax.rules.score import ScoreTerms
from rowmax.testing import CASES, Case, make

pytestmark = pytest.mark.usefixtures("one_thread")

UNPACKED = [case for case in CASES if not case.packed and case.nq <= 200]
LIMIT = st.none() | st.integers(-9, 9)


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("case", UNPACKED, ids=str)
def test_the_mask_is_that_of_the_definition(case: Case) -> None:
    problem, tensors = make(case).problem()
    want = dense._seen(problem, tensors, *dense._positions(problem, tensors))
    got = mask.dense(problem, tensors)
    assert torch.equal(*torch.broadcast_tensors(got, want))


@given(st.integers(-9, 9), LIMIT, LIMIT, st.integers(0, 7))
def test_ranges_of_tensors_are_those_of_numbers(
    shift: int, back: int | None, ahead: int | None, end: int
) -> None:
    x0 = torch.arange(6)
    x1 = x0 + 2
    for rule, plain in ((rules.any_range, band.any_range), (rules.all_range, band.all_range)):
        low, high = (torch.as_tensor(t).expand(6) for t in rule(x0, x1, shift, back, ahead, end))
        rest = (shift, back, ahead, end)
        want = [plain(i, i + 2, *rest) for i in range(6)]
        assert list(zip(low.tolist(), high.tolist(), strict=True)) == want
        again = rule(x0, x1, torch.tensor(shift), back, ahead, torch.tensor(end))
        assert all(
            torch.equal(torch.as_tensor(a).expand(6), b)
            for a, b in zip(again, (low, high), strict=True)
        )


def definition(x: Tensor, scale: float, softcap: float, bias: Tensor | None, slope, distance):
    s = scale * x
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    return s if slope is None else s - slope * distance


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_scores_and_their_derivative(softcap: float, with_bias: bool, alibi: bool) -> None:
    x = normal(3, 4, 5).requires_grad_()
    distance = torch.rand(4, 5, dtype=torch.float64) if alibi else None
    bias = normal(4, 5) if with_bias else None
    slope = normal(3, 1, 1).requires_grad_() if alibi else None
    scale = 0.7
    want = definition(x, scale, softcap, bias, slope, distance)
    terms = ScoreTerms(scale, bias=bias, slope=slope, distance=distance)
    if softcap:
        terms = terms._replace(inner=scale / softcap, cap=softcap)
    terms = ScoreTerms(*(t.detach() if isinstance(t, Tensor) else t for t in terms))
    s, y = rules.score(x.detach().clone(), terms)
    torch.testing.assert_close(s, want.detach())
    first = (t.flatten()[0].item() if isinstance(t, Tensor) else t for t in terms)
    number = ScoreTerms(*first)
    assert abs(score.score(x[0, 0, 0].item(), number)[0] - s[0, 0, 0].item()) < 1e-12
    ds = normal(3, 4, 5)
    want_dx, *want_slope = torch.autograd.grad(want, [x, *([] if slope is None else [slope])], ds)
    if slope is not None:
        found = rules.head_gradient(ds, x.detach(), y, terms, "slope")
        torch.testing.assert_close(found.sum((1, 2), keepdim=True), want_slope[0])
    torch.testing.assert_close(scale * rules.product_gradient(ds, y, terms), want_dx)


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("sink", [None, -torch.inf, -3.0, 50.0])
def test_the_softmax_by_tiles(block: int, sink: float | None) -> None:
    """Rows of scores, a row of nothing and a row that begins with nothing have their softmax."""
    s = 20 * normal(5, 8)
    s[1] = s[2, :4] = -torch.inf
    m = torch.full((5, 1), -torch.inf, dtype=torch.float64)
    l, O = torch.zeros_like(m), torch.zeros(5, 8, dtype=torch.float64)
    for j in range(0, 8, block):
        tile = s[:, j : j + block]
        m_new, base = rules.moved(m, tile.amax(1, keepdim=True))
        P, alpha = (torch.exp2((x - base) * softmax.LOG2E) for x in (tile, m))
        l, O = alpha * l + P.sum(1, True), alpha * O
        O[:, j : j + block] = P
        m = m_new
    whole = s
    if sink is not None:
        column = torch.full((5, 1), sink, dtype=torch.float64)
        m, l, alpha = rules.with_sink(m, l, column)
        O, whole = alpha * O, torch.cat([s, column], 1)
    torch.testing.assert_close(m + l.log(), whole.logsumexp(1, keepdim=True))
    want = whole.softmax(1)[:, :8].nan_to_num(0.0)
    torch.testing.assert_close(O / l.masked_fill(l == 0, 1.0), want)


def test_the_gradient_of_scores() -> None:
    s, v, do = normal(4, 6).requires_grad_(), normal(6, 3), normal(4, 3)
    P = s.softmax(1)
    out = P @ v
    (want,) = torch.autograd.grad(out, s, do)
    delta = (do * out).sum(1, keepdim=True)
    torch.testing.assert_close(rules.score_gradient(P.detach(), do @ v.T, delta.detach()), want)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_numbers_of_rows(with_dlse: bool) -> None:
    """dsink is that of the definition; a row that sees nothing has no delta."""
    problem, tensors = make(
        Case("rows", b=2, nq=5, nk=7, hq=4, hk=2, d=3, sink=True, allowed="bhqk", empty_rows=True),
        dtype=torch.float64,
    ).problem()
    assert tensors.sink is not None
    sink = tensors.sink.detach().requires_grad_()
    out, lse = dense.attention(problem, tensors._replace(sink=sink))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_dlse else None
    grads = [dout] if dlse is None else [dout, dlse]
    (want,) = torch.autograd.grad([out, lse][: len(grads)], sink, grads)
    out, lse = out.detach(), lse.detach()
    delta = row_stats.delta(out, dout, lse, dlse)
    torch.testing.assert_close(row_stats.dsink(sink, lse, delta, None), want)
    rest = torch.rand_like(lse)
    torch.testing.assert_close(row_stats.dsink(sink, lse - rest, delta, rest), want)
    lse[0, 1, 2] = -torch.inf
    dout[0, 2, 1] = torch.nan
    assert row_stats.delta(out, dout, lse, dlse)[0, 1, 2] == 0
    for natural, unit in ((True, 1.0), (False, softmax.LOG2E)):
        units = row_stats.score_lse(lse, natural)
        assert units[0, 1, 2] == torch.inf
        torch.testing.assert_close(units[1], lse[1] * unit)
