"""Packed sequences across ranks are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch

from rowmax.testing import CASES, Answer, Case, complaints, cotangents, expected, make

from . import programs
from .world import World

Worlds = Callable[[int], World]
_RAGGED = ((37, 37), (130, 130), (1, 1), (0, 0), (64, 64))
PACKED = [
    Case("plain", sequences=_RAGGED),
    Case("causal", sequences=_RAGGED, causal=True, hk=2, sink=True),
    Case("window", sequences=_RAGGED, left=20, right=4, softcap=2.0),
    Case("alibi", sequences=_RAGGED, alibi=True, causal=True),
    Case("unequal", sequences=((5, 90), (0, 17), (100, 70), (33, 0), (1, 40)), hk=2, sink=True),
    Case("wide offsets", sequences=_RAGGED, causal=True, wide_offsets=True, scale=0.5),
    *(c for c in CASES if c.name in ("packed", "packed-causal", "packed-unequal", "packed-one")),
]
_next = cycle([(2, "zigzag"), (3, "uneven"), (4, "contiguous"), (1, "zigzag"), (2, "single")])
TABLE = [(case, *next(_next)) for case in PACKED]


@pytest.mark.parametrize(("case", "size", "kind"), TABLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_packed(case: Case, size: int, kind: str, dtype: torch.dtype, world: Worlds) -> None:
    call = make(case, dtype=dtype)
    queries, keys = programs.packed_layouts(call, kind, size)
    parts = world(size).run(programs.packed_answer, case, dtype, kind, size)
    whole = programs.whole_answer(programs.one_sequence(call), queries, keys, parts)
    gradients = {n: t[0] if n in "qkv" else t for n, t in whole.gradients.items()}
    got = Answer(whole.out[0], whole.lse[0], gradients)
    wrong = complaints(got, expected(call, *cotangents(call)))
    assert not wrong, "\n".join(wrong)


def test_refusals(world: Worlds) -> None:
    dense = "attention of [1, n, H, D] with mask=Documents(cu_seqlens=...)"
    texts = [
        f"bias: got a tensor, with packed sequences; want None, or {dense}",
        f"dropout_p: got 0.1, with packed sequences; want 0, or {dense}",
        f"mask: got Mask(lengths=[1]); want None, Causal() or a Window, or {dense}",
        "cu_seqlens_k: got other offsets; want those of cu_seqlens_q (while compiling, the same "
        "tensor): causal, windows and alibi align each sequence to its own keys",
        "cu_seqlens_k: got 2 offsets; want as many offsets as cu_seqlens_q, 3",
        "cu_seqlens_q: got last offset 63; want the rows of all ranks, 64",
        "q: got shape [1, 32, 2, 16]; want a 3-D tensor [n, H, D] of own rows",
        "causal: got 1; want True or False",
        "no error",
    ]
    for found in world(2).run(programs.wrong_packed):
        assert found == texts
