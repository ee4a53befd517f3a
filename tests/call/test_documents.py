"""Documents of one sequence, given by offsets, are computed as packed sequences."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax
from rowmax.call import dispatch
from rowmax.mask_algebra import Ids
from tests.documents import answer, band_of, check, drawn, offsets_of


@pytest.mark.parametrize("seed", range(12))
def test_offsets_are_as_their_ids(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice((1, 40, 200, 300))
    call, cu, band = drawn(rng, n, 33, "float32", "cpu"), offsets_of(rng, n), band_of(rng)
    ids = torch.bucketize(torch.arange(n), cu[1:], right=True)
    got, want = (
        answer(call, *rowmax.attention(**call, mask=one & band, return_lse=True, backend=backend))
        for one, backend in (
            (rowmax.Documents(cu_seqlens=cu), None),
            (rowmax.Documents(ids), "torch"),
        )
    )
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("seed", range(5))
def test_results_are_those_of_the_packed_call(seed: int, backend: str) -> None:
    assert check(seed, "float32", backend, "cpu") == []


CU = torch.tensor([0, 3, 10])
ROWS = torch.randn(1, 10, 2, 8)
STAY: dict[str, dict[str, Any]] = {
    "ids": {"mask": rowmax.Documents(torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 2]))},
    "no ids": {
        "mask": rowmax.Documents(torch.zeros(0, dtype=torch.int32)),
        **dict.fromkeys("qkv", ROWS[:, :0]),
    },
    "ids of queries": {
        "mask": rowmax.Documents(cu_seqlens=CU, q_ids=torch.zeros(10, dtype=torch.int32))
    },
    "an id of all queries": {"mask": rowmax.Mask(documents=(Ids(cu_seqlens=CU, q_id=1),))},
    "two": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.Dilated(2)},
    "prefix": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.Prefix(torch.tensor([2]))},
    "lengths": {"mask": rowmax.Documents(cu_seqlens=CU) & rowmax.PrefixLengths(torch.tensor([2]))},
    "boolean": {"mask": rowmax.Documents(cu_seqlens=CU) & torch.ones(10, 10, dtype=torch.bool)},
    "bias": {"bias": torch.zeros(10, 10)},
    "dropout": {"dropout_p": 0.5},
    "batch": {name: ROWS.expand(2, -1, -1, -1) for name in "qkv"},
    "fewer queries": {"q": ROWS[:, 4:]},
    "torch": {"backend": "torch"},
    "reference": {"backend": "reference"},
}


@pytest.mark.parametrize("name", STAY)
def test_other_calls_stay_one_sequence(name: str) -> None:
    mask = rowmax.Documents(cu_seqlens=CU)
    given = {"q": ROWS, "k": ROWS, "v": ROWS, "mask": mask, **STAY[name]}
    assert not rowmax.explain(**given).problem.varlen
    want = rowmax.attention(**given | {"backend": "reference", "seed": 1})
    got = rowmax.attention(**given | {"seed": 1})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
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
    ids = ids & ids  # two stay ids
    offsets = rowmax.Documents(cu_seqlens=CU)

    def energy(mask: rowmax.Mask, x: Tensor) -> Tensor:
        return rowmax.attention(x, x, x, mask=mask, causal=True).pow(3).sum()

    def twice(mask: rowmax.Mask) -> Tensor:
        leaf = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(energy(mask, leaf), leaf, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaf)[0]

    many = torch.randn(3, *q.shape)
    for of in (
        twice,
        lambda mask: torch.func.jvp(torch.func.grad(partial(energy, mask)), (q,), (q.sin(),))[1],
        lambda mask: torch.vmap(torch.func.grad(partial(energy, mask)))(many),
        lambda mask: torch.compile(energy, fullgraph=True, backend="aot_eager")(mask, q),
        lambda mask: torch.compile(energy, fullgraph=True, dynamic=True, backend="eager")(mask, q),
    ):
        torch.testing.assert_close(of(offsets), of(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "d", "want"),
    [
        (None, "cpu", torch.float64, 576, True),
        ("cpu", "cpu", torch.float32, 512, True),
        ("torch", "cpu", torch.float32, 512, False),
        ("triton", "cpu", torch.float32, 512, False),
        (None, "cuda", torch.float32, 512, True),
        (None, "cuda", torch.float64, 512, False),
        (None, "cuda", torch.float32, 576, False),
        ("reference", "cuda", torch.float32, 512, False),
        (None, "meta", torch.float32, 512, False),
    ],
)
def test_a_backend_has_to_compute_all_at_once(
    name: str | None, device: str, dtype: torch.dtype, d: int, want: bool
) -> None:
    assert dispatch.packs(name, torch.device(device), dtype, d) is want
