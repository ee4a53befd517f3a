"""Masks by their definition, and their forms: what each allows."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

import rowmax
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
from rowmax.rules.mask import FULL, PARTIAL, SKIP, tile_states
from tests.masked import allowed, by_tile, posed


def by_definition(rule, nq: int, nk: int) -> Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(nk)] for i in range(nq)])


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1)])
def test_bands(nq: int, nk: int) -> None:
    o = nk - nq
    rules = [
        (Causal(), lambda i, j: j <= i + o),
        (Window(), lambda i, j: True),
        (Window(2, 1), lambda i, j: i + o - 2 <= j <= i + o + 1),
        (Window(left=1), lambda i, j: i + o - 1 <= j),
        (Window(right=1), lambda i, j: j <= i + o + 1),
        (Window(3, None) & Causal(), lambda i, j: i + o - 3 <= j <= i + o),
        (Window(3, 4) & Window(1, 9), lambda i, j: i + o - 1 <= j <= i + o + 4),
        (Window(right=-1), lambda i, j: j < i + o),
        (Window(-2, None), lambda i, j: i + o + 2 <= j),
        (Window(-1, 3), lambda i, j: i + o + 1 <= j <= i + o + 3),
        (Window(4, -2), lambda i, j: i + o - 4 <= j <= i + o - 2),
        (Window(-1, -1), lambda i, j: False),
    ]
    for mask, rule in rules:
        assert torch.equal(allowed(mask, 1, 1, nq, nk)[0, 0], by_definition(rule, nq, nk)), mask


def test_documents() -> None:
    ids = torch.tensor([4, 4, 9, 4, 9])
    same = by_definition(lambda i, j: ids[i] == ids[j], 5, 5)
    assert torch.equal(allowed(Documents(ids), 1, 1, 5, 5)[0, 0], same)
    # fewer queries stand at the last positions
    assert torch.equal(allowed(Documents(ids), 1, 1, 2, 5)[0, 0], same[3:])
    cu = torch.tensor([0, 2, 2, 5])
    by_cu = allowed(Documents(cu_seqlens=cu), 1, 1, 5, 5)
    assert torch.equal(by_cu, allowed(Documents(torch.tensor([0, 0, 2, 2, 2])), 1, 1, 5, 5))
    q_ids = torch.tensor([[9], [7]])
    own = allowed(Documents(ids, q_ids=q_ids), 2, 1, 1, 5)
    assert own[0, 0, 0].tolist() == [False, False, True, False, True]
    assert not own[1].any()
    two = torch.tensor([[0, 0, 1], [0, 1, 1]])
    seen = allowed(Documents(two), 2, 1, 3, 3)
    for b in range(2):
        assert torch.equal(seen[b, 0], two[b][:, None] == two[b][None, :])


def test_documents_compose_in_every_form() -> None:
    a, b = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([[0, 1, 1, 1, 1], [5, 5, 5, 6, 6]])
    both = allowed(Documents(a) & Documents(b), 2, 1, 5, 5)
    apart = allowed(Documents(a), 2, 1, 5, 5) & allowed(Documents(b), 2, 1, 5, 5)
    assert torch.equal(both, apart)
    q_ids = torch.tensor([0, 1])
    own = Documents(a, q_ids=q_ids) & Documents(b, q_ids=q_ids)
    apart = [allowed(Documents(ids, q_ids=q_ids), 2, 1, 2, 5) for ids in (a, b)]
    assert torch.equal(allowed(own, 2, 1, 2, 5), apart[0] & apart[1])
    # ids of any kinds: each finds its own, offsets theirs where the number of keys is known
    cu = torch.tensor([0, 1, 5])
    one, two, three = Documents(a), Documents(b[1], q_ids=q_ids + 5), Documents(cu_seqlens=cu)
    apart = [allowed(mask, 2, 1, 2, 5) for mask in (one, two, three)]
    assert torch.equal(allowed(one & two & three, 2, 1, 2, 5), apart[0] & apart[1] & apart[2])
    for mask in (one, three, one & three, three & three):
        assert allowed(mask, 1, 1, 0, 5).shape == (1, 1, 0, 5)


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1)])
@pytest.mark.parametrize("left", [None, 2, -1])
def test_prefixes(nq: int, nk: int, left: int | None) -> None:
    """Alone, in a window, in another prefix, and after lengths, aligned to the keys or to them."""
    o, some, more = nk - nq, (2, 0, 9), (1, 7, 4)
    mask, other = Prefix(torch.tensor(some)), Prefix(torch.tensor(more))
    window = Window(left, None)

    def rule(i: int, j: int, n: int, o: int) -> bool:
        return (j <= i + o or j < n) and (left is None or j >= i + o - left)

    seen = allowed(mask & window, 3, 1, nq, nk)
    both = allowed(window & mask & other, 3, 1, nq, nk)
    for b in range(3):
        want = by_definition(lambda i, j, n=some[b]: rule(i, j, n, o), nq, nk)
        assert torch.equal(seen[b, 0], want)
        fewer = min(some[b], more[b])
        want = by_definition(lambda i, j, n=fewer: rule(i, j, n, o), nq, nk)
        assert torch.equal(both[b, 0], want)
    for align in ALIGNMENTS:
        lengths = PrefixLengths(torch.tensor(more), align=align)
        seen = allowed(mask & lengths & window, 3, 1, nq, nk)
        for b in range(3):
            used = min(more[b], nk)
            at = used - nq if align == "lengths" else o
            want = by_definition(
                lambda i, j, n=some[b], at=at, used=used: rule(i, j, n, at) and j < used, nq, nk
            )
            assert torch.equal(seen[b, 0], want)


def test_a_prefix_in_a_causal_mask_is_causal() -> None:
    for band in (Causal(), Window(3, -2), Window(None, 0)):
        mask = Prefix(torch.tensor([4])) & band
        assert mask.prefix is None
        assert torch.equal(allowed(mask, 1, 1, 6, 9), allowed(band, 1, 1, 6, 9))


def test_tiles_of_a_prefix() -> None:
    """Tiles of the prefix are full, those above the diagonal and after it are skipped."""
    mask = Prefix(torch.tensor([0, 32, 33, 99]))
    found = tile_states(*posed(mask, 4, 1, 64, 64), 16, 16)[:, 0].tolist()
    assert found[0] == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert found[1] == [[2, 2, 0, 0], [2, 2, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert found[2] == [[2, 2, 1, 0], [2, 2, 1, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert found[3] == [[2, 2, 2, 2]] * 4


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 8), (8, 3), (1, 6)])
def test_key_padding(nq: int, nk: int) -> None:
    """Any pattern, in both conventions, with bands, documents, lengths and other padding."""
    o, generator = nk - nq, torch.Generator().manual_seed(3)
    padding, more = (torch.rand(2, 3, nk, generator=generator) < 0.4).unbind()
    padding[0], padding[1] = True, torch.arange(nk) < 2
    every = torch.ones(3, 1, nq, nk, dtype=torch.bool)
    kept = every & ~padding[:, None, None]
    assert torch.equal(allowed(KeyPadding(padding), 3, 1, nq, nk), kept)
    assert torch.equal(allowed(KeyPadding(keep=~padding), 3, 1, nq, nk), kept)
    assert torch.equal(allowed(KeyPadding(padding[1:2]), 3, 1, nq, nk), every & kept[1:2])
    causal = by_definition(lambda i, j: j <= i + o, nq, nk)
    assert torch.equal(allowed(Causal() & KeyPadding(padding), 3, 1, nq, nk), kept & causal)
    both = KeyPadding(padding) & KeyPadding(more)
    assert torch.equal(allowed(both, 3, 1, nq, nk), kept & ~more[:, None, None])
    documents = Documents(torch.arange(nk) // 2, q_ids=torch.arange(nq) // 3)
    seen = allowed(documents & KeyPadding(padding), 3, 1, nq, nk)
    assert torch.equal(seen, kept & allowed(documents, 3, 1, nq, nk))
    aligned = PrefixLengths(torch.tensor([nk, 2, 0]), align="lengths") & Causal()
    seen = allowed(aligned & KeyPadding(padding), 3, 1, nq, nk)
    assert torch.equal(seen, kept & allowed(aligned, 3, 1, nq, nk))


def test_key_padding_is_that_of_torch(backend: str) -> None:
    """Values at padding do not matter, even NaN; a sequence of padding alone has out 0."""
    padding = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [1, 1, 1, 1, 1]]) > 0
    q, k, v = (torch.randn(3, 5, 2, 8, requires_grad=True) for _ in "qkv")
    cut = [t.detach().masked_fill(padding[..., None, None], torch.nan) for t in (k, v)]
    out = rowmax.attention(q, *cut, mask=KeyPadding(padding), backend=backend)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t[:2].transpose(1, 2) for t in (q, k, v)), attn_mask=~padding[:2, None, None]
    )
    torch.testing.assert_close(out[:2], want.transpose(1, 2))
    assert not out[2].any()
    for x in torch.autograd.grad(out.sum(), q):
        assert bool(x.isfinite().all())
    mask = KeyPadding(padding) & Causal()
    out = rowmax.attention(q, k, v, mask=mask, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (k, v))
    assert not any(bool(g[padding].any()) for g in grads)


def test_key_padding_fits_the_call() -> None:
    q, cu = torch.randn(2, 8, 2, 4), torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"KeyPadding: got shape \[2, 9\]; want .* = \[2, 8\]"):
        rowmax.attention(q, q, q, mask=KeyPadding(torch.ones(2, 9) > 0))
    with pytest.raises(ValueError, match="got padding in a packed call; want none: packed keys"):
        rowmax.attention_varlen(q[0], q[0], q[0], cu, cu, mask=KeyPadding(torch.ones(1, 8) > 0))
    with pytest.raises(ValueError, match=r"mask: got shape \[2, 8\]; .*KeyPadding\(key_padding"):
        rowmax.attention(q[:, :5], q, q, mask=torch.ones(2, 8) > 0)


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 8), (8, 3), (1, 6), (0, 3), (3, 0)])
@pytest.mark.parametrize("step", [1, 2, 3, 9, 2**31 - 1])
def test_dilated(nq: int, nk: int, step: int) -> None:
    o, mask = nk - nq, Dilated(step)
    want = by_definition(lambda i, j: (i + o - j) % step == 0, nq, nk).view(nq, nk)
    assert torch.equal(allowed(mask, 1, 1, nq, nk)[0, 0], want)
    both = by_definition(lambda i, j: (i + o - j) % step == 0 and j <= i + o, nq, nk).view(nq, nk)
    assert torch.equal(allowed(mask & Causal(), 1, 1, nq, nk)[0, 0], both)
    both = by_definition(lambda i, j: (i + o - j) % math.lcm(step, 4) == 0, nq, nk).view(nq, nk)
    assert torch.equal(allowed(mask & Dilated(4), 1, 1, nq, nk)[0, 0], both)
    lengths = [nk, 1, 0, nk + 5]
    aligned = mask & PrefixLengths(torch.tensor(lengths), align="lengths")
    seen = allowed(aligned, 4, 1, nq, nk)
    for b, n in enumerate(lengths):
        n = min(n, nk)
        want = by_definition(lambda i, j, n=n: (i + n - nq - j) % step == 0 and j < n, nq, nk)
        assert torch.equal(seen[b, 0], want.view(nq, nk))


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 8), (8, 3), (1, 6)])
def test_left_padding(nq: int, nk: int) -> None:
    starts = torch.tensor([0, 2, nk, 99])
    hidden = torch.arange(nk) < starts[:, None]
    want = allowed(KeyPadding(hidden), 4, 1, nq, nk)
    mask, lengths = LeftPadding(starts), PrefixLengths(torch.tensor([1, 3, nk, 2]))
    assert torch.equal(allowed(mask, 4, 1, nq, nk), want)
    both = Causal() & mask & lengths
    assert torch.equal(
        allowed(both, 4, 1, nq, nk), want & allowed(Causal() & lengths, 4, 1, nq, nk)
    )
    assert torch.equal(allowed(~mask, 4, 1, nq, nk), ~want)
    assert torch.equal(allowed(~lengths, 4, 1, nq, nk), ~allowed(lengths, 4, 1, nq, nk))
    assert repr(~~lengths) == repr(lengths)
    with pytest.raises(
        ValueError, match=r"LeftPadding\(starts=\): got 4 lengths; want one for each"
    ):
        allowed(mask, 3, 1, nq, nk)


def test_lengths() -> None:
    seen = allowed(PrefixLengths(torch.tensor([0, 2, 9])), 3, 1, 2, 4)
    assert seen[:, 0, 0].tolist() == [[False] * 4, [True, True, False, False], [True] * 4]
    fewer = PrefixLengths(torch.tensor([3, 1])) & PrefixLengths(torch.tensor([2, 4]))
    assert allowed(fewer, 2, 1, 1, 4).sum((1, 2, 3)).tolist() == [2, 1]


LENGTHS = (0, 3, 4, 10, 16, 19)  # among 16 keys and, among them, 4 queries


@pytest.mark.parametrize("band", [Causal(), Window(3, 1), Window(None, 2), Window(0, None)])
def test_positions_aligned_to_lengths(band: Mask) -> None:
    """Each sequence sees what it would see if it had no more keys than its length."""
    lengths = PrefixLengths(torch.tensor(LENGTHS, dtype=torch.int32), align="lengths")
    for mask in (band & lengths, lengths & band):
        seen = allowed(mask, len(LENGTHS), 1, 4, 16)
        for b, n in enumerate(LENGTHS):
            n = min(n, 16)
            assert torch.equal(seen[b, :, :, :n], allowed(band, 1, 1, 4, n)[0])
            assert not seen[b, :, :, n:].any()


def test_tiles_are_skipped_where_positions_are_aligned_to_lengths() -> None:
    mask = Causal() & PrefixLengths(torch.tensor([64, 33, 8, 0]), align="lengths")
    found = tile_states(*posed(mask, 4, 1, 32, 64), 16, 16)[:, 0].tolist()
    assert found[0] == [[2, 2, 1, 0], [2, 2, 2, 1]]
    assert found[1] == [[1, 1, 0, 0], [2, 1, 1, 0]]
    assert found[2] == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert found[3] == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_alignment_matters_only_to_what_reads_positions() -> None:
    """A backend that is given no band and no slopes need not know of it."""
    lengths = PrefixLengths(torch.tensor([3]), align="lengths")
    assert posed(lengths, 1, 1, 2, 4)[0].align == "keys"
    assert posed(lengths & Window(None, 3), 1, 1, 2, 4)[0].align == "lengths"
    assert posed(lengths & Window(3, None), 1, 1, 2, 4)[0].align == "lengths"


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 1), (2, 4, 3), (2, 2, 1, 1), (2, 1, 4, 3)])
def test_boolean_tensors_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    assert torch.equal(allowed(mask, 2, 2, 4, 3), mask.expand(2, 2, 4, 3))


def test_repr() -> None:
    assert repr(Causal()) == "Mask(right=0)"
    ids = torch.zeros(5, dtype=torch.int64)
    mask = Window(3, 4) & Documents(ids) & PrefixLengths(torch.tensor([1])) & (ids == 0)
    assert repr(mask) == "Mask(left=3, right=4, ids=[5], lengths=[1], allowed=[5])"
    assert repr(Documents(cu_seqlens=torch.tensor([0, 5]))) == "Mask(cu_seqlens=[2])"
    assert repr(Prefix(torch.tensor([1, 2]))) == "Mask(right=0, prefix=[2])"
    assert repr(Mask()) == "Mask()"
    cache = Causal() & PrefixLengths(torch.tensor([1]), align="lengths") & (ids == 0)
    assert repr(cache) == "Mask(right=0, lengths=[1], align='lengths', allowed=[5])"


@pytest.mark.parametrize("limit", [2**31, 2**40, 2**62, sys.maxsize, 2**70])
def test_a_limit_past_every_length_is_none(limit: int) -> None:
    assert allowed(Window(limit, limit), 1, 1, 5, 7).all()
    assert torch.equal(allowed(Window(limit, 0), 1, 1, 5, 7), allowed(Causal(), 1, 1, 5, 7))


@pytest.mark.parametrize("limit", [2**31, 2**40, 2**62, sys.maxsize, 2**70])
def test_a_limit_before_every_key_leaves_none(limit: int, backend: str) -> None:
    q = torch.randn(1, 9, 2, 8)
    for mask in (Window(right=-limit), Window(-limit, None), Window(-limit, limit)):
        assert not allowed(mask, 1, 1, 5, 7).any()
        out, lse = rowmax.attention(q, q, q, mask=mask, return_lse=True, backend=backend)
        assert not out.any()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("sizes", [(70, 70), (20, 90), (90, 20), (1, 40)], ids=str)
@pytest.mark.parametrize(
    "limits",
    [(None, -1), (-1, None), (-3, 40), (70, -65), (-1, -1), (None, -50), (3, -9)],  # none is left
    ids=str,
)
def test_negative_limits(limits: tuple, sizes: tuple[int, int], backend: str) -> None:
    """Forward and backward, against the same band as a boolean tensor."""
    (nq, nk), window = sizes, Window(*limits)
    q = torch.randn(2, nq, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, nk, 2, 8, requires_grad=True) for _ in "kv")
    band, answers = allowed(window, 1, 1, nq, nk), []
    assert not band.all()
    for mask in (window, band):
        out, lse = rowmax.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        loss = out.square().sum() + lse.clamp(-9).sum()
        answers.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_limits_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    mask = Window(numpy.int64(3), numpy.int32(-1))
    assert (mask.left, mask.right) == (3, -1)
    assert [type(n) for n in (mask.left, mask.right)] == [int, int]
    with pytest.raises(TypeError, match=r"Window\(left=\): got "):
        Window(numpy.bool_(True))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 0), (0, 0), (2, 1, 0, 1), (0, 2, 3, 4)])
def test_tiles_of_an_empty_boolean_tensor(shape: tuple[int, ...]) -> None:
    b, h, nq, nk = (2, 2, *shape[-2:])[-4:] if len(shape) == 2 else (shape[0], 2, *shape[2:])
    problem, tensors = posed(torch.ones(shape, dtype=torch.bool), b, h, nq, nk)
    states = tile_states(problem, tensors, 2, 2)
    assert states.shape[2:] == (math.ceil(nq / 2), math.ceil(nk / 2))


def test_the_map_of_an_expanded_boolean_tensor_reads_it_once() -> None:
    mask = (torch.rand(37, 50) < 0.5).expand(3, 2, 37, 50)
    problem, tensors = posed(mask, 3, 2, 37, 50)
    states = tile_states(problem, tensors, 8, 8)
    assert states.shape[:2] == (1, 1)
    for i, j, tile in by_tile(mask[:1, :1], 8, 8):
        exact = FULL if tile.all() else PARTIAL if tile.any() else SKIP
        assert states[0, 0, i, j] == exact


def test_masks_are_left_as_they_are() -> None:
    a, b = Window(5, 5), Causal()
    _ = a & b
    assert (a.left, a.right, b.left, b.right) == (5, 5, None, 0)
    for mask in (a, b, a & b):
        for name in ("right", "allowed", "new"):
            with pytest.raises(AttributeError, match=rf"^{name}: a mask cannot be changed"):
                setattr(mask, name, 5)
        with pytest.raises(AttributeError, match=r"^left: a mask cannot be changed"):
            del mask.left
    assert (a.left, a.right, b.left, b.right) == (5, 5, None, 0)


def test_a_mask_has_no_truth_value() -> None:
    """``Causal() and Window(1, None)`` would be the window alone."""
    for mask in (Mask(), Causal(), Documents(torch.tensor([0, 1])) & Causal()):
        with pytest.raises(TypeError, match="combine masks with &"):
            _ = mask and Window(1, None)
        with pytest.raises(TypeError, match="combine masks with &"):
            _ = not mask
