"""Checks of chapter 4."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import rowmax


@pytest.mark.parametrize("block", [1, 4, 5, 100])
def test_blocked_product(answers: ModuleType, block: int) -> None:
    """The product is torch's, for sizes that no block divides."""
    torch.manual_seed(0)
    x, w = torch.randn(9, 13, dtype=torch.float64), torch.randn(13, 7, dtype=torch.float64)
    torch.testing.assert_close(answers.blocked_product(x, w, block), x @ w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(16, 16), (21, 50), (50, 21), (1, 40)])
def test_tiled_forward(answers: ModuleType, nq: int, nk: int, causal: bool) -> None:
    """Output and lse are those of rowmax's dense reference, also for rows without keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, d, dtype=torch.float64) for n, d in ((nq, 8), (nk, 8), (nk, 5)))
    batched = (t[None, :, None] for t in (20 * q, k, v))
    out, lse = rowmax.attention(
        *batched, scale=0.3, causal=causal, backend="reference", return_lse=True
    )
    for rows, cols in ((16, 16), (7, 9)):
        mine = answers.tiled_forward(20 * q, k, v, 0.3, rows, cols, causal)
        torch.testing.assert_close(mine[0], out[0, :, 0], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(mine[1], lse[0, 0], rtol=1e-12, atol=0)


class Products(torch.overrides.TorchFunctionMode):
    """The largest result of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Compute the call, and note the size of a product."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("__matmul__", "matmul", "mm", "einsum", "__rmatmul__"):
            self.largest = max(self.largest, result.numel())
        return result


def test_tiled_forward_has_tiles(answers: ModuleType) -> None:
    """No product is larger than a tile."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 4) for _ in "qkv")
    with Products() as products:
        answers.tiled_forward(q, k, v, 0.5, 8, 16, False)
    assert 0 < products.largest <= 8 * 16


def counted(n: int, d: int, rows: int, cols: int, outside: str) -> int:
    """Return the numbers of each load and store, one tile after the other."""
    queries = [min(rows, n - i) for i in range(0, n, rows)]
    keys = [min(cols, n - j) for j in range(0, n, cols)]
    numbers = 0
    if outside == "queries":
        for size in queries:
            numbers += size * d + sum(2 * other * d for other in keys) + size * d + size
    else:
        for size in keys:
            numbers += 2 * size * d + sum(3 * other * d + 4 * other for other in queries)
    return numbers


@pytest.mark.parametrize("outside", ["queries", "keys"])
@pytest.mark.parametrize("n", [128, 130, 20])
def test_forward_numbers(answers: ModuleType, n: int, outside: str) -> None:
    """The counts are those of a program that goes over the tiles."""
    assert answers.forward_numbers(n, 16, 64, 32, outside) == counted(n, 16, 64, 32, outside)
