"""The kernel that copies rows of k and v, in Triton's interpreter, against copies by torch."""

from __future__ import annotations

import random

import pytest
import torch

from rowmax.distributed.row_places import RowPlaces, put
from rowmax.gpu import row_copies
from rowmax.gpu.compat import is_compiled

pytestmark = pytest.mark.skipif(
    is_compiled(row_copies.copy_rows_kernel), reason="needs TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("seed", range(20))
def test_rows_come_to_where_torch_copies_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any strides, by heads or not; what no move names stays."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(row_copies, "_MOST", draw.choice((1, 100, 16384)))
    monkeypatch.setattr(row_copies, "_BLOCK", draw.choice((16, 512)))
    row_copies._launch.cache_clear()
    b, n, heads = (draw.choice(some) for some in ((1, 3), (1, 7, 40), (1, 3, 8)))
    dtype = draw.choice((torch.float32, torch.float16))
    tensors = []
    for _ in range(2):
        first, d = draw.randrange(2), draw.choice((8, 24, 40, 5, 33))
        whole = torch.randn(b, heads + 2, n, d, dtype=dtype)  # the heads of a stage
        tensors.append(whole.transpose(1, 2)[:, :, first : first + heads])
    moves, at = [], 0
    for _ in range(draw.choice((1, 2, 5))):
        origin = draw.randrange(n)
        rows = draw.randint(1, n - origin)
        at += draw.choice((0, 3))
        moves.append((at, origin, rows))
        at += rows
    draw.shuffle(moves)
    k, v = tensors
    sizes = (b, heads, k.shape[3]), (b, heads, v.shape[3])
    for by_heads in (False, True):
        found, places = [], RowPlaces(sizes, at + 2, by_heads)
        for kernel in (False, True):
            size = (at + 2) * b * heads * sum(t.shape[3] for t in tensors) + 5
            flat = torch.full((size,), float("nan"), dtype=dtype)
            if kernel:
                row_copies.copy_rows(k, v, flat, places.distances, tuple(moves))
            else:
                put(flat, places, tensors, tuple(moves))
            found.append(flat)
        assert torch.equal(found[0].isnan(), found[1].isnan())
        assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
        assert not found[0].isnan().all()
