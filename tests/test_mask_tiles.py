"""Masks of any composition: the tiles that they skip, and their intersections."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rowmax import (
    Causal,
    Dilated,
    Documents,
    KeyPadding,
    LeftPadding,
    Prefix,
    PrefixLengths,
    Window,
)
from rowmax.masks import ALIGNMENTS, Mask
from rowmax.rules.mask import FULL, PARTIAL, SKIP, dense, tile_states
from tests.masked import allowed, by_tile, posed

sizes = st.integers(1, 40)
limits = st.none() | st.integers(-45, 45)


def _ids(draw: st.DrawFn, *shape: int) -> Tensor:
    values = st.lists(st.integers(-2, 2), min_size=math.prod(shape), max_size=math.prod(shape))
    ids = torch.tensor(draw(values), dtype=torch.int64).view(shape)
    return ids.sort(-1)[0] if draw(st.booleans()) else ids


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, tuple[int, int, int, int]]:
    """Draw a mask of any composition, and the sizes that it fits."""
    b, h, nq, nk = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(sizes), draw(sizes)
    mask = Mask()
    if draw(st.booleans()):
        mask = mask & Window(draw(limits), draw(limits))
    if draw(st.booleans()):
        mask = mask & Causal()
    if mask.right is None and draw(st.booleans()):
        prefix = draw(st.lists(st.integers(0, nk + 3), min_size=b, max_size=b))
        mask = mask & Prefix(torch.tensor(prefix))
    for _ in range(draw(st.integers(0, 2))):
        batched = draw(st.booleans())
        ids, q_ids = (_ids(draw, *((b,) if batched else ()), n) for n in (nk, nq))
        mask = mask & Documents(ids, q_ids=q_ids)
    if draw(st.booleans()):
        mask = mask & Dilated(draw(st.integers(1, 5)))
    if draw(st.booleans()):
        mask = mask & KeyPadding(_ids(draw, b, nk) > 0)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, nk + 3), min_size=b, max_size=b))
        mask = mask & LeftPadding(torch.tensor(starts))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, nk + 3), min_size=b, max_size=b))
        align = draw(st.sampled_from(ALIGNMENTS))
        mask = mask & PrefixLengths(torch.tensor(lengths, dtype=torch.int32), align=align)
    if draw(st.booleans()):
        shape = [n if draw(st.booleans()) else 1 for n in (b, h, nq, nk)]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        mask = mask & (torch.rand(shape, generator=generator) < draw(st.sampled_from([0.03, 0.97])))
    return mask, (b, h, nq, nk)


@given(masks(), st.sampled_from([1, 3, 8, 16, 64]), st.sampled_from([1, 4, 8, 16, 64]))
def test_tile_states_are_sound(any_mask: tuple, block_q: int, block_k: int) -> None:
    """A skipped tile holds no allowed pair, a full one nothing else."""
    mask, (b, h, nq, nk) = any_mask
    problem, tensors = posed(mask, b, h, nq, nk)
    seen = dense(problem, tensors).expand(b, h, nq, nk)
    states = tile_states(problem, tensors, block_q, block_k)
    assert states.dtype == torch.uint8
    assert states.shape[2:] == (math.ceil(nq / block_q), math.ceil(nk / block_k))
    states = states.expand(b, h, -1, -1)
    for i, j, tile in by_tile(seen, block_q, block_k):
        state = states[:, :, i, j]
        assert not tile.flatten(2).any(2)[state == SKIP].any()
        assert tile.flatten(2).all(2)[state == FULL].all()


@given(
    nq=sizes,
    nk=sizes,
    left=limits,
    right=limits,
    block_q=st.sampled_from([1, 3, 8, 64]),
    block_k=st.sampled_from([1, 4, 16]),
)
def test_tile_states_of_a_band_are_exact(nq, nk, left, right, block_q, block_k) -> None:
    problem, tensors = posed(Window(left, right), 1, 1, nq, nk)
    states = tile_states(problem, tensors, block_q, block_k)[0, 0]
    for i, j, tile in by_tile(dense(problem, tensors), block_q, block_k):
        exact = FULL if tile.all() else PARTIAL if tile.any() else SKIP
        # rows that stand left of every key or right of every one make a corner of a tile empty
        assert states[i, j] == exact or (states[i, j] == PARTIAL and exact == SKIP)


def test_tiles_are_skipped_where_they_should_be() -> None:
    """Not sound alone: the maps of the common masks skip and fill all that they can."""

    def states(mask: Mask | Tensor, n: int = 64) -> list[list[int]]:
        problem, tensors = posed(mask, 1, 1, n, n)
        return tile_states(problem, tensors, 16, 16)[0, 0].tolist()

    assert states(Causal()) == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert states(Mask()) == [[FULL] * 4] * 4
    assert states(Window(15, 0)) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    four = torch.arange(64) // 16
    eye = [[FULL if i == j else SKIP for j in range(4)] for i in range(4)]
    assert states(Documents(four)) == eye
    assert states(Documents(four[torch.tensor([3, 1, 0, 2])].repeat_interleave(16))) != []
    assert states(PrefixLengths(torch.tensor([33]))) == [[2, 2, 1, 0]] * 4
    block = torch.ones(64, 64, dtype=torch.bool)
    block[:, 16:32] = False
    block[0, 0] = False
    assert states(block) == [[1, 0, 2, 2]] + [[2, 0, 2, 2]] * 3


@given(masks(), st.integers(0, 2**31))
def test_intersection_allows_what_both_allow(any_mask: tuple, seed: int) -> None:
    mask, (b, h, nq, nk) = any_mask
    torch.manual_seed(seed)
    other = torch.rand(b, 1, nq, nk) < 0.5
    seen, alone = allowed(mask & other, b, h, nq, nk), allowed(mask, b, h, nq, nk)
    assert torch.equal(seen, alone & other)
    assert torch.equal(allowed(other & mask, b, h, nq, nk), seen)  # pyright: ignore
    assert torch.equal(allowed(mask & mask, b, h, nq, nk), alone)
    assert torch.equal(allowed(mask & Mask(), b, h, nq, nk), alone)
