"""Identities between calls hold for any numbers: hypothesis draws shapes and features."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rowmax
from rowmax import Documents, PrefixLengths
from rowmax.testing import Answer, Call, Case, answer, cotangents, make

inf, nan = math.inf, math.nan
DOUBLE = torch.float64

lengths = st.integers(1, 90)
limits = st.none() | st.integers(0, 60)


@st.composite
def calls(draw: st.DrawFn, band: bool = True, **fixed: Any) -> Call:
    """Draw a call in float64 with any features but dropout and those that are fixed."""
    group = draw(st.sampled_from([1, 2, 3]))
    hk = draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {
        "b": draw(st.integers(1, 2)),
        "nq": draw(lengths),
        "nk": draw(lengths),
        "hq": hk * group,
        "hk": hk,
        "d": draw(st.sampled_from([1, 5, 16, 32])),
        "dv": draw(st.sampled_from([3, 16])),
        "bias": draw(st.sampled_from([None, "bhqk", "1hqk", "11q1", "b11k"])),
        "alibi": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "sink": draw(st.booleans()),
        "layout": draw(st.sampled_from(["bnhd", "bhnd", "sliced"])),
    }
    if band:
        options |= {"left": draw(limits), "right": draw(limits), "causal": draw(st.booleans())}
    return make(
        Case("drawn", **{**options, **fixed}), dtype=DOUBLE, generator=draw(st.integers(0, 9))
    )


def with_keywords(call: Call, **keywords: Any) -> Call:
    """Return the call with other keyword arguments."""
    return replace(call, keywords={**call.keywords, **keywords})


def same(got: Answer, want: Answer, skip: tuple[str, ...] = ()) -> None:
    for (name, a, _), (_, b, _) in zip(got.items(), want.items(), strict=True):
        if name not in skip:
            torch.testing.assert_close(
                a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


def unmasked(call: Call) -> Call:
    return with_keywords(call, mask=None, causal=False)


# --- splitting and merging ---------------------------------------------------------------------


@given(data=st.data())
def test_any_split_merges_to_the_whole(backend: str, data: st.DataObject) -> None:
    """Attention over parts of the keys, merged, is attention over all; gradients too."""
    call = data.draw(calls(band=False, sink=False, alibi=False, bias=None))
    nk = call.inputs[1].shape[1]
    points = sorted(data.draw(st.lists(st.integers(0, nk), max_size=3)))
    dout, dlse = cotangents(call)
    whole = answer(call, dout, dlse, backend=backend)
    q, k, v = (t.detach().requires_grad_() for t in call.inputs)
    parts = [
        replace(call, inputs=(q, k[:, a:b], v[:, a:b]))(backend=backend)
        for a, b in pairwise([0, *points, nk])
    ]
    out, lse = rowmax.merge(*parts)
    got = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    same(Answer(out.detach(), lse.detach(), dict(zip("qkv", got, strict=True))), whole)


# --- what is masked has no part ----------------------------------------------------------------


@given(data=st.data(), bad=st.sampled_from([nan, inf, -inf, 1e300]))
def test_a_masked_key_never_matters(backend: str, data: st.DataObject, bad: float) -> None:
    """Whatever a key and value hold that no row may see: not in out, not in any gradient."""
    call = data.draw(calls())
    b, nk = call.inputs[1].shape[:2]
    form = data.draw(st.sampled_from(["lengths", "boolean", "documents"]))
    gone = torch.zeros(b, nk, dtype=torch.bool)
    if form == "lengths":
        kept = torch.tensor([data.draw(st.integers(0, nk)) for _ in range(b)])
        gone = torch.arange(nk) >= kept[:, None]
        mask: Any = PrefixLengths(kept)
    else:
        hidden = data.draw(st.lists(st.integers(0, nk - 1), max_size=nk))
        gone[:, hidden] = True
        mask = ~gone[:, None, None]
        if form == "documents":
            mask = Documents(gone.long(), q_ids=torch.zeros(call.inputs[0].shape[1]).long())
    if "mask" in call.keywords:
        mask = call.keywords["mask"] & mask
    call = with_keywords(call, mask=mask)
    grads = cotangents(call)
    want = answer(call, *grads, backend=backend)
    k, v = (t.masked_fill(gone[..., None, None], bad) for t in call.inputs[1:3])
    got = answer(call.with_leaves({"k": k, "v": v}), *grads, backend=backend)
    same(got, want)
    assert not got.gradients["k"][gone].any()
    assert not got.gradients["v"][gone].any()


@given(data=st.data(), bad=st.sampled_from([nan, inf]))
def test_a_row_never_meets_what_it_may_not_see(
    backend: str, data: st.DataObject, bad: float
) -> None:
    """Under a band, rows that do not see a bad key are as if it were good."""
    call = data.draw(calls(bias=None, right=0))
    (b, nq), nk = call.inputs[0].shape[:2], call.inputs[1].shape[1]
    j = data.draw(st.integers(0, nk - 1))
    problem, tensors = call.problem()
    blind = ~rowmax.rules.mask.dense(problem, tensors)[0, 0, :, j]  # rows that do not see key j
    dout, dlse = cotangents(call)
    dout, dlse = dout * blind[:, None, None], dlse * blind  # only theirs is wanted
    want = answer(call, dout, dlse, backend=backend)
    k, v = call.inputs[1].clone(), call.inputs[2].clone()
    k[:, j], v[:, j] = bad, bad
    out, lse = call.with_leaves({"k": k, "v": v})(backend=backend)
    torch.testing.assert_close(out[:, blind], want.out[:, blind], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse[..., blind], want.lse[..., blind], rtol=1e-9, atol=1e-9)
    q = call.inputs[0].detach().requires_grad_()
    out, lse = call.with_leaves({"q": q, "k": k, "v": v})(backend=backend)
    (dq,) = torch.autograd.grad([out, lse], q, [dout, dlse])
    torch.testing.assert_close(dq[:, blind], want.gradients["q"][:, blind], rtol=1e-9, atol=1e-9)
    assert (b, nq) == dq.shape[:2]


@given(data=st.data(), bad=st.sampled_from([nan, inf]))
def test_a_row_that_sees_nothing_never_matters(
    backend: str, data: st.DataObject, bad: float
) -> None:
    """A query that may see no key has no part in dk, dv or dbias, even when it is NaN."""
    call = data.draw(calls(sink=False))
    nq, nk = call.inputs[0].shape[1], call.inputs[1].shape[1]
    rows = torch.rand(nq, generator=torch.Generator().manual_seed(nq)) < 0.3
    mask = ~rows[:, None].expand(nq, nk)
    mask = call.keywords["mask"] & mask if "mask" in call.keywords else mask
    call = with_keywords(call, mask=mask)
    grads = cotangents(call)
    want = answer(call, *grads, backend=backend)
    q = call.inputs[0].masked_fill(rows[:, None, None], bad)
    got = answer(call.with_leaves({"q": q}), *grads, backend=backend)
    same(got, want)
    assert not got.out[:, rows].any()
    assert (got.lse[..., rows] == -inf).all()
    assert not got.gradients["q"][:, rows].any()


@given(data=st.data(), value=st.sampled_from([nan, inf, 7.0]))
def test_bias_of_a_masked_pair_never_matters(
    backend: str, data: st.DataObject, value: float
) -> None:
    call = data.draw(calls(bias="bhqk"))
    bias = call.keywords["bias"]
    allowed = torch.rand(bias.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    mask = call.keywords["mask"] & allowed if "mask" in call.keywords else allowed
    call = with_keywords(call, mask=mask)
    grads = cotangents(call)
    want = answer(call, *grads, backend=backend)
    got = answer(
        call.with_leaves({"bias": bias.masked_fill(~allowed, value)}), *grads, backend=backend
    )
    same(got, want)
    assert not got.gradients["bias"][~allowed].any()


@given(data=st.data())
def test_bias_of_minus_infinity_is_a_mask(backend: str, data: st.DataObject) -> None:
    call = data.draw(calls(bias="bhqk"))
    bias = call.keywords["bias"]
    allowed = torch.rand(bias.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[:, :, ::5] = False  # rows of nothing as well
    mask = call.keywords["mask"] & allowed if "mask" in call.keywords else allowed
    grads = cotangents(call)
    want = answer(with_keywords(call, mask=mask), *grads, backend=backend)
    hidden = call.with_leaves({"bias": bias.masked_fill(~allowed, -inf)})
    same(answer(hidden, *grads, backend=backend), want)


# --- symmetries --------------------------------------------------------------------------------


@given(data=st.data())
def test_permuting_keys_changes_nothing(backend: str, data: st.DataObject) -> None:
    """Without positions, keys are a set."""
    call = unmasked(data.draw(calls(band=False, alibi=False, bias="bhqk")))
    nk = call.inputs[1].shape[1]
    order = torch.tensor(data.draw(st.permutations(range(nk))))
    grads = cotangents(call)
    want = answer(call, *grads, backend=backend)
    leaves = {name: call.leaves[name][:, order] for name in "kv"}
    leaves["bias"] = call.keywords["bias"][..., order]
    got = answer(call.with_leaves(leaves), *grads, backend=backend)
    back = order.argsort()
    got.gradients.update({name: got.gradients[name][:, back] for name in "kv"})
    got.gradients["bias"] = got.gradients["bias"][..., back]
    same(got, want)


@given(data=st.data())
def test_heads_and_sequences_are_apart(backend: str, data: st.DataObject) -> None:
    """Each sequence and each kv head's group is as it is alone."""
    call = data.draw(calls(bias="bhqk", b=2))
    b, h = data.draw(st.integers(0, 1)), data.draw(st.integers(0, call.inputs[1].shape[2] - 1))
    group = call.inputs[0].shape[2] // call.inputs[1].shape[2]
    heads, dout_dlse = slice(h * group, (h + 1) * group), cotangents(call)
    want = answer(call, *dout_dlse, backend=backend)
    leaves = {
        "q": call.inputs[0][b : b + 1, :, heads],
        "bias": call.keywords["bias"][b : b + 1, heads],
    }
    leaves |= {n: call.leaves[n][b : b + 1, :, h : h + 1] for n in "kv"}
    if "sink" in call.keywords:
        leaves["sink"] = call.keywords["sink"][heads]
    alone = call.with_leaves(leaves)
    if "alibi" in call.keywords:
        leaves["alibi"] = call.keywords["alibi"][heads]
        alone = call.with_leaves(leaves)
    dout, dlse = dout_dlse[0][b : b + 1, :, heads], dout_dlse[1][b : b + 1, heads]
    got = answer(alone, dout, dlse, backend=backend)
    kv, qs = (slice(b, b + 1), slice(None), slice(h, h + 1)), (slice(b, b + 1), slice(None), heads)
    part = Answer(
        want.out[qs],
        want.lse[b : b + 1, heads],
        {n: want.gradients[n][qs if n == "q" else kv] for n in "qkv"}
        | {"bias": want.gradients["bias"][b : b + 1, heads]}
        | {n: want.gradients[n] for n in ("sink", "alibi") if n in leaves},
    )
    same(got, part, skip=("dsink", "dalibi"))  # sums over the batch


@given(data=st.data())
def test_gqa_is_repeated_heads(backend: str, data: st.DataObject) -> None:
    call = data.draw(calls())
    hk = call.inputs[1].shape[2]
    group = call.inputs[0].shape[2] // hk
    grads = cotangents(call)
    want = answer(call, *grads, backend=backend)
    repeated = {n: call.leaves[n].repeat_interleave(group, 2) for n in "kv"}
    got = answer(call.with_leaves(repeated), *grads, backend=backend)
    for n in "kv":
        got.gradients[n] = got.gradients[n].unflatten(2, (hk, group)).sum(3)
    same(got, want)


@given(data=st.data(), shift=st.floats(-5, 5))
def test_a_constant_added_to_a_row_moves_lse_alone(
    backend: str, data: st.DataObject, shift: float
) -> None:
    call = data.draw(calls(bias="11q1", sink=False))
    moved = call.with_leaves({"bias": call.keywords["bias"] + shift})
    out, lse = call(backend=backend)
    out_moved, lse_moved = moved(backend=backend)
    torch.testing.assert_close(out_moved, out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse_moved, lse + shift, rtol=1e-9, atol=1e-9)


# --- documents and packed sequences are separate calls -----------------------------------------


def _lengths(draw: st.DrawFn | Any) -> list[int]:
    return draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))


@given(data=st.data())
def test_documents_are_separate_calls(backend: str, data: st.DataObject) -> None:
    """Equal documents of q and k, causal or windowed: each is attention on its own."""
    sizes = [n for n in _lengths(data.draw) if n] or [7]
    n = sum(sizes)
    call = data.draw(calls(nq=n, nk=n, bias=None, alibi=False, sink=False, b=1))
    cu = torch.tensor([0, *sizes]).cumsum(0)
    mask: Any = Documents(cu_seqlens=cu)
    mask = call.keywords["mask"] & mask if "mask" in call.keywords else mask
    grads = cotangents(call)
    got = answer(with_keywords(call, mask=mask), *grads, backend=backend)
    q, k, v = (t.detach().requires_grad_() for t in call.inputs)
    parts = [
        replace(call, inputs=tuple(t[:, a:b] for t in (q, k, v)))(backend=backend)
        for a, b in pairwise(cu.tolist())
    ]
    out, lse = torch.cat([o for o, _ in parts], 1), torch.cat([e for _, e in parts], 2)
    each = torch.autograd.grad([out, lse], [q, k, v], list(grads))
    same(got, Answer(out.detach(), lse.detach(), dict(zip("qkv", each, strict=True))))


@given(data=st.data())
def test_packed_is_separate_calls(backend: str, data: st.DataObject) -> None:
    """Unequal and empty sequences, every term: packed is each call on its own."""
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4))
    call = data.draw(calls(sequences=tuple(sizes), layout="bnhd"))
    if not sizes:
        return
    grads = cotangents(call)
    got = answer(call, *grads, backend=backend)
    leaves = {n: t.detach().requires_grad_() for n, t in call.leaves.items()}
    starts_q, starts_k = (t.tolist() for t in call.inputs[3:5])
    outs, lses = [], []
    for b, (nq, nk) in enumerate(sizes):
        rows, cols = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        keywords = dict(call.keywords)
        if "bias" in leaves:
            bias = leaves["bias"][b : b + 1] if leaves["bias"].shape[0] > 1 else leaves["bias"]
            bias = bias[:, :, :nq] if bias.shape[2] > 1 else bias
            keywords["bias"] = bias[..., :nk] if bias.shape[3] > 1 else bias
        keywords |= {n: leaves[n] for n in ("sink", "alibi") if n in leaves}
        inputs = (leaves["q"][None, rows], leaves["k"][None, cols], leaves["v"][None, cols])
        out, lse = rowmax.attention(*inputs, **keywords, return_lse=True, backend=backend)
        outs.append(out[0])
        lses.append(lse[0])
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    each = torch.autograd.grad([out, lse], list(leaves.values()), list(grads), allow_unused=True)
    gradients: dict[str, Tensor] = {
        n: torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(leaves.items(), each, strict=True)
    }
    same(got, Answer(out.detach(), lse.detach(), gradients))
