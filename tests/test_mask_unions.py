"""Unions and complements of masks are exact, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rowmax import (
    Causal,
    Documents,
    KeyPadding,
    Prefix,
    PrefixLengths,
    Window,
)
from rowmax.masks import Mask, as_mask
from tests.masked import allowed

LIMITS = (None, -3, -2, -1, 0, 1, 2)
SIZES = ((4, 4), (2, 6), (6, 2))


def _agree(found: Mask, want: Tensor) -> None:
    b, nq, nk = want.shape[0], *want.shape[2:]
    assert torch.equal(allowed(found, b, 1, nq, nk), want), found


def _same_sets(make, size: tuple[int, int], a: Mask, b: Mask | None = None) -> bool:
    """Compare a union or complement with that of the boolean tensors; return False if refused."""
    try:
        found = make(a, b)
    except TypeError:
        return False
    dense = [allowed(m, 2, 1, *size) for m in (a, b) if m is not None]
    _agree(found, dense[0] | dense[1] if len(dense) > 1 else ~dense[0])
    return True


def test_unions_of_bands_are_exact_and_complete() -> None:
    """Every union of two bands; one is refused only if its distances are not a range."""
    bands = [Window(left, right) for left in LIMITS for right in LIMITS]

    def distances(band: Mask) -> set[int]:
        left, right = (20 if n is None else n for n in (band.left, band.right))
        return set(range(-left, right + 1))

    for a in bands:
        for b in bands:
            both = distances(a) | distances(b)
            is_range = not both or both == set(range(min(both), max(both) + 1))
            made = [_same_sets(lambda x, y: x | y, size, a, b) for size in SIZES]
            assert all(made) if is_range else not any(made), (a, b)
        several = distances(a) and None not in (a.left, a.right)
        made = [_same_sets(lambda x, _: ~x, size, a) for size in SIZES]
        assert not any(made) if several else all(made), a
        if not several:
            _agree(~~a, allowed(a, 2, 1, 4, 4))


def test_unions_of_prefixes_are_exact() -> None:
    some, more, fewer = (torch.tensor(x) for x in ((3, 0), (1, 9), (2, 4)))
    lengths = PrefixLengths(more)
    masks = [Window(left, right) for left in (None, -1, 2) for right in (None, -1, 0, 2)]
    masks += [Prefix(some), Prefix(fewer), Mask(right=-2, prefix=some), lengths]
    masks += [Window(n, None) & Prefix(some) for n in (-2, 0, 1)]
    masks += [Causal() & lengths, lengths & Prefix(fewer), PrefixLengths(fewer), ~Window(-1, -1)]
    made = sum(
        _same_sets(lambda x, y: x | y, size, a, b) for a in masks for b in masks for size in SIZES
    )
    assert made > len(masks) ** 2
    for mask in (Causal() | lengths, lengths | Causal()):
        assert repr(mask) == repr(Prefix(more))
        _agree(mask, allowed(Prefix(more), 2, 1, 4, 6))


def test_unions_of_other_masks_are_exact() -> None:
    torch.manual_seed(0)
    seen, other = torch.rand(2, 4, 6).gt(0.5).unbind()
    padding, hidden = torch.rand(2, 2, 6).gt(0.5).unbind()
    documents, lengths = Documents(torch.arange(6) // 2), PrefixLengths(torch.tensor([3, 5]))
    parts = [as_mask(seen), as_mask(other), KeyPadding(padding), KeyPadding(hidden), documents]
    parts += [lengths, PrefixLengths(torch.tensor([4, 1])), Causal(), Window(3, 1), Window(1, None)]
    masks = parts + [a & b for a in parts for b in parts] + [Mask(), Window(-1, -1)]
    made = [_same_sets(lambda x, y: x | y, (4, 6), a, b) for a in masks for b in masks]
    assert sum(made) > len(made) // 8
    for mask in (*parts[:4], Mask(), Window(-1, -1), Causal()):
        assert _same_sets(lambda x, _: ~x, (4, 6), mask)
        _agree(~~mask, allowed(mask, 2, 1, 4, 6))
    _agree(seen | as_mask(other), (seen | other).expand(2, 1, 4, 6))
    _agree(
        (documents & seen) | (documents & other), allowed(documents & (seen | other), 2, 1, 4, 6)
    )
    _agree(documents | (documents & Causal() & lengths), allowed(documents, 2, 1, 4, 6))


def test_unions_at_other_positions_are_refused() -> None:
    """Aligned to lengths, a band is at another place."""
    aligned = PrefixLengths(torch.tensor([3, 5]), align="lengths")
    both = (aligned & Window(1, 0)) | (aligned & Window(0, 1))
    _agree(both, allowed(aligned & Window(1, 1), 2, 1, 4, 6))
    for a, b in ((Causal(), aligned & Causal()), (Causal(), aligned), (Window(1, 1), aligned)):
        for x, y in ((a, b), (b, a)):
            with pytest.raises(TypeError, match="masks have no"):
                _ = x | y


def test_unions_say_what_works() -> None:
    seen, causal = torch.ones(3, 3, dtype=torch.bool), Causal()
    for union in (
        lambda: Window(3, -1) | Window(-1, 3),
        lambda: causal | seen,
        lambda: seen | causal,
        lambda: causal ^ seen,
        lambda: seen ^ causal,
        lambda: ~Window(1, 1),
        lambda: ~PrefixLengths(torch.tensor([1]), align="lengths"),
        lambda: Documents(torch.arange(3)) | PrefixLengths(torch.tensor([1])),
    ):
        with pytest.raises(TypeError, match=r"mask=m1 \| m2.* merge\("):
            union()
