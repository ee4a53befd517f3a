"""Layouts are partitions, in whole blocks, balanced by the pairs that a mask allows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rowmax
from rowmax.call.problem import problem_of
from rowmax.distributed import Layout
from rowmax.distributed.area import areas
from rowmax.distributed.balance import EVEN
from rowmax.distributed.layout import ALIGNED
from rowmax.rules import mask as rules
from rowmax.testing import CASES, Case, make

KINDS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "balanced": lambda n, ranks: Layout.balanced(rowmax.Causal(), n, ranks, chunk=256),
}


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(0, 3000), ranks=st.integers(1, 9))
def test_a_layout_is_a_partition(kind: str, n: int, ranks: int) -> None:
    layout = KINDS[kind](n, ranks)
    rows = [layout.positions(rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(rows).sort()[0], torch.arange(n))
    assert layout.lengths == tuple(map(len, rows))
    assert (layout.n, layout.ranks) == (n, ranks)
    for rank, mine in enumerate(rows):
        assert mine.tolist() == [i for chunk in layout.chunks(rank) for i in chunk]
        assert (mine.diff() > 0).all()
        ends = [(c.start, c.stop) for c in layout.chunks(rank)]
        assert all(a[1] < b[0] for a, b in pairwise(ends))
    assert Layout.parse(layout.text) == layout
    assert hash(Layout.parse(layout.text)) == hash(layout)


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(0, 3000), ranks=st.integers(1, 9))
def test_chunks_start_at_whole_blocks_where_they_fit(kind: str, n: int, ranks: int) -> None:
    layout = KINDS[kind](n, ranks)
    parts = ranks if kind == "contiguous" else 2 * ranks
    if n >= ALIGNED * parts:
        starts = [c.start for rank in range(ranks) for c in layout.chunks(rank)]
        assert all(start % ALIGNED == 0 for start in starts)
        assert min(layout.lengths) > 0
    if kind == "contiguous":
        bound = 2 * ALIGNED if n >= ALIGNED * parts else 1
        assert max(layout.lengths) - min(layout.lengths) <= bound


@given(n=st.integers(2048, 20_000), ranks=st.integers(1, 8))
def test_zigzag_balances_causal(n: int, ranks: int) -> None:
    """Each of two chunks is longer than its share by less than a block, and sees at most n keys."""
    bound = 1 + 4 * ALIGNED * 2 * ranks / n
    assert Layout.zigzag(n, ranks).imbalance(rowmax.Causal()) <= bound


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=20),
    ranks=st.integers(1, 6),
    chunk=st.sampled_from((64, 128, 300)),
)
def test_balanced_is_balanced(lengths: list[int], ranks: int, chunk: int) -> None:
    """Ranks hold equal numbers of chunks, and no load is above the mean by a heaviest chunk.

    Without the limit on chunks this is a theorem of list scheduling. The examples are always the
    same ones.
    """
    cu = torch.tensor([0, *lengths]).cumsum(0)
    n = sum(lengths)
    mask = rowmax.Documents(cu_seqlens=cu) & rowmax.Causal()
    layout = Layout.balanced(mask, n, ranks, chunk)
    each = areas(mask, n, n)
    size = min(chunk, max(1, n // (2 * ranks)))
    size = size if size < ALIGNED else size // ALIGNED * ALIGNED
    chunks = -(-n // size)
    held = [-(-length // size) for length in layout.lengths]
    assert sum(held) == chunks
    assert max(held) <= -(-chunks // ranks)
    assert min(held) >= chunks // ranks
    loads = [int(each[layout.positions(rank)].sum()) for rank in range(ranks)]
    assert layout.imbalance(mask) == max(loads) * ranks / sum(loads)
    heaviest = max(int(x.sum()) for x in each.split(size))
    assert max(loads) <= sum(loads) / ranks + heaviest


def test_balanced_beats_zigzag_on_documents() -> None:
    """The bounds are figures of these documents, computed by hand from the areas."""
    cu = torch.tensor([0, 6000, 6200, 6300, 8192])
    mask = rowmax.Documents(cu_seqlens=cu) & rowmax.Causal()
    zigzag, balanced = (
        layout.imbalance(mask)
        for layout in (Layout.zigzag(8192, 4), Layout.balanced(mask, 8192, 4, chunk=256))
    )
    assert balanced < 1.03 < zigzag


def test_a_list_of_masks_is_balanced_on_the_sum() -> None:
    masks = [rowmax.Causal(), rowmax.Window(128, 0)]
    layout = Layout.balanced(masks, 4096, 3, chunk=128)
    loads = [
        sum(int(areas(m, 4096, 4096)[layout.positions(r)].sum()) for m in masks) for r in range(3)
    ]
    assert layout.imbalance(masks) == max(loads) * 3 / sum(loads) < 1.02


def _dense_pairs(mask: Any, nq: int, nk: int, batch: int, hq: int) -> torch.Tensor:
    q = torch.zeros(batch, nq, hq, 1)
    k = torch.zeros(batch, nk, hq, 1)
    from rowmax.attention import arguments
    from rowmax.call.normalize import normalized

    tensors, options, _ = normalized(arguments(q, k, k, mask=mask))
    return rules.dense(problem_of(tensors, options), tensors).expand(batch, hq, nq, nk)


MASKED = [c for c in CASES if not c.packed and "mask" in make(c).keywords]


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_areas_count_the_pairs_of_the_definition(case: Case) -> None:
    call = make(case)
    q, k, _ = call.inputs
    mask = rowmax.masks.as_mask(call.keywords["mask"])
    mask = mask & rowmax.Causal() if case.causal else mask
    got = areas(mask, q.shape[1], k.shape[1])
    seen = _dense_pairs(mask, q.shape[1], k.shape[1], q.shape[0], q.shape[2])
    want = seen.sum((0, 1, 3))
    # sequences and heads that the mask does not distinguish count once
    if int(want.sum()):
        assert torch.equal(got * int(want.sum()), want * int(got.sum()))
        assert int(want.sum()) % int(got.sum()) == 0
    else:
        assert not got.any()


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (lambda: Layout.zigzag(-1, 2), "n: got -1; want 0 or more"),
        (lambda: Layout.zigzag(8, 0), "ranks: got 0; want 1 or more"),
        (lambda: Layout.contiguous(8.0, 2), "n: got 8.0; want an int"),
        (lambda: Layout.balanced(None, 8, 2, chunk=0), "chunk: got 0; want 1 or more"),
        (lambda: Layout.balanced([], 8, 2), "mask: got no masks; want at least one, or None"),
        (lambda: Layout(()), "owned: got no ranks"),
        (lambda: Layout((((0, 4),), ((5, 8),))), "owned: got 5 after 4"),
        (lambda: Layout((((0, 4),), ((3, 8),))), "owned: got 3 after 4"),
        (lambda: Layout(((0, 4),)), "owned: got"),  # pyright: ignore
        (lambda: Layout.zigzag(8, 2).positions(2), "rank: got 2; want 0 to 1"),
        (
            lambda: Layout.balanced(rowmax.Documents(torch.zeros(7, dtype=torch.int32)), 8, 2),
            r"mask: Documents\(ids=\): got shape \[1, 7\]",
        ),
        (lambda: Layout.balanced("causal", 8, 2), "mask: got str"),  # pyright: ignore
    ],
)
def test_wrong_values(make_it: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make_it()


OFFSETS = st.lists(st.integers(0, 400), min_size=1, max_size=30)


@given(sizes=OFFSETS, ranks=st.integers(1, 9))
def test_documents_are_a_partition_of_equal_lengths(sizes: list[int], ranks: int) -> None:
    cu = torch.tensor([0, *sizes]).cumsum(0)
    layout = Layout.documents(cu, ranks)
    assert (layout.n, layout.ranks) == (int(cu[-1]), ranks)
    rows = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert torch.equal(rows.sort()[0], torch.arange(layout.n))
    # a cut document gives ranks equal numbers to two rows
    assert max(layout.lengths) - min(layout.lengths) <= 1 + 2 * len(sizes)
    assert Layout.documents(cu.tolist(), ranks) == layout


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_are_balanced_and_cut_no_more_than_that_needs(ranks: int) -> None:
    lengths = [16000, 5000, *(100 + 37 * n % 900 for n in range(100))]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    mask = rowmax.Documents(cu_seqlens=cu) & rowmax.Causal()
    layout = Layout.documents(cu, ranks)
    assert layout.imbalance(mask) < 1.02
    assert max(layout.lengths) - min(layout.lengths) <= 4
    others = Layout.balanced(mask, layout.n, ranks, chunk=512)
    ends = set(cu.tolist())
    cuts, more = (
        sum(c.start not in ends for rank in range(ranks) for c in one.chunks(rank))
        for one in (layout, others)
    )
    assert cuts < more / 2


@pytest.mark.parametrize(("ranks", "most"), [(2, 1), (4, 1), (8, 2)])
def test_one_document_makes_ranks_equal(ranks: int, most: int) -> None:
    """Whole documents leave ranks with unequal rows and pairs; ranges of the longest mend both."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 3000, (60,), generator=generator).tolist()
        cu = torch.tensor([0, *lengths, 14000 + 500 * seed]).cumsum(0)
        layout = Layout.documents(cu, ranks)
        mask = rowmax.Documents(cu_seqlens=cu) & rowmax.Causal()
        assert layout.imbalance(mask) < EVEN
        assert max(layout.lengths) - min(layout.lengths) <= 4
        starts = [c.start for rank in range(ranks) for c in layout.chunks(rank)]
        begun = torch.searchsorted(cu, torch.tensor(starts), right=True) - 1
        cut = {d for d, start in zip(begun.tolist(), starts, strict=True) if start != cu[d]}
        assert len(cut) <= most


def test_equal_documents_are_whole() -> None:
    layout = Layout.documents(list(range(0, 801, 100)), 4)
    assert all(c.start % 100 == 0 == c.stop % 100 for rank in range(4) for c in layout.chunks(rank))
    assert Layout.documents([0], 3).lengths == (0, 0, 0)


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ([], "offsets: a tensor on the CPU, or ints"),
        ([0, 1.5], "offsets: a tensor on the CPU, or ints"),
        ([1, 2], "offsets that begin with 0 and never fall"),
        (torch.tensor([0, 5, 3]), "offsets that begin with 0 and never fall"),
        (torch.empty(3, dtype=torch.int32, device="meta"), "one on the CPU, or a list"),
        (torch.zeros(2, 2, dtype=torch.int32), "cu_seqlens"),
    ],
)
def test_wrong_offsets(given_: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        Layout.documents(given_, 2)
