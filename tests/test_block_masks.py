"""Masks of FlexAttention as values: each against its function at every pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rowmax
from rowmax.masks import Mask
from tests.masked import allowed

flex = pytest.importorskip("torch.nn.attention.flex_attention")

IDS = torch.arange(60) // 17
TABLE = torch.stack([IDS, torch.arange(60) // 9])
LENGTHS, PREFIX = torch.tensor([33, 60]), torch.tensor([5, 41])
KEEP = torch.arange(60) >= torch.tensor([[7], [0]])


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < PREFIX[b]


def kept(b: Any, h: Any, q: Any, k: Any) -> Any:
    return KEEP[b, k]


MODS = {
    "causal": causal,
    "noop": flex.noop_mask,
    "strict": lambda b, h, q, k: k < q,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 9),
    "both": lambda b, h, q, k: abs(q - k) < 7,
    "shifted": lambda b, h, q, k: (q + 3 >= k) & (k - q + 2 > -4),
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "tables": lambda b, h, q, k: TABLE[b, q] == TABLE[b, k],
    "chunks": lambda b, h, q, k: (q // 8 == k // 8) & (k <= q),
    "lengths": lambda b, h, q, k: (k < LENGTHS[b]) & (q >= k),
    "left padding": lambda b, h, q, k: (k >= PREFIX[b]) & (q >= k),
    "padding": lambda b, h, q, k: KEEP[b, k] & (q >= k),
    "composed padding": flex.and_masks(kept, causal),
    "padding last": lambda b, h, q, k: (q >= k) & KEEP[b, k],
    "padding or some": flex.or_masks(kept, lambda b, h, q, k: k == 3),
    "not padding": lambda b, h, q, k: ~KEEP[b, k],
    "prefix": flex.or_masks(prefix, causal),
    "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
    "dilated window": lambda b, h, q, k: ((q - k) % 4 == 0) & (q - k < 30) & (q >= k),
    "and": flex.and_masks(causal, prefix),
    "few keys": lambda b, h, q, k: (k < 20) | (k >= 40),
    "diagonal": lambda b, h, q, k: q == k,
}


def block_mask(mod: Any, nq: int = 60, nk: int = 60, block: int = 16) -> Any:
    return flex.create_block_mask(mod, 2, 1, nq, nk, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("sizes", [(60, 60), (32, 60), (60, 32)])
def test_values_are_those_of_the_function(name: str, sizes: tuple[int, int]) -> None:
    found = rowmax.from_block_mask(block_mask(MODS[name], *sizes))
    assert isinstance(found, Mask)
    assert found.allowed is None
    assert torch.equal(
        allowed(found, 2, 1, *sizes), flex.create_mask(MODS[name], 2, 1, *sizes, "cpu")
    )


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: (h == 0) & (q >= k),
        lambda b, h, q, k: torch.where(q > 5, q >= k, q <= k),
        lambda b, h, q, k: (q >= k) | (IDS[q] == IDS[k]),
        lambda b, h, q, k: q * k < 90,
        lambda b, h, q, k: q < 20,
    ],
)
def test_others_are_boolean_tensors_if_asked_for(mod: Any) -> None:
    with pytest.raises(TypeError, match=r"block_mask: got one without a value \(.*dense=True\)"):
        rowmax.from_block_mask(block_mask(mod))
    found = rowmax.from_block_mask(block_mask(mod), dense=True)
    assert torch.equal(allowed(found, 2, 1, 60, 60), flex.create_mask(mod, 2, 1, 60, 60, "cpu"))


def test_blocks_count() -> None:
    """Blocks that a user lists hide pairs that the function allows."""
    count = torch.tensor([[[1, 2]]], dtype=torch.int32)
    order = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    given = flex.BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=16)
    with pytest.raises(TypeError, match="its blocks hide or show other pairs"):
        rowmax.from_block_mask(given)
    seen = allowed(rowmax.from_block_mask(given, dense=True), 1, 1, 32, 32)[0, 0]
    want = torch.ones(32, 32, dtype=torch.bool)
    want[:16, :16] = False
    assert torch.equal(seen, want)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_the_result_is_that_of_flex_attention(backend: str) -> None:
    q, k, v = (torch.randn(2, 60, 2, 8) for _ in "qkv")
    given = block_mask(MODS["prefix"])
    out = rowmax.attention(q, k, v, mask=rowmax.from_block_mask(given), backend=backend)
    want = flex.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=given)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_what_is_no_block_mask() -> None:
    with pytest.raises(TypeError, match="block_mask: got function; want a BlockMask"):
        rowmax.from_block_mask(causal)
