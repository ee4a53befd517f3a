"""Errors of masks, and masks in other processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

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
from rowmax.masks import Ids, Mask, as_mask
from tests.masked import allowed


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Window(1.5), TypeError, r"Window\(left=\): got 1.5; want an int, or None"),
        (lambda: Window(0, 1.0), TypeError, r"Window\(right=\): got 1.0"),
        (lambda: Window(torch.tensor(1)), TypeError, r"Window\(left=\): got tensor\(1\)"),
        (lambda: Window(0, -(2.0**40)), TypeError, r"Window\(right=\): got -"),
        # a record made by hand is held to the same
        (lambda: Mask(left=1.0), TypeError, r"Mask\(left=\): got 1.0; want an int, or None"),
        (lambda: Mask(right=True), TypeError, r"Mask\(right=\): got True"),
        (
            lambda: Mask(allowed=torch.rand(16, 16)),
            TypeError,
            r"Mask\(allowed=\): got a tensor of torch.float32; want torch.bool",
        ),
        (lambda: Mask(allowed=[True]), TypeError, r"Mask\(allowed=\): got list; want a boolean"),
        (
            lambda: Mask(allowed=(torch.ones(2, 2) > 0).to_sparse()),
            TypeError,
            r"Mask\(allowed=\): got layout torch.sparse_coo",
        ),
        (
            lambda: Mask(lengths=torch.tensor([1.0])),
            TypeError,
            r"Mask\(lengths=\): got torch.float32; want a tensor of int32 or int64",
        ),
        (lambda: Mask(lengths=3), TypeError, r"Mask\(lengths=\): got int"),
        (lambda: PrefixLengths(None), TypeError, r"PrefixLengths\(lengths=\): got None"),
        (
            lambda: Mask(documents=torch.zeros(3, dtype=torch.int64)),
            TypeError,
            r"Mask\(documents=\): got Tensor; want a tuple of Ids, as Documents\(ids\).documents",
        ),
        (lambda: Mask(documents=Ids(torch.zeros(3))), TypeError, r"Mask\(documents=\): got Ids"),
        (lambda: Mask(documents=None), TypeError, r"Mask\(documents=\): got NoneType"),
        (
            lambda: Mask(documents=(Ids(torch.zeros(3)),)),
            TypeError,
            r"Documents\(ids=\): got torch.float32",
        ),
        (lambda: Mask(documents=(Ids(),)), TypeError, "Documents: want either ids or cu_seqlens"),
        (
            lambda: Mask(documents=(Ids(cu_seqlens=torch.tensor([1, 2])),)),
            ValueError,
            r"Documents\(cu_seqlens=\): got \[1, 2\]",
        ),
        (lambda: Window(True), TypeError, r"Window\(left=\): got True"),
        (lambda: Documents(), TypeError, "Documents: want either ids or cu_seqlens"),
        (
            lambda: Documents(torch.zeros(3), cu_seqlens=torch.zeros(3)),
            TypeError,
            "Documents: want either ids or cu_seqlens",
        ),
        (lambda: Documents(torch.zeros(3)), TypeError, r"Documents\(ids=\): got torch.float32"),
        (lambda: Documents([0, 1]), TypeError, r"Documents\(ids=\): got list"),
        (
            lambda: Documents(torch.zeros(1, 2, 3, dtype=torch.int64)),
            ValueError,
            r"Documents\(ids=\): got shape \[1, 2, 3\]",
        ),
        (
            lambda: Documents(torch.zeros(3, dtype=torch.int64), q_ids=torch.zeros(3)),
            TypeError,
            r"Documents\(q_ids=\): got torch.float32",
        ),
        (
            lambda: Documents(cu_seqlens=torch.tensor([1, 3])),
            ValueError,
            r"Documents\(cu_seqlens=\): got \[1, 3\]",
        ),
        (
            lambda: Documents(cu_seqlens=torch.tensor([0])),
            ValueError,
            r"Documents\(cu_seqlens=\): got 1 offsets; want one more than documents",
        ),
        (
            lambda: PrefixLengths(torch.ones(3, dtype=torch.int64).to_sparse()),
            TypeError,
            r"PrefixLengths\(lengths=\): got layout torch.sparse_coo",
        ),
        (
            lambda: Documents(cu_seqlens=torch.tensor([0, 3, 2])),
            ValueError,
            r"Documents\(cu_seqlens=\): got \[0, 3, 2\]",
        ),
        (
            lambda: Documents(cu_seqlens=torch.tensor([[0, 3]])),
            ValueError,
            r"Documents\(cu_seqlens=\): got shape",
        ),
        (
            lambda: PrefixLengths(torch.tensor([1.0])),
            TypeError,
            r"PrefixLengths\(lengths=\): got torch.float32",
        ),
        (
            lambda: PrefixLengths(torch.tensor(1)),
            ValueError,
            r"PrefixLengths\(lengths=\): got shape \[\]",
        ),
        (
            lambda: PrefixLengths(torch.tensor([1]), align="left"),
            ValueError,
            r"PrefixLengths\(align=\): got 'left'; want 'keys' or 'lengths'",
        ),
        (
            lambda: PrefixLengths(torch.tensor([1]), align=True),  # pyright: ignore
            TypeError,
            r"PrefixLengths\(align=\): got True; want 'keys' or 'lengths'",
        ),
        (
            lambda: Mask(left=3, align="lengths"),
            ValueError,
            r"Mask\(align=\): got 'lengths' and no lengths; want lengths, too",
        ),
        (
            lambda: (
                PrefixLengths(torch.tensor([1])) & PrefixLengths(torch.tensor([1]), align="lengths")
            ),
            ValueError,
            "PrefixLengths & PrefixLengths: got align='keys' and align='lengths'; want the same",
        ),
        (lambda: Prefix(None), TypeError, r"Prefix\(lengths=\): got NoneType"),
        (lambda: Prefix(torch.tensor([1.0])), TypeError, r"Prefix\(lengths=\): got torch.float32"),
        (
            lambda: Mask(prefix=torch.tensor([1])),
            ValueError,
            r"Mask\(prefix=\): got no right; want right, such as 0",
        ),
        (
            lambda: Window(None, 3) & Prefix(torch.tensor([1])),
            ValueError,
            r"Prefix & Window\(right=3\): got a right limit above 0; want at most 0, or a boolean",
        ),
        (
            lambda: Prefix(torch.tensor([1])) & Mask(right=2, prefix=torch.tensor([1])),
            ValueError,
            "Prefix & Prefix: got right=0 and right=2; want the same in both",
        ),
        (lambda: KeyPadding(), TypeError, "KeyPadding: want either padding or keep, got both"),
        (
            lambda: KeyPadding(torch.zeros(2, 3)),
            TypeError,
            r"KeyPadding\(padding=\): got a tensor of torch.float32; want torch.bool",
        ),
        (
            lambda: KeyPadding(keep=torch.ones(3) > 0),
            ValueError,
            r"KeyPadding\(keep=\): got shape \[3\]; want \[B, Nk\]",
        ),
        (
            lambda: Mask(documents=(Ids(torch.tensor([1]), q_id="a"),)),  # pyright: ignore
            TypeError,
            r"Documents\(q_id=\): got 'a'; want an int, and no q_ids",
        ),
        (lambda: LeftPadding(3), TypeError, r"LeftPadding\(starts=\): got int; want a tensor of"),
        (
            lambda: Mask(documents=(Ids(starts=torch.tensor([1])),)),
            TypeError,
            r"Documents\(starts=\): got ids; want a q_id of 0",
        ),
        (lambda: Dilated(1.5), TypeError, r"Dilated\(step=\): got 1.5; want an int"),
        (lambda: Dilated(0), ValueError, r"Dilated\(step=\): got 0; want 1 or more"),
        (
            lambda: Mask(documents=(Ids(step=0),)),
            TypeError,
            r"Documents\(step=\): got 0; want an int above 0, and no ids",
        ),
        (lambda: as_mask(torch.zeros(3)), TypeError, "mask: got a tensor of torch.float32"),
        (lambda: as_mask("causal"), TypeError, "mask: got str; want a rowmax mask or a bool.*r$"),
        (lambda: as_mask((4, 0)), TypeError, r"mask: got tuple; .*, such as Window\(4, 0\)$"),
        (lambda: as_mask(Causal), TypeError, r"mask: got the class Causal; .* as Causal\(\)$"),
        (lambda: as_mask(Window), TypeError, r"mask: got the class Window; .* Window\(...\)$"),
        (lambda: Causal() & 3, TypeError, "mask: got int"),
    ],
)
def test_errors(make, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_masks_of_other_sizes_do_not_compose() -> None:
    def lengths(*values: int) -> Mask:
        return PrefixLengths(torch.tensor(values))

    with pytest.raises(ValueError, match=r"mask & mask: got \[3, 5\] on cpu and \[3, 4\] on cpu"):
        _ = torch.ones(3, 4, dtype=torch.bool) & as_mask(torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"PrefixLengths & PrefixLengths: got \[2\] on cpu"):
        _ = lengths(1, 2) & lengths(1, 2, 3)
    with pytest.raises(ValueError, match=r"PrefixLengths & PrefixLengths: got \[1\] on cpu"):
        _ = lengths(1) & lengths(1, 2)  # one length is for a batch of one
    with pytest.raises(ValueError, match=r"mask & mask: .* on meta"):
        _ = as_mask(torch.ones(3, 4, dtype=torch.bool, device="meta")) & (torch.ones(3, 4) > 0)


def test_a_mask_is_copied_and_sent() -> None:
    """As to the workers of a data loader."""
    ids, q_ids = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 0])
    mask = Window(3, None) & Documents(ids, q_ids=q_ids) & Prefix(torch.tensor([1]))
    mask = mask & PrefixLengths(torch.tensor([2]), align="lengths")
    for same in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
        assert same.align == "lengths"
        assert torch.equal(allowed(same, 1, 1, 3, 3), allowed(mask, 1, 1, 3, 3))
        with pytest.raises(AttributeError):
            same.left = 1
    assert isinstance(pickle.loads(pickle.dumps(Causal())), Causal)
