"""The kernels of the tables of documents, in Triton's interpreter, against the same in torch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rowmax.gpu.hopper import documents
from tests.hopper.document_spans import sorted_spans, tables

pytestmark = pytest.mark.skipif(
    not documents._is_interpreted(), reason="needs TRITON_INTERPRET=1 before triton is imported"
)


def ids(rng: random.Random, batch: int, n: int) -> Tensor:
    """Return random ids, some shared by the batch, some sorted."""
    t = torch.randint(-2, rng.choice((1, 3, 20)), (rng.choice((1, batch)), n), dtype=torch.int32)
    return t.sort(1)[0] if rng.random() < 0.6 else t


@pytest.mark.parametrize("seed", range(12))
def test_tables_of_documents_float32(seed: int) -> None:
    """Numbers of tiles on both sides of a step of 256, blocks that are no power of two."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.choice((1, 2, 3))
    q, k = (
        ids(rng, batch, rng.choice((1, 5, 130, 1000))),
        ids(rng, batch, rng.choice((1, 100, 900))),
    )
    blocks = rng.choice((16, 64, 21)), rng.choice((1, 3, 64, 128))
    sides = (q, k, rng.choice((1, 2, 3)), *blocks, batch)
    for got, want in zip(documents.tile_spans(*sides), sorted_spans(*sides), strict=True):
        assert torch.equal(got, want)
    problem: Any = SimpleNamespace(batch=batch)
    tensors: Any = SimpleNamespace(q_ids=q, k_ids=k)
    given = (problem, tensors, rng.choice((1, 2, 3)), *blocks)
    for got, want in zip(documents.spans_of(*given), tables(*given), strict=True):
        assert torch.equal(got, want)
