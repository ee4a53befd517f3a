"""The kernel that adds the gradients of keys, in Triton's interpreter, against sums in torch."""

from __future__ import annotations

import random

import pytest
import torch

from rowmax.gpu import slot_sums
from rowmax.gpu.compat import is_compiled

pytestmark = pytest.mark.skipif(
    is_compiled(slot_sums.sum_slots_kernel), reason="needs TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_added_in_the_order_of_their_table_float32(seed: int) -> None:
    """The sums of groups first; rows without any are 0, and what others hold is not read.

    Rows that are marked keep what they have.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups, most, n, b = (draw.choice(some) for some in ((0, 1, 3), (1, 2), (1, 9), (1, 2)))
    heads, width = draw.choice(((1, 8), (3, 40), (20, 128)))
    memory = torch.full((4 * n + 2, b, heads, width), float("nan"))
    rows = torch.randint(-1, 4 * n, (groups, most, n), dtype=torch.int32)
    kept = torch.rand(n) < (0.3 if groups else 0.0)
    rows[:1, 0, kept] = -2
    used = rows[rows >= 0].long()
    memory[used] = torch.randn(len(used), b, heads, width)
    for dtype in (torch.float32, torch.float16):  # the interpreter truncates bfloat16
        total = torch.full((b, n, heads, width), float("nan"), dtype=dtype)
        total[:, kept] = 7.0
        slot_sums.sum_slots(memory, rows, total)
        want = torch.zeros(n, b, heads, width)
        for group in rows:
            part = torch.zeros_like(want)
            for level in group:
                there = level >= 0
                part[there] += memory[level[there].long()]
            want += part
        want[kept] = 7.0
        assert torch.equal(total, want.transpose(0, 1).to(dtype))
