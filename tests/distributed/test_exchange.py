"""Copies of strided rows as wider words."""

from __future__ import annotations

import pytest
import torch

from rowmax.distributed.exchange import words


@pytest.mark.parametrize(
    ("dtype", "size", "word"),
    [
        (torch.bfloat16, 64, torch.int64),
        (torch.float16, 12, torch.int64),
        (torch.float16, 10, torch.float16),
        (torch.float32, 6, torch.int64),
        (torch.float32, 3, torch.float32),
        (torch.float64, 3, torch.float64),
    ],
)
def test_copies_keep_every_bit(dtype: torch.dtype, size: int, word: torch.dtype) -> None:
    """Infinite numbers and NaN of every kind too."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (6, 1, 4, size * dtype.itemsize // 2), dtype=torch.int16)
    x = bits.view(dtype)[:, :, 1:3]
    to = torch.zeros_like(x, memory_format=torch.contiguous_format)
    here, there = words(to, x)
    assert here.dtype == there.dtype == word
    here.copy_(there)
    assert torch.equal(to.view(torch.int16), bits[:, :, 1:3])


def test_rows_off_a_word_keep_their_elements() -> None:
    x = torch.zeros(6, 1, 2, 64, dtype=torch.bfloat16)[..., 1:33]
    (found,) = words(x)
    assert found.dtype == torch.bfloat16
