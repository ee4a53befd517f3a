"""Checks of chapter 7."""

from __future__ import annotations

from types import ModuleType

import torch


def test_softmax_tangent(answers: ModuleType) -> None:
    """The tangents are those of autograd."""
    torch.manual_seed(0)
    x, tx = torch.randn(2, 6, 9, dtype=torch.float64)
    (p, _), want = torch.autograd.functional.jvp(
        lambda x: (torch.softmax(x, 1), x.logsumexp(1, keepdim=True)), x, tx
    )
    for mine, theirs in zip(answers.softmax_tangent(p, tx), want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_move_base(answers: ModuleType) -> None:
    """The sums are those that the other base gives from the first key on."""
    torch.manual_seed(0)
    x, tx = torch.randn(2, 6, 9, dtype=torch.float64)
    v, tv = torch.randn(2, 9, 4, dtype=torch.float64)
    w = torch.exp(x - x.amax(1, keepdim=True))

    def state(mu: torch.Tensor) -> tuple[torch.Tensor, ...]:
        along = w * (tx - mu)
        sums = w.sum(1, keepdim=True), w @ v, along.sum(1, keepdim=True), along @ v + w @ tv
        return answers.State(*sums, mu)

    before, after = torch.randn(2, 6, 1, dtype=torch.float64)
    for mine, theirs in zip(answers.move_base(state(before), after), state(after), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_hessian_product(answers: ModuleType) -> None:
    """The product is that of the whole Hessian."""
    torch.manual_seed(0)
    q, direction = torch.randn(2, 5, 4, dtype=torch.float64)
    k, v = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    dout = torch.randn(5, 3, dtype=torch.float64)

    def value(q: torch.Tensor) -> torch.Tensor:
        return (dout * (torch.softmax(0.7 * q @ k.T, 1) @ v)).sum()

    hessian = torch.autograd.functional.hessian(value, q)
    assert isinstance(hessian, torch.Tensor)
    want = torch.einsum("ijkl,kl->ij", hessian, direction)
    found = answers.hessian_product(q, k, v, dout, direction, 0.7)
    torch.testing.assert_close(found, want)
