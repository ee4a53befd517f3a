"""Checks of chapter 11."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

import rowmax


@pytest.mark.parametrize(("n", "devices"), [(64, 4), (61, 4), (5, 4), (7, 1), (0, 2), (30, 3)])
def test_zigzag(answers: ModuleType, n: int, devices: int) -> None:
    """The layout is a partition, with the work of a causal mask evenly spread."""
    layout = answers.zigzag(n, devices)
    assert len(layout) == devices
    assert sorted(position for mine in layout for position in mine) == list(range(n))
    assert all(mine == sorted(mine) for mine in layout)
    assert max(map(len, layout)) - min(map(len, layout)) <= 2
    if n >= 2 * devices:
        work = [sum(position + 1 for position in mine) for mine in layout]
        assert max(work) - min(work) <= 2 * n  # two positions more
    if n % (2 * devices) == 0:
        size = n // (2 * devices)
        assert layout[0][:size] == list(range(size))
        assert layout[0][size:] == list(range(n - size, n))


@pytest.mark.parametrize("sink", [0.3, 40.0])
def test_merge_with_sink(answers: ModuleType, sink: float) -> None:
    """The merge is the call over all keys, with its sink."""
    torch.manual_seed(0)
    q = torch.randn(1, 20, 1, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 12, 1, 4, dtype=torch.float64) for _ in "kv")
    logit = torch.tensor([sink], dtype=torch.float64)
    want, want_lse = rowmax.attention(
        q, k, v, causal=True, sink=logit, backend="reference", return_lse=True
    )
    seen = torch.arange(12) <= torch.arange(20)[:, None] - 8
    parts = []
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        out, lse = rowmax.attention(
            q, k[:, keys], v[:, keys], mask=seen[:, keys], backend="reference", return_lse=True
        )
        parts.append((out[0, :, 0], lse[0, 0]))
    assert (parts[0][1] == -math.inf).sum() == 8
    out, lse = answers.merge_with_sink(parts, logit[0])
    torch.testing.assert_close(out, want[0, :, 0])
    torch.testing.assert_close(lse, want_lse[0, 0])


@pytest.mark.parametrize("rates", [(690e12, 620e12), (690e12, 200e12)])
@pytest.mark.parametrize(("devices", "heads", "kv_heads"), [(2, 32, 8), (8, 32, 32), (4, 64, 8)])
def test_least_tokens(
    answers: ModuleType, devices: int, heads: int, kv_heads: int, rates: tuple[float, float]
) -> None:
    """The link hides at this length, and not with a position less on each device."""
    link = 340e9
    found = answers.least_tokens(answers.Machine(devices, *rates, link), heads, kv_heads)
    assert found % devices == 0

    def hides(tokens: int) -> bool:
        d = 128
        received = (devices - 1) * (tokens / devices) * kv_heads * d
        operations = 2 * tokens**2 * heads * d / devices
        forward = 4 * received / link <= operations / rates[0]
        return forward and 12 * received / link <= 2.5 * operations / rates[1]

    assert hides(found)
    assert not hides(found - devices)
