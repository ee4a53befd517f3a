"""Checks of chapter 9, in Triton's interpreter (conftest.py turns it on)."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

import rowmax
from rowmax.testing import complaint

triton = pytest.importorskip("triton")

#: numpy's, of the interpreter: NaN fills the keys that a tile may not load
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (37, 50), (1, 65)])
def test_transpose_kernel(answers: ModuleType, rows: int, cols: int) -> None:
    """The result is the transpose, also of a view with strides of its own."""
    whole = torch.randn(cols, 2 * rows)
    for x in (torch.randn(rows, cols), whole.T[::2]):
        out = torch.full((cols + 1, rows), torch.nan)  # the last row must stay
        grid = triton.cdiv(rows, 16), triton.cdiv(cols, 32)
        answers.transpose_kernel[grid](x, out, rows, cols, *x.stride(), ROWS=16, COLS=32)
        assert torch.equal(out[:-1], x.T)
        assert out[-1].isnan().all()


@pytest.mark.parametrize("n", [16, 50, 3])
def test_softmax_kernel(answers: ModuleType, n: int) -> None:
    """The rows are those of torch, also behind blocks of minus infinity."""
    torch.manual_seed(0)
    x = 10 * torch.randn(4, n)
    x[1, : n - 2] = x[2] = -math.inf
    out = torch.full_like(x, torch.nan)
    answers.softmax_kernel[(4,)](x, out, n, BLOCK=16)
    want = torch.softmax(x, 1).nan_to_num(0.0)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("limits", [(100, 0), (12, 5)])
@pytest.mark.parametrize(("nq", "nk"), [(40, 56), (56, 40)])
def test_forward_kernel(answers: ModuleType, nq: int, nk: int, limits: tuple[int, int]) -> None:
    """The results are the definition's, and no tile that is not seen is loaded."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 16) for n in (nq, nk, nk))
    batched = [t[None, :, None] for t in (q, k, v)]
    ref, std = (
        rowmax.attention(
            *(t.to(dtype) for t in batched),
            scale=0.3, mask=rowmax.Window(*limits), return_lse=True, backend="reference",
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    out, lse = torch.full((nq, 16), torch.nan), torch.full((nq,), torch.nan)
    for tile in range(triton.cdiv(nq, 16)):
        rows = slice(16 * tile, min(16 * tile + 16, nq))
        low = max(rows.start + nk - nq - limits[0], 0) // 16 * 16
        high = -(-max(min(rows.stop - 1 + nk - nq + limits[1] + 1, nk), 0) // 16) * 16
        near = torch.arange(nk)[:, None]
        kept = [t.where((near >= low) & (near < high), math.nan) for t in (k, v)]
        some, some_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        answers.forward_kernel[(triton.cdiv(nq, 16),)](
            q, *kept, some, some_lse, (nq, nk), limits, 0.3, BLOCK_Q=16, BLOCK_K=16, D=16
        )
        out[rows], lse[rows] = some[rows], some_lse[rows]
    results = out[None, :, None], lse[None, None]
    for x, exact, standard in zip(results, ref, std, strict=True):
        assert complaint("", x, exact, standard, torch.float32) is None
