"""Nested tensors of the layout jagged: each sequence as a call of its own, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")  # torch's own

Q, K = (3, 5, 1, 0), (4, 2, 7, 3)


def rows(lengths: tuple[int, ...], *shape: int) -> list[Tensor]:
    return [torch.randn(n, *shape) for n in lengths]


def jagged(parts: list[Tensor], **more: Any) -> Any:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged, **more)


def leaves(*parts: list[Tensor]) -> list[list[Tensor]]:
    return [[x.clone().requires_grad_() for x in one] for one in parts]


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"causal": True, "softcap": 2.0},
        {"mask": rowmax.Prefix(torch.tensor([2, 0, 9, 1])), "alibi": torch.tensor([0.5, 0.1])},
        {"mask": rowmax.Window(1, 2) & rowmax.PrefixLengths(torch.tensor([4, 1, 5, 3]))},
        {"bias": torch.randn(4, 1, 5, 7), "sink": torch.randn(2)},
        {"mask": torch.rand(4, 2, 5, 7) > 0.3},
    ],
    ids=["plain", "causal", "prefix", "lengths", "bias", "mask"],
)
@pytest.mark.parametrize("cached", [True, False])
def test_each_sequence_is_a_call(keywords: dict[str, Any], cached: bool, backend: str) -> None:
    parts = rows(Q, 2, 8), rows(K, 1, 8), rows(K, 1, 4)
    ours, theirs = leaves(*parts), leaves(*parts)
    nested = [jagged(one) for one in ours]
    if not cached:  # lengths that no tensor keeps are found
        make = torch.nested.nested_tensor_from_jagged
        q, k, v = nested
        nested = [make(q.values(), q.offsets()), make(k.values(), k.offsets())]
        nested.append(make(v.values(), nested[1].offsets()))
    out, lse = rowmax.attention(*nested, return_lse=True, backend=backend, **keywords)
    assert (out.layout, lse.layout) == (torch.jagged, torch.jagged)
    assert out.shape[1] == nested[0].shape[1]
    assert lse.shape[:2] == (4, 2)
    cu = [torch.tensor((0, *n)).cumsum(0) for n in (Q, K)]
    packed = [torch.cat(one) for one in theirs]
    want, want_lse = rowmax.attention_varlen(
        *packed, *cu, return_lse=True, backend=backend, **keywords
    )
    torch.testing.assert_close(out.values(), want)
    torch.testing.assert_close(lse.values(), want_lse)
    for n, (x, y) in enumerate(zip(out.unbind(), lse.unbind(), strict=True)):
        assert (x.shape, y.shape) == ((Q[n], 2, 4), (2, Q[n]))
    out.values().square().sum().backward()
    want.square().sum().backward()
    for pair in zip(ours, theirs, strict=True):
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_gradients_of_nested_results() -> None:
    """Differentiate a nested leaf through out and lse."""
    nt = jagged(rows(Q, 2, 8)).requires_grad_()
    out, lse = rowmax.attention(nt, nt, nt, causal=True, return_lse=True)
    (out.values().sum() + lse.values().clamp(-9).sum()).backward()
    assert nt.grad.is_nested
    assert bool(nt.grad.values().isfinite().all())
    assert rowmax.attention(nt, nt, nt).grad_fn is not None


def test_sequences_with_gaps_between_them() -> None:
    values, offsets = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    with_gaps = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 4]))
    out = rowmax.attention(with_gaps, with_gaps, with_gaps)
    for x, rows_of in zip(out.unbind(), (values[:2], values[4:8]), strict=True):
        torch.testing.assert_close(x, rowmax.attention(*3 * (rows_of[None],))[0])


def test_what_nested_tensors_cannot_be() -> None:
    q, k = jagged(rows(Q, 2, 8)), jagged(rows(K, 2, 8))
    cases = [
        (
            (q.transpose(1, 2), k, k),
            {},
            r"q: got a jagged tensor \[4, 2, j, 8\]; want \[B, j, H, D\]",
        ),
        ((q, k, q), {}, "v: got sequences of other lengths; want those of k"),
        ((q, k, k.values()), {}, r"v: got a dense tensor \[16, 2, 8\]; want a jagged tensor"),
        ((q, jagged(rows((3,), 2, 8)), k), {}, "k: got batch 1; want the batch of q, 4"),
        ((q, k, k), {"mask": torch.ones(5, 9) > 0}, r"mask: got shape \[5, 9\]; .* \[4, 2, 5, 7\]"),
        ((q, k, k), {"mask": rowmax.Documents(torch.arange(16))}, "Documents in a packed call"),
        (
            (q, k, jagged(rows(K, 2))),
            {},
            r"v: got a jagged tensor \[4, j, 2\]; want \[B, j, H, D\]",
        ),
        (
            (torch.nested.nested_tensor([torch.ones(3, 2, 8)]), k, k),
            {},
            "q: got a nested tensor of",
        ),
        ((q, 3, k), {}, "k: got int; want a jagged tensor"),
    ]
    for given, keywords, text in cases:
        with pytest.raises((TypeError, ValueError), match=text):
            rowmax.attention(*given, **keywords)
