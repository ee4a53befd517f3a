"""A block of a call, computed alone at its positions, is that block of the whole.

Blocks of queries, heads and sequences give their part of out and lse; blocks of keys merge to the
whole. Gradients of the blocks add up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rowmax
from rowmax.call import flops
from rowmax.call.blocks import Block, at_positions, block_of
from rowmax.call.dispatch import refusal
from rowmax.call.inputs import Options, Positions, Tensors
from rowmax.call.problem import problem_of
from rowmax.operators.autograd import attend
from rowmax.rules import dropout, mask
from rowmax.testing import (
    CASES,
    Answer,
    Call,
    Case,
    answer,
    complaints,
    cotangents,
    make,
    tagged,
)
from tests.references import reference

Cuts = dict[str, Sequence[int]]  # by axis of ``Block``: where it is cut
AXES = Block._fields


def ranges(cuts: Sequence[int], n: int) -> list[slice]:
    return [slice(a, b) for a, b in pairwise([0, *sorted(cuts), n])]


def in_blocks(call: Call, cuts: Cuts, dout: Tensor, dlse: Tensor | None, backend: str) -> Answer:
    """Return the answer of a call, each of its blocks computed alone."""
    leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
    tensors, options = call.with_leaves(leaves).normalized()
    options = options._replace(backend=backend)
    p = problem_of(tensors, options)
    sizes = zip(AXES, (p.batch, p.hq, p.nq, p.nk), strict=True)
    b, h, i, j = (ranges(cuts.get(axis, ()), n) for axis, n in sizes)

    def rows(*place: slice) -> tuple[Tensor, Tensor]:
        parts = [attend(*block_of(tensors, options, Block(*place, x)), None) for x in j]
        return parts[0] if len(parts) == 1 else rowmax.merge(*parts)

    outs, lses = [], []
    for x in b:
        of_heads = [[rows(x, y, z) for z in i] for y in h]
        outs.append(torch.cat([torch.cat([o for o, _ in line], 1) for line in of_heads], 2))
        lses.append(torch.cat([torch.cat([e for _, e in line], 2) for line in of_heads], 1))
    out, lse = torch.cat(outs), torch.cat(lses)
    if not leaves:
        return Answer(out, lse, {})
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    got = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return Answer(out.detach(), lse.detach(), dict(zip(leaves, got, strict=True)))


def drawn_cuts(rng: random.Random, case: Case, keys: bool) -> Cuts:
    """Return cuts anywhere, except of heads: between groups, or one group apart."""
    nk = case.nq if case.nk is None else case.nk
    group = case.hq // (case.hk or case.hq)
    heads = [h for h in range(1, case.hq) if group in (1, case.hq) or h % group == 0]
    wide: Cuts = {
        "b": rng.sample(range(1, case.b), min(case.b - 1, rng.randint(0, 1))),
        "h": rng.sample(heads, min(len(heads), rng.randint(0, 1))),
        "i": [rng.randint(0, case.nq) for _ in range(rng.randint(1, 2))],
    }
    return {"j": [rng.randint(0, nk) for _ in range(rng.randint(1, 2))]} if keys else wide


#: dense calls whose features read positions, or are cut with them
TABLE = [
    case
    for case in CASES
    if not case.packed
    and case.b * case.hq * case.nq
    and case.nk != 0
    and (
        case.causal
        or case.left
        or case.right
        or case.prefix
        or case.alibi
        or case.dropout
        or case.documents
    )
    and max(case.nq, case.nk or 0) <= 300
]


def right(case: Case, dtype: torch.dtype, cuts: Cuts, backend: str) -> None:
    call, grads, want = reference(case, dtype, with_dlse=case.dlse)
    tensors, options = call.normalized()
    if refusal(backend, problem_of(tensors, options), "backward"):
        pytest.skip("the backend does not take the call")
    wrong = complaints(in_blocks(call, cuts, *grads, backend), want)
    assert not wrong, (cuts, wrong)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_blocks_of_queries_heads_and_sequences(case: Case, backend: str) -> None:
    cuts = drawn_cuts(random.Random(case.name), case, keys=False)
    right(case, torch.float32, cuts, backend)


@pytest.mark.parametrize("case", [c for c in TABLE if c.align == "keys"], ids=str)
def test_blocks_of_keys_merge(case: Case, backend: str) -> None:
    cuts = drawn_cuts(random.Random(case.name), case, keys=True)
    right(case, torch.float64, cuts, backend)  # a merge rounds again


@pytest.mark.parametrize("case", tagged("blocks"), ids=str)
def test_a_call_at_positions(case: Case, backend: str) -> None:
    call, grads, want = reference(case)
    wrong = complaints(answer(call, *grads, backend=backend), want)
    assert not wrong


# --- the same bits -----------------------------------------------------------------------------

#: rows of a tile: cuts at multiples of it leave tiles as they are
TILE = 128
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"left": 70, "right": 30},
    "left": {"left": 200, "hk": 2},
    "alibi": {"alibi": True},
    "causal-alibi": {"alibi": True, "causal": True, "nk": 500, "softcap": 2.0},
    "longer-queries": {"alibi": True, "causal": True, "nk": 130},
    "documents": {"documents": "sorted", "causal": True, "sink": True},
    "lengths": {"lengths": (1.0, 0.3), "causal": True},
    "to-lengths": {"lengths": (1.0, 0.3), "align": "lengths", "left": 60, "alibi": True},
    "prefix": {"prefix": (0.7, 0.1)},
    "boolean": {"allowed": "bhqk", "right": 60},
    "bias": {"bias": "1hqk", "alibi": True, "left": 150, "right": 20},
    "dropout": {"dropout": 0.3, "causal": True, "hk": 1},
    "dropout-alibi": {"dropout": 0.3, "alibi": True, "bias": "b11k"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_aligned_blocks_have_the_bits_of_the_whole(name: str, backend: str) -> None:
    """Rows of out, lse and dq are the same bits where no tile is cut.

    Sequences are not cut for the torch backend: its products are of all heads of a tile of queries,
    and torch may round those of fewer matrices differently.
    """
    if backend == "reference":
        pytest.skip("products of other sizes round differently")
    call = make(Case(name, **{"nq": 3 * TILE + 40, "d": 16, **FEATURES[name]}))
    grads = cotangents(call)
    whole = answer(call, *grads, backend=backend)
    sequences: list[Cuts] = [] if backend == "torch" else [{"b": [1]}]
    for cuts in ({"i": [TILE]}, {"i": [TILE, 2 * TILE]}, *sequences):
        got = in_blocks(call, cuts, *grads, backend)
        for x, y in ((got.out, whole.out), (got.lse, whole.lse)):
            assert torch.equal(x, y), (cuts, (x - y).abs().max())
        assert torch.equal(got.gradients["q"], whole.gradients["q"])


# --- dropout -----------------------------------------------------------------------------------


def kept(tensors: Tensors, options: Options) -> Tensor:
    """Return the pairs that a call keeps ``[B, Hq, Nq, Nk]``, as its output shows them."""
    b, nk, hk, _ = tensors.k.shape
    v = torch.eye(nk, dtype=tensors.v.dtype)[None, :, None].expand(b, -1, hk, -1)
    given = tensors._replace(q=torch.zeros_like(tensors.q), v=v)
    return attend(given, options, None)[0].transpose(1, 2) > 0


@settings(max_examples=12)
@given(data=st.data(), whole_blocks=st.booleans())
def test_blocks_keep_the_same_set(backend: str, data: st.DataObject, whole_blocks: bool) -> None:
    call = make(Case("kept", b=3, nq=70, nk=200, hq=4, hk=2, d=16, dropout=0.4))
    tensors, options = call.normalized()
    options = options._replace(backend=backend)
    b, h, i, j = (
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (3, 2, 70, 200)
    )
    j = [64 * (x // 64) for x in j] if whole_blocks else j
    block = Block(slice(*b), slice(2 * h[0], 2 * h[1]), slice(*i), slice(*j))
    if any(x.start == x.stop for x in block):  # pyright: ignore
        return
    got = kept(*block_of(tensors, options, block))
    assert torch.equal(got, kept(tensors, options)[block])


def test_a_block_of_a_block_keeps_its_part_of_the_whole(backend: str) -> None:
    case = Case("nested", nq=90, nk=210, d=16, dropout=0.4, causal=True, alibi=True)
    tensors, options = make(case).normalized()
    options = options._replace(backend=backend)
    outer = block_of(tensors, options, Block(i=slice(20, 80), h=slice(1, 4)))
    inner = block_of(*outer, Block(i=slice(7, 31), h=slice(1, 2), b=slice(1, 2)))
    want = block_of(tensors, options, Block(slice(1, 2), slice(2, 3), slice(27, 51)))
    assert inner[1] == want[1]
    for x, y in zip(attend(*inner, None), attend(*want, None), strict=True):
        assert torch.equal(x, y)


def test_sequences_of_a_packed_block_count_from_its_first(backend: str) -> None:
    """The last sequences of a packed call, alone, keep what they keep in the call."""
    case = Case("p", hq=2, d=16, dropout=0.5, alibi=True, sequences=((30, 40), (50, 70), (9, 80)))
    call = make(case)
    tensors, options = call.normalized()
    options = options._replace(backend=backend)
    out, lse = attend(tensors, options, None)
    assert tensors.cu_seqlens_q is not None
    assert tensors.cu_seqlens_k is not None
    cut = {"q": tensors.q[:, 30:], "k": tensors.k[:, 40:], "v": tensors.v[:, 40:]}
    cut |= {"cu_seqlens_q": tensors.cu_seqlens_q[1:] - 30}
    cut |= {"cu_seqlens_k": tensors.cu_seqlens_k[1:] - 40}
    last = tensors._replace(**cut)
    got = attend(last, at_positions(last, options, Positions(sequence=1)), None)
    torch.testing.assert_close(got[0], out[:, 30:])
    torch.testing.assert_close(got[1], lse[:, :, 30:])


# --- drawn calls -------------------------------------------------------------------------------

lengths = st.integers(1, 90)
limits = st.none() | st.integers(-20, 60)


@given(data=st.data())
def test_drawn_calls_in_drawn_blocks(backend: str, data: st.DataObject) -> None:
    draw = data.draw
    group, hk = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    case = Case(
        "drawn",
        b=draw(st.integers(1, 3)),
        nq=draw(lengths),
        nk=draw(lengths),
        hq=hk * group,
        hk=hk,
        d=draw(st.sampled_from([1, 5, 16, 32])),
        dv=draw(st.sampled_from([3, 16])),
        left=draw(limits),
        right=draw(limits),
        causal=draw(st.booleans()),
        documents=draw(st.sampled_from([None, "sorted", "unsorted", "queries"])),
        lengths=draw(st.sampled_from([None, (1.0, 0.4, 0.0)])),
        bias=draw(st.sampled_from([None, "bhqk", "1hqk", "11q1", "b11k"])),
        alibi=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 1.5])),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
    )
    call = make(case, dtype=torch.float64, generator=draw(st.integers(0, 9)))
    cuts = drawn_cuts(random.Random(draw(st.integers(0, 99))), case, draw(st.booleans()))
    grads = cotangents(call)
    want, got = answer(call, *grads, backend=backend), in_blocks(call, cuts, *grads, backend)
    for (name, x, _), (_, y, _) in zip(got.items(), want.items(), strict=True):
        torch.testing.assert_close(
            x, y, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n} in {cuts}: {m}"
        )


# --- transforms --------------------------------------------------------------------------------


def test_a_compiled_call_serves_all_positions() -> None:
    """Positions are symbolic: another block compiles nothing again, forward and backward."""
    q, k = (torch.randn(2, n, 2, 16) for n in (24, 70))
    slopes, seed = torch.rand(2), torch.tensor(3)

    def call(q: Tensor, shift: int, query: int) -> Tensor:
        options = Options(
            0.25, dropout_p=0.3, right=0, head_terms="alibi", shift=shift, query=query
        )
        out, lse = attend(Tensors(q, k, k, heads=slopes[None], seed=seed), options, None)
        return out.sum() + lse.logsumexp(-1).sum()

    counter, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for place in ((-40, 6), (-30, 16), (-3, 43), (-17, 29)):
        leaf, other = (q.clone().requires_grad_() for _ in range(2))
        got, want = compiled(leaf, *place), call(other, *place)
        torch.testing.assert_close(got, want)
        got.backward()
        want.backward()
        torch.testing.assert_close(leaf.grad, other.grad)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 4


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_vmapped_blocks(p: float, backend: str) -> None:
    q, k = torch.randn(3, 2, 24, 2, 16), torch.randn(3, 2, 70, 2, 16)
    seed = torch.tensor(3) if p else None
    options = Options(0.25, dropout_p=p, right=0, head_terms="alibi", backend=backend)
    options = options._replace(shift=-33, query=13, sequence=4)
    slopes = torch.tensor([[0.1, 0.3]])

    def call(q: Tensor, k: Tensor) -> Tensor:
        return attend(Tensors(q, k, k, heads=slopes, seed=seed), options, None)[0]

    want = torch.stack([call(*x) for x in zip(q, k, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(q, k), want)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return call(q, k).square().sum()

    got = torch.vmap(torch.func.grad(loss))(q, k)
    for n, (x, y) in enumerate(zip(q, k, strict=True)):
        x = x.clone().requires_grad_()
        torch.testing.assert_close(got[n], torch.autograd.grad(loss(x, y), x)[0])


# --- what a problem makes of positions ---------------------------------------------------------


def problem(positions: Positions, **features: Any) -> Any:
    tensors, options = make(Case("p", **{"nq": 64, "nk": 64, **features})).normalized()
    return problem_of(tensors, at_positions(tensors, options, positions))


def test_positions_that_nothing_reads_leave_the_problem() -> None:
    some = Positions(3, 5, 64, 2, 1)
    whole = Positions()
    assert problem(some) == problem(whole)
    assert problem(whole, alibi=True, dropout=0.5).positions is None
    assert problem(some, alibi=True).positions == Positions(shift=3)
    assert problem(some, dropout=0.5).positions == Positions(0, 5, 64, 2, 1)
    assert problem(some, causal=True)._replace(right=0) == problem(whole, causal=True)


def test_a_limit_that_limits_no_pair_of_the_block_is_none() -> None:
    """A block below the diagonal is a call without a mask; at its edges it is one with a mask."""
    for shift in range(-70, 70):
        p = problem(Positions(shift=shift), causal=True)
        every = torch.arange(64) <= torch.arange(64)[:, None] + shift
        assert (p.right is None) == bool(every.all())
        p = problem(Positions(shift=shift), left=10)
        every = torch.arange(64) >= torch.arange(64)[:, None] + shift - 10
        assert (p.left is None) == bool(every.all())


@pytest.mark.parametrize("features", [{"causal": True}, {"left": 40, "right": 7}, {}])
def test_flops_of_blocks_add_up(features: dict[str, Any]) -> None:
    tensors, options = make(Case("f", nq=150, nk=190, **features)).normalized()
    whole = flops.forward_flops(problem_of(tensors, options))
    blocks = (
        block_of(tensors, options, Block(i=i, j=j))
        for i in ranges([20, 111], 150)
        for j in ranges([64, 70, 150], 190)
    )
    assert sum(flops.forward_flops(problem_of(*block)) for block in blocks) == whole


@pytest.mark.parametrize("name", ["causal", "window", "documents", "lengths", "boolean"])
def test_tile_maps_of_blocks_are_parts_of_the_map(name: str) -> None:
    tensors, options = make(Case(name, nq=256, nk=384, **FEATURES[name])).normalized()
    whole = mask.tile_states(problem_of(tensors, options), tensors, 64, 32)
    for i, j in ((slice(64, 192), slice(None)), (slice(128, 256), slice(96, 320))):
        part, placed = block_of(tensors, options, Block(i=i, j=j))
        got = mask.tile_states(problem_of(part, placed), part, 64, 32)
        tiles = (
            slice(i.start // 64, i.stop // 64),
            slice((j.start or 0) // 32, (j.stop or 384) // 32),
        )
        assert torch.equal(got, whole[(slice(None), slice(None), *tiles)])


def test_dropout_of_a_tile_is_that_of_the_definition() -> None:
    case = Case("t", b=2, nq=40, nk=300, hq=3, dropout=0.4)
    tensors, options = make(case).normalized()
    positions = Positions(query=7, key=101, head=5, sequence=9)
    p = problem_of(tensors, at_positions(tensors, options, positions))
    whole = dropout.dense(p, tensors)
    b, h, i, j = range(1, 2), range(1, 3), range(11, 30), range(35, 271)
    part = dropout.tile(p, tensors, b, h, i, j)
    assert torch.equal(part, whole[1:2, 1:3, 11:30, 35:271])


# --- checks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "error", "text"),
    [
        ({"query": 1.0}, TypeError, "query: got 1.0; want an int"),
        ({"shift": "3"}, TypeError, "shift: got '3'; want an int"),
        ({"shift": True}, TypeError, "shift: got True; want an int"),
        ({"head": -1}, ValueError, "head: got -1; want 0 to 2147483644"),
        ({"key": 2**31}, ValueError, "key: got 2147483648"),
        ({"shift": -(2**31)}, ValueError, "shift: got -2147483648; want -2147483520"),
    ],
)
def test_positions_are_checked(positions: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        problem(Positions(**positions))


def test_the_farthest_positions_are_right(backend: str) -> None:
    case = Case("far", b=1, nq=10, nk=20, hq=2, d=16, dropout=0.3, causal=True)
    tensors, options = make(case).normalized()
    options = options._replace(backend=backend)
    last = 2**31 - 64
    far = Positions(shift=2**31 - 30, query=last, key=last, head=last, sequence=last)
    out, lse = attend(tensors, at_positions(tensors, options, far), None)
    unmasked = options._replace(right=None, query=last, key=last, head=last, sequence=last)
    want = attend(tensors, unmasked._replace(backend="reference"), None)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])
    out, lse = attend(
        tensors, at_positions(tensors, options, far._replace(shift=-(2**31) + 30)), None
    )
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def test_blocks_that_have_no_positions_are_refused() -> None:
    tensors, options = make(Case("g", hq=6, hk=2)).normalized()
    with pytest.raises(ValueError, match="block: got heads 1 to 4; want whole groups of 3"):
        block_of(tensors, options, Block(h=slice(1, 4)))
    to_lengths = make(Case("l", lengths=(0.5,), align="lengths", causal=True)).normalized()
    with pytest.raises(ValueError, match="block: got some of the keys"):
        block_of(*to_lengths, Block(j=slice(0, 10)))
    packed = make(Case("p", sequences=((5, 6), (7, 8)))).normalized()
    with pytest.raises(ValueError, match="block: got a packed call"):
        block_of(*packed, Block())
    with pytest.raises(ValueError, match=r"block: got .* want ranges without gaps"):
        block_of(tensors, options, Block(i=slice(0, 10, 2)))
