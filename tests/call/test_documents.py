"""Documents of one sequence, given by offsets, are computed as packed sequences."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax


def offsets_of(rng: random.Random, n: int) -> Tensor:
    """Return the offsets of up to 8 documents of n positions in all; some may be empty."""
    inner = sorted(rng.randint(0, n) for _ in range(rng.randrange(8)))
    return torch.tensor([0, *inner, n], dtype=rng.choice((torch.int32, torch.int64)))


def drawn(rng: random.Random, n: int) -> dict[str, Any]:
    """Return the arguments of a random call of n positions, with its terms."""
    hk, group, d, dv = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((8, 33)), 16
    torch.manual_seed(rng.randrange(1000))
    shapes = {"q": (hk * group, d), "k": (hk, d), "v": (hk, dv)}
    found: dict[str, Any] = {
        name: torch.randn(1, n, *shape).requires_grad_() for name, shape in shapes.items()
    }
    for name in ("alibi", "sink"):
        if rng.random() < 0.3:
            found[name] = torch.rand(hk * group).requires_grad_()
    found["softcap"] = rng.choice((0.0, 0.0, 2.0))
    return found


def answer(call: dict[str, Any], mask: rowmax.Mask, **more: Any) -> list[Tensor]:
    """Return out, lse and the gradients of all inputs."""
    leaves = [x for x in call.values() if isinstance(x, Tensor)]
    out, lse = rowmax.attention(**call, mask=mask, return_lse=True, **more)
    seen = lse.isfinite()
    loss = out.square().sum() + lse[seen].sin().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("seed", range(12))
def test_offsets_are_as_their_ids(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice((1, 40, 200, 300))
    call, cu = drawn(rng, n), offsets_of(rng, n)
    ids = torch.bucketize(torch.arange(n), cu[1:], right=True)
    band = rng.choice((rowmax.Mask(), rowmax.Causal(), rowmax.Window(30, 4), rowmax.Window(9, -2)))
    got = answer(call, rowmax.Documents(cu_seqlens=cu) & band)
    want = answer(call, rowmax.Documents(ids) & band)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_results_are_those_of_the_packed_call() -> None:
    rng = random.Random(0)
    call, cu = drawn(rng, 200), torch.tensor([0, 90, 90, 91, 200])
    rows = {name: call.pop(name)[0] for name in "qkv"}
    got = rowmax.attention(
        *(t[None] for t in rows.values()), mask=rowmax.Documents(cu_seqlens=cu), causal=True, **call
    )
    assert torch.equal(got[0], rowmax.attention_varlen(*rows.values(), cu, cu, causal=True, **call))


CU = torch.tensor([0, 3, 10])
ROWS = torch.randn(1, 10, 2, 8)
STAY: dict[str, dict[str, Any]] = {
    "ids": {"mask": rowmax.Documents(torch.zeros(10, dtype=torch.int32))},
    "ids of queries": {
        "mask": rowmax.Documents(cu_seqlens=CU, q_ids=torch.zeros(10, dtype=torch.int32))
    },
    "two": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.Dilated(2)},
    "prefix": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.Prefix(torch.tensor([2]))},
    "lengths": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.PrefixLengths(torch.tensor([2]))},
    "boolean": {"mask": rowmax.Documents(cu_seqlens=CU) & torch.ones(10, 10, dtype=torch.bool)},
    "bias": {"bias": torch.zeros(10, 10)},
    "dropout": {"dropout_p": 0.5},
    "batch": {name: ROWS.expand(2, -1, -1, -1) for name in "qkv"},
    "fewer queries": {"q": ROWS[:, 4:]},
    "float64": {name: ROWS.double() for name in "qkv"},
    "torch": {"backend": "torch"},
    "reference": {"backend": "reference"},
}


@pytest.mark.parametrize("name", STAY)
def test_other_calls_stay_one_sequence(name: str) -> None:
    mask = rowmax.Documents(cu_seqlens=CU)
    given = {"q": ROWS, "k": ROWS, "v": ROWS, "mask": mask, **STAY[name]}
    assert not rowmax.explain(**given).problem.varlen
    assert rowmax.attention(**given).shape == given["q"].shape
    assert rowmax.explain(ROWS, ROWS, ROWS, mask=mask, causal=True).problem.varlen


def test_a_named_backend_computes_it() -> None:
    mask = rowmax.Documents(cu_seqlens=CU)
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        rowmax.attention(ROWS, ROWS, ROWS, mask=mask, backend="triton")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_derivatives_and_transforms() -> None:
    """Second derivatives, forward mode, vmap and a compiled call are those of ids."""
    q = torch.randn(1, 10, 2, 8)
    ids = rowmax.Documents(torch.tensor([0] * 3 + [1] * 7))
    offsets = rowmax.Documents(cu_seqlens=CU)

    def energy(mask: rowmax.Mask, x: Tensor) -> Tensor:
        return rowmax.attention(x, x, x, mask=mask, causal=True).pow(3).sum()

    many = torch.randn(3, *q.shape)
    for of in (
        lambda mask: torch.func.jvp(torch.func.grad(partial(energy, mask)), (q,), (q.sin(),))[1],
        lambda mask: torch.vmap(torch.func.grad(partial(energy, mask)))(many),
        lambda mask: torch.compile(energy, fullgraph=True, backend="aot_eager")(mask, q),
    ):
        torch.testing.assert_close(of(offsets), of(ids), rtol=1e-4, atol=1e-4)
