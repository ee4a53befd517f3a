"""Finite biases and sinks of any size, on every backend of a CPU."""

from __future__ import annotations

import pytest
import torch

import rowmax
from rowmax.testing import Case

from .extreme_bias import CASES, checks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_definition(case: Case, backend: str) -> None:
    wrong = checks(backend, "cpu", cases=[case])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -3e38, -1e9, 3e38])
def test_the_same_bias_everywhere_is_the_mean(value: float, backend: str) -> None:
    """out is the mean of the values, and lse is the bias, to which log n adds nothing."""
    q, k, v = (torch.randn(1, n, 1, 8).requires_grad_() for n in (3, 50, 50))
    bias = torch.full((1, 1, 3, 50), value).requires_grad_()
    out, lse = rowmax.attention(q, k, v, bias=bias, return_lse=True, backend=backend)  # pyright: ignore
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, value), rtol=1e-6, atol=0.0)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dv, dbias = torch.autograd.grad([out, lse], [v, bias], [dout, dlse])
    torch.testing.assert_close(dv, (dout.sum(1, keepdim=True) / 50).expand_as(v))
    torch.testing.assert_close(dbias.sum(-1), dlse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -3e38, 3e38])
def test_softmax_and_logsumexp_of_any_size(value: float) -> None:
    x = torch.randn(4, 40)
    x[1], x[2, 7], x[3] = value, value, -torch.inf
    x[3, ::2] = value
    x.requires_grad_()
    double = x.detach().double().requires_grad_()
    y, z = rowmax.softmax(x, -1, block=16), torch.softmax(double, -1)
    torch.testing.assert_close(y.double(), z, rtol=1e-6, atol=1e-6)
    g = torch.randn_like(y)
    dx, dz = torch.autograd.grad(y, x, g)[0], torch.autograd.grad(z, double, g.double())[0]
    torch.testing.assert_close(dx.double(), dz, rtol=1e-5, atol=1e-6)
    e = rowmax.logsumexp(x, -1, block=16)
    torch.testing.assert_close(e.double(), torch.logsumexp(double, -1), rtol=1e-6, atol=1e-6)
    # torch's own gradient is exp(x - e), which loses the log of the number of terms
    dx = torch.autograd.grad(e, x, g[:, 0])[0]
    want = torch.softmax(double, -1) * g[:, :1]
    torch.testing.assert_close(dx.double(), want, rtol=1e-5, atol=1e-6)


def test_merge_of_any_size() -> None:
    low = torch.finfo(torch.float32).min
    lse_a = torch.tensor([low, low, 3e38, -3e38, -torch.inf, low]).view(1, 1, 6).requires_grad_()
    lse_b = torch.tensor([low, -3e38, low, 3e38, low, 1.0]).view(1, 1, 6).requires_grad_()
    out_a, out_b = (torch.randn(1, 6, 1, 4).requires_grad_() for _ in range(2))
    out, lse = rowmax.merge((out_a, lse_a), (out_b, lse_b))
    share = torch.tensor([0.5, 0.0, 1.0, 0.0, 0.0, 0.0]).view(1, 6, 1, 1)
    torch.testing.assert_close(out, share * out_a + (1 - share) * out_b)
    torch.testing.assert_close(lse, torch.maximum(lse_a, lse_b), rtol=1e-6, atol=0.0)
    grads = torch.autograd.grad(out.sum() + lse[0, 0, 4:].sum(), (lse_a, lse_b, out_a, out_b))
    assert all(g.isfinite().all() for g in grads)
