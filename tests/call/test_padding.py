"""Padding of few queries on a CPU is a boolean mask of keys, with the bits of ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax
from rowmax.call import normalize
from tests.documents import answer, band_of

B, NK = 3, 40


def padding(rng: random.Random, by: str) -> rowmax.Mask:
    """Return a mask of padding for B sequences of NK keys, on the left or anywhere."""
    starts = torch.tensor([rng.randint(0, NK) for _ in range(B)])
    if by == "starts":
        return rowmax.LeftPadding(starts)
    return rowmax.KeyPadding(torch.rand(B if by == "keys" else 1, NK) < 0.3)


def drawn(rng: random.Random, nq: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call with some terms."""
    torch.manual_seed(rng.randrange(1000))
    sizes = {"q": (nq, 4), "k": (NK, 2), "v": (NK, 2)}
    call: dict[str, Any] = {
        name: torch.randn(B, n, h, 16, dtype=dtype).requires_grad_()
        for name, (n, h) in sizes.items()
    }
    for name in ("alibi", "sink"):
        if rng.random() < 0.3:
            call[name] = torch.rand(4).requires_grad_()
    if rng.random() < 0.3:
        call["bias"] = torch.randn(4, nq, NK, dtype=dtype).requires_grad_()
    dropout = rng.choice(({}, {}, {"dropout_p": 0.3, "seed": 5}))
    return call | {"softcap": rng.choice((0.0, 2.0))} | dropout


def also(rng: random.Random) -> rowmax.Mask:
    """Return a mask that padding may have besides."""
    lengths = torch.tensor([rng.randint(0, NK) for _ in range(B)])
    return rng.choice(
        (
            band_of(rng),
            rowmax.PrefixLengths(lengths),
            rowmax.PrefixLengths(lengths, align="lengths"),
            rowmax.Prefix(lengths),
        )
    )


@pytest.mark.parametrize("by", ["starts", "keys", "keys of all"])
@pytest.mark.parametrize("seed", range(14))
def test_bits_are_those_of_ids(seed: int, by: str) -> None:
    rng = random.Random(seed)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    call, band = drawn(rng, rng.choice((1, 1, 5, 40)), dtype), also(rng)
    for _ in range(3):  # later calls are found, with other padding
        hidden = padding(rng, by)
        given: dict[str, Any] = {**call, "return_lse": True, "backend": "cpu"}
        got = answer(call, *rowmax.attention(**given, mask=hidden & band))
        # two masks of ids stay ids
        want = answer(call, *rowmax.attention(**given, mask=hidden & hidden & band))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def rows(nq: int = 1) -> dict[str, Any]:
    return {"q": torch.randn(B, nq, 2, 16), **dict.fromkeys("kv", torch.randn(B, NK, 2, 16))}


def test_only_few_queries_have_a_boolean_mask() -> None:
    mask = rowmax.LeftPadding(torch.tensor([0, 5, 40]))
    problem = rowmax.explain(**rows(), mask=mask).problem
    assert (problem.documents, problem.allowed) == (False, (B, 1, 1, NK))
    for given, one in (
        (rows(normalize.FEW_QUERIES + 1), mask),
        (rows() | {"backend": "torch"}, mask),
        (rows(), mask & torch.ones(1, NK, dtype=torch.bool)),
        (rows(), mask & mask),
        (rows(), rowmax.Documents(torch.zeros(NK, dtype=torch.int32))),
    ):
        assert rowmax.explain(**given, mask=one).problem.documents
        want = rowmax.attention(**given | {"backend": "reference"}, mask=one)
        assert torch.allclose(rowmax.attention(**given, mask=one), want, atol=1e-5)


def test_mistakes_name_the_padding() -> None:
    rowmax.attention(**rows(), mask=rowmax.LeftPadding(torch.tensor([0, 5, 40])))
    for starts, match in (([0, -1, 3], "lengths of 0 or more"), ([0, 1], "one for each of 3")):
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"LeftPadding\(starts=\).*{match}"):
                rowmax.attention(**rows(), mask=rowmax.LeftPadding(torch.tensor(starts)))
    with pytest.raises(ValueError, match=r"KeyPadding.*\[B, Nk\] = \[3, 40\]"):
        rowmax.attention(**rows(), mask=rowmax.KeyPadding(torch.zeros(B, NK - 1).bool()))


def test_transforms_and_graphs() -> None:
    mask = rowmax.LeftPadding(torch.tensor([0, 5, 40]))
    given = rows()
    q = given.pop("q")

    def energy(x: Tensor) -> Tensor:
        return rowmax.attention(x, **given, mask=mask).pow(2).sum()

    want = torch.autograd.grad(energy(leaf := q.clone().requires_grad_()), leaf)[0]
    for function in (
        torch.func.grad(energy),
        lambda x: torch.vmap(torch.func.grad(energy))(x[None])[0],
        lambda x: torch.autograd.grad(
            torch.compile(energy, fullgraph=True, backend="aot_eager")(x.requires_grad_()), x
        )[0],
    ):
        torch.testing.assert_close(function(q.clone()), want, rtol=1e-4, atol=1e-5)
