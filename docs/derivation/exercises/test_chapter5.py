"""Checks of chapter 5."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

import rowmax


def test_softmax_backward(answers: ModuleType) -> None:
    """The gradient is autograd's."""
    torch.manual_seed(0)
    x = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    dp = torch.randn(6, 9, dtype=torch.float64)
    p = torch.softmax(x, 1)
    (want,) = torch.autograd.grad(p, x, dp)
    torch.testing.assert_close(answers.softmax_backward(p.detach(), dp), want)


def test_row_numbers(answers: ModuleType) -> None:
    """Rows with keys have Delta - dLSE; the others have no weights and no gradient."""
    torch.manual_seed(0)
    out, dout = torch.randn(2, 4, 3, dtype=torch.float64)
    lse, dlse = torch.randn(2, 4, dtype=torch.float64)
    lse[2], out[2] = -math.inf, 0.0
    delta, read = answers.row_numbers(out, lse, dout, dlse)
    want = (dout * out).sum(1) - dlse
    want[2] = 0.0
    torch.testing.assert_close(delta, want)
    assert torch.equal(read[[0, 1, 3]], lse[[0, 1, 3]])
    assert torch.exp(torch.tensor([5.0, -math.inf]) - read[2]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(16, 16), (21, 50), (50, 21)])
def test_tiled_backward(answers: ModuleType, nq: int, nk: int, causal: bool) -> None:
    """The gradients are autograd's through rowmax's dense reference, in float64."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(n, d, dtype=torch.float64, requires_grad=True)
        for n, d in ((nq, 8), (nk, 8), (nk, 5))
    )
    dout, dlse = torch.randn(nq, 5, dtype=torch.float64), torch.randn(nq, dtype=torch.float64)
    batched = (t[None, :, None] for t in (q, k, v))
    out, lse = rowmax.attention(
        *batched, scale=0.3, causal=causal, backend="reference", return_lse=True
    )
    out, lse = out[0, :, 0], lse[0, 0]
    want = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    tensors = (t.detach() for t in (q, k, v, out, lse, dout, dlse))
    call = answers.Call(*tensors, 0.3, causal)
    for rows, cols in ((16, 16), (7, 9)):
        for mine, theirs in zip(answers.tiled_backward(call, rows, cols), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
