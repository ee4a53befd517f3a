"""The torch backend's own parts: its tiles, its memory, and what it keeps out of them.

``test_backends.py`` checks the answers of every backend.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import rowmax
from rowmax import tiled
from rowmax.call.inputs import HEAD_TERMS
from rowmax.call.problem import Problem, Tensors, Wanted
from rowmax.rules import dropout
from rowmax.rules import mask as rules
from rowmax.rules.dropout import keep_columns, keep_tile
from rowmax.testing import CASES, COVERING, Case, make
from rowmax.tiled.strips import OTHER_SIZES, SIZES, Sizes, strips

pytestmark = pytest.mark.usefixtures("one_thread")

sizes_of_tiles = st.builds(
    Sizes,
    rows=st.sampled_from([13, 32, 128]),
    cols=st.sampled_from([19, 50, 256]),
    tile=st.sampled_from([1, 10_000, 1 << 18]),
)
unpacked = st.sampled_from([c for c in CASES if not c.packed and c.nq <= 200])
ALL = Wanted(True, True, True, False, False)


def sized(sizes: Sizes):
    return patch.dict(SIZES, {"cpu": sizes})


def wanted(tensors: Tensors) -> Wanted:
    return Wanted(*(getattr(tensors, name) is not None for name in Wanted._fields))


@given(case=st.sampled_from(COVERING), sizes=sizes_of_tiles)
def test_any_tiles_give_the_same(case: Case, sizes: Sizes):
    problem, tensors = make(case, dtype=torch.float64).problem()
    dout = torch.randn(problem.out_shape, dtype=torch.float64)
    dlse = torch.randn(problem.lse_shape, dtype=torch.float64)
    with sized(OTHER_SIZES):
        out, lse = tiled.forward(problem, tensors)
        want = tiled.backward(problem, tensors, out, lse, dout, dlse, wanted(tensors))
    with sized(sizes):
        got_out, got_lse = tiled.forward(problem, tensors)
        got = tiled.backward(problem, tensors, out, lse, dout, dlse, wanted(tensors))
    for a, b in ((got_out, out), (got_lse, lse), *zip(got, want, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@given(case=unpacked, sizes=sizes_of_tiles)
def test_strips_visit_every_allowed_pair_once(case: Case, sizes: Sizes):
    problem, tensors = make(case).problem()
    seen = rules.dense(problem, tensors).expand(problem.batch, problem.hq, problem.nq, problem.nk)
    visits = torch.zeros(seen.shape, dtype=torch.int32)
    with sized(sizes):
        for strip in strips(problem, tensors):
            pairs = strip.size
            for cols, full in strip.tiles:
                assert cols.start < cols.stop
                many = pairs[0] * pairs[1] > 1  # one pair may be more than a tile alone
                numbers = torch.Size(pairs).numel() * (cols.stop - cols.start)
                assert numbers <= max(sizes.tile, sizes.rows * sizes.cols) or not many
                at = (strip.batch, strip.q_heads, strip.rows, cols)
                visits[at] += 1
                assert not full or seen[at].all()
    assert (visits[seen] == 1).all()
    assert (visits <= 1).all()


class _Largest(TorchDispatchMode):
    """The most numbers that any operation gave."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                stored = t.untyped_storage().nbytes() // t.itemsize
                self.numbers = max(self.numbers, min(t.numel(), stored))
        return result


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_no_tensor_is_larger_than_a_tile_or_an_input(dropout_p: float):
    n, heads, d = 1024, 4, 8
    q, k, v = (torch.randn(1, n, heads, d, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 1, n, requires_grad=True)
    mask = rowmax.Window(300, 20) & torch.rand(1, 1, 1, n).gt(0.1)
    with sized(Sizes(64, 64, 1 << 14)), _Largest() as largest:
        out = rowmax.attention(
            q, k, v, mask=mask, bias=bias, softcap=5.0, dropout_p=dropout_p, backend="torch"
        )
        out.backward(torch.ones_like(out))
    assert largest.numbers <= max(n * heads * d, 1 << 14)


# --- what must not leak ------------------------------------------------------------------------

BAD = (torch.nan, torch.inf, -torch.inf, 1e200)


@given(
    case=st.sampled_from([c for c in COVERING if not c.packed]),
    sizes=sizes_of_tiles,
    where=st.sets(st.sampled_from(["k", "v", "q", "dout", "dlse"]), min_size=1),
    bad=st.sampled_from(BAD),
)
def test_nothing_bad_crosses_the_mask(case: Case, sizes: Sizes, where: set[str], bad: float):
    """Bad keys and bad rows: whatever sees neither is as it was, in every output."""
    problem, tensors = make(case, dtype=torch.float64).problem()
    dout = torch.randn(problem.out_shape, dtype=torch.float64)
    dlse = torch.randn(problem.lse_shape, dtype=torch.float64)
    with sized(sizes):
        out, lse = tiled.forward(problem, tensors)
        want = tiled.backward(problem, tensors, out, lse, dout, dlse, wanted(tensors))

    bad_keys = (torch.rand(problem.batch, problem.nk) < 0.1)[:, :, None, None]
    bad_rows = (torch.rand(problem.batch, problem.nq) < 0.1)[:, :, None, None]
    tensors = tensors._replace(
        k=tensors.k.masked_fill(bad_keys, bad) if "k" in where else tensors.k,
        v=tensors.v.masked_fill(bad_keys, bad) if "v" in where else tensors.v,
        q=tensors.q.masked_fill(bad_rows, bad) if "q" in where else tensors.q,
    )
    if "dout" in where:
        dout = dout.masked_fill(bad_rows, bad)
    if "dlse" in where:
        dlse = dlse.masked_fill(bad_rows[:, None, :, 0, 0], bad)
    with sized(sizes):
        bad_out, bad_lse = tiled.forward(problem, tensors)
        got = tiled.backward(problem, tensors, bad_out, bad_lse, dout, dlse, wanted(tensors))

    seen = rules.dense(problem, tensors).expand(problem.batch, problem.hq, problem.nq, problem.nk)
    rows_hit = (seen & bad_keys[:, None, :, 0, 0][:, :, None]).any(3)
    rows_hit |= bad_rows[:, None, :, 0, 0] & seen.any(3)  # [B, Hq, Nq]
    by_group = (seen & rows_hit[..., None]).unflatten(1, (problem.hk, problem.group))
    keys_hit = by_group.any(2).any(2)  # [B, Hk, Nk]
    for name, a, b, hit in (
        ("out", bad_out, out, rows_hit.transpose(1, 2)[..., None]),
        ("lse", bad_lse, lse, rows_hit),
        ("dq", got.q, want.q, rows_hit.transpose(1, 2)[..., None]),
        ("dk", got.k, want.k, keys_hit.transpose(1, 2)[..., None]),
        ("dv", got.v, want.v, keys_hit.transpose(1, 2)[..., None]),
    ):
        assert a is not None
        assert b is not None
        fine = (~hit).expand(a.shape)
        torch.testing.assert_close(
            a[fine], b[fine], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("bad", BAD)
def test_bad_numbers_in_a_hidden_bias(bad: float):
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(40, 40, dtype=torch.float64)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    grads = []
    for b in (bias, bias.masked_fill(hidden, bad)):
        b.requires_grad_()
        out = rowmax.attention(q, k, v, causal=True, bias=b, backend="torch")
        grads.append((out.detach(), *torch.autograd.grad(out.square().sum(), b)))
    torch.testing.assert_close(grads[0], grads[1])


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = (torch.randn(2, 50, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(50, 50).masked_fill(torch.rand(50, 50) < 0.5, -torch.inf)
    bias[7] = -torch.inf
    bias.requires_grad_()
    out, lse = rowmax.attention(q, k, v, bias=bias, return_lse=True, backend="torch")
    want, want_lse = rowmax.attention(q, k, v, mask=bias > -1, return_lse=True, backend="torch")
    torch.testing.assert_close((out, lse), (want, want_lse))
    assert (out[:, 7] == 0).all()
    assert (lse[:, :, 7] == -torch.inf).all()
    # a cotangent of a row that sees nothing is dropped, even if it is not a number
    dlse = torch.randn_like(lse)
    dlse[:, :, 7] = torch.nan
    dout = torch.randn_like(out)
    dout[:, 7] = torch.inf
    gradients = torch.autograd.grad((out, lse), (q, k, v, bias), (dout, dlse))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert (gradients[0][:, 7] == 0).all()
    assert (gradients[3][7] == 0).all()


# --- numbers -----------------------------------------------------------------------------------


def test_autocast_does_not_reach_into_tiles():
    problem, tensors = make(COVERING[0]).problem()
    dout = torch.randn(problem.out_shape)
    want = tiled.forward(problem, tensors)
    want_gradients = tiled.backward(problem, tensors, *want, dout, None, ALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tiled.forward(problem, tensors)
        got_gradients = tiled.backward(problem, tensors, *got, dout, None, ALL)
    for a, b in zip((*want, *want_gradients[:3]), (*got, *got_gradients[:3]), strict=True):
        assert torch.equal(a, b)


def test_broadcast_dbias_is_summed_in_float32():
    """A sum over 4096 rows: in bfloat16 it would have stopped growing at 256 times its terms."""
    q, k, v = (torch.randn(4, 1024, 1, 8).bfloat16() for _ in range(3))
    bias = torch.zeros(1, 1, 1, 1024, dtype=torch.bfloat16, requires_grad=True)
    out = rowmax.attention(q, k, v, bias=bias, backend="torch")
    (got,) = torch.autograd.grad(out, bias, v.expand_as(out))
    wide = bias.detach().double().requires_grad_()
    want = rowmax.attention(*(t.double() for t in (q, k, v)), bias=wide, backend="reference")
    (want,) = torch.autograd.grad(want, wide, v.double())
    assert (got - want).norm() <= 2 * torch.finfo(torch.bfloat16).eps * want.norm()


@given(
    start=st.integers(0, 300),
    length=st.integers(0, 200),
    seed=st.integers(-(2**63), 2**63 - 1),
    threshold=st.integers(1, 65535),
)
def test_columns_are_kept_as_one_by_one(start: int, length: int, seed: int, threshold: int):
    key = torch.tensor(seed)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    i = torch.arange(5)[:, None]
    columns = torch.arange(start, start + length)
    got = keep_columns(key, b, h, i, range(start, start + length), threshold)
    assert torch.equal(got, keep_tile(key, b, h, i, columns, threshold))


def test_refuses_only_what_it_has_not():
    problem, _ = make(COVERING[0]).problem()
    assert tiled.supports(problem, "forward") is None
    assert tiled.supports(problem, "backward") is None
    assert tiled.supports(problem, "tangent") is None


def test_refuses_tangents_of_terms_that_bend_scores(monkeypatch: pytest.MonkeyPatch):
    """Their second derivatives need rules that added terms do not."""
    problem, _ = make(Case("alibi", alibi=True)).problem()
    assert tiled.supports(problem, "tangent_backward") is None
    monkeypatch.setitem(HEAD_TERMS, "alibi", HEAD_TERMS["alibi"]._replace(added=False))
    assert tiled.supports(problem, "backward") is None
    for call in ("tangent", "tangent_backward"):
        assert tiled.supports(problem, call) == "it has no tangent of alibi"


def test_gradcheck(monkeypatch: pytest.MonkeyPatch):
    tiles, tile = {}, dropout.tile

    def kept(problem: Problem, tensors: Tensors, *ranges: range):
        if ranges not in tiles:  # the same numbers in all 540 calls, and half of their time
            tiles[ranges] = tile(problem, tensors, *ranges)
        return tiles[ranges]

    monkeypatch.setattr(dropout, "tile", kept)
    q = torch.randn(2, 5, 4, 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 7, 2, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 7, 2, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 5, 1, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, bias, sink):
        return rowmax.attention(
            q,
            k,
            v,
            mask=rowmax.Window(3, 1),
            bias=bias,
            sink=sink,
            softcap=2.0,
            dropout_p=0.3,
            seed=4,
            return_lse=True,
            backend="torch",
        )

    with sized(Sizes(4, 3, 20)):
        assert torch.autograd.gradcheck(call, (q, k, v, bias, sink))


@pytest.mark.parametrize(
    "case",
    [
        Case("full", b=1, nq=40, nk=300),
        Case("causal", b=2, nq=300, hq=4, hk=2, causal=True),
        Case("window", b=1, nq=90, nk=700, left=600, right=20),
        Case("sink", b=1, nq=33, nk=257, sink=True, softcap=2.0),
        Case("packed", hq=2, sequences=((100, 300), (28, 60)), causal=True),
        Case("dropout", b=1, nq=40, nk=300, dropout=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_the_largest_values_do_not_overflow(case: Case, dtype: torch.dtype):
    """Their average is as large as they are, and their sum is not a number of the dtype.

    A column of small values keeps its digits, and one of both signs has no NaN.
    """
    problem, tensors = make(case, dtype=dtype).problem()
    big, small = (1.5e308, 1e-300) if dtype == torch.float64 else (3e38, 1e-36)
    big *= 1.0 - problem.dropout_p  # 1 / (1 - p) is a factor of the weights
    v = (1.0 + 0.01 * torch.rand(tensors.v.shape, dtype=torch.float64)) * big
    v[..., 0] *= small / big
    v[:, ::2, :, 1] *= -1
    v = v.to(dtype)
    out, lse = tiled.forward(problem, tensors._replace(v=v))
    less = tensors._replace(v=v / 2**60)  # exact except the small column
    want, lse_want = tiled.forward(problem, less)
    assert torch.equal(lse, lse_want)
    scaled = want.double() * 2.0**60
    assert scaled[..., 2:].amax() > big / 2
    seen = scaled.abs() <= torch.finfo(dtype).max
    assert seen.all() or case.dropout
    error = ((out.double() - scaled) / big)[..., 1:]
    assert error[seen[..., 1:]].abs().max() <= 4 * torch.finfo(dtype).eps
    v[..., 1:] = 1.0
    assert torch.equal(tiled.forward(problem, tensors._replace(v=v))[0][..., 0], out[..., 0])
