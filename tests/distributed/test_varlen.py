"""Packed sequences across ranks are those of one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from rowmax.distributed import Layout
from rowmax.distributed.pieces import Sight, few_copies, pieces_of
from rowmax.distributed.routes import route
from rowmax.testing import CASES, Answer, Case, complaints, cotangents, expected, make

from . import programs, varlen_programs
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
_PLACES = [(2, "zigzag"), (3, "uneven"), (4, "contiguous"), (1, "zigzag"), (2, "single")]
_next = cycle([*_PLACES, (3, "documents"), (2, "balanced"), (4, "documents")])
TABLE = [(case, *next(_next)) for case in PACKED]


def _drawn(number: int) -> tuple[Case, int, str, int]:
    """Return a random case that is one packed call on each rank, its place and stages."""
    draw = random.Random(number)
    lengths = [draw.choice((0, 1, 3, 17, 64, 70, 128, 150)) for _ in range(draw.randint(1, 7))]
    lengths.append(draw.randint(1, 90))
    band: dict[str, Any] = draw.choice(
        ({}, {"causal": True}, {"left": draw.randint(1, 80), "right": 0}, {"left": 40, "right": -2})
    )
    case = Case(
        f"drawn-{number}",
        sequences=tuple((n, n) for n in lengths),
        **band,
        hk=draw.choice((1, 2, 4)),
        d=16,
        dv=draw.choice((16, 24)),
        alibi=bool(band) and draw.random() < 0.4,
        sink=draw.random() < 0.4,
        softcap=draw.choice((0.0, 3.0)),
    )
    return case, draw.choice((2, 3, 4)), draw.choice(programs.PACKED), draw.choice((1, 2))


DRAWN = [_drawn(number) for number in range(24)]


@pytest.mark.parametrize(("case", "size", "kind"), TABLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_packed(case: Case, size: int, kind: str, dtype: torch.dtype, world: Worlds) -> None:
    _check(world(size), case, dtype, kind)


def _check(world: World, case: Case, dtype: torch.dtype, kind: str, stages: int = 1) -> list[int]:
    """Compare a packed call with the definition; return the number of calls of each rank."""
    call = make(case, dtype=dtype)
    queries, keys = varlen_programs.packed_layouts(call, kind, world.size)
    found = world.run(varlen_programs.packed_answer, case, dtype, kind, world.size, stages)
    parts = [answer for answer, _ in found]
    whole = programs.whole_answer(varlen_programs.one_sequence(call), queries, keys, parts)
    gradients = {n: t[0] if n in "qkv" else t for n, t in whole.gradients.items()}
    got = Answer(whole.out[0], whole.lse[0], gradients)
    wrong = complaints(got, expected(call, *cotangents(call)))
    assert not wrong, "\n".join(wrong)
    return [calls for _, calls in found]


@pytest.mark.parametrize(("case", "size", "kind", "stages"), DRAWN, ids=str)
def test_pieces_are_one_call(case: Case, size: int, kind: str, stages: int, world: Worlds) -> None:
    """Each direction has one call a stage, and none on a rank without rows."""
    most = 2 * min(stages, case.hk or 4)
    for dtype in (torch.float32, torch.float64):
        calls = _check(world(size), case, dtype, kind, stages)
        assert set(calls) <= {0, most}
        assert max(calls) == most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pieces_in_half(dtype: torch.dtype, world: Worlds) -> None:
    case = Case("half", sequences=((150, 150), (40, 40), (200, 200)), causal=True, hk=2)
    for kind in ("balanced", "documents"):
        assert _check(world(3), case, dtype, kind) == [2, 2, 2]


@pytest.mark.parametrize(("case", "size", "kind", "stages"), DRAWN[:6], ids=str)
def test_shared_memory(case: Case, size: int, kind: str, stages: int, world: Worlds) -> None:
    given = (case, torch.float32, kind, size, stages)
    assert all(world(size).run(varlen_programs.packed_in_shared_memory, *given))


def test_whole_documents_move_nothing(world: Worlds) -> None:
    assert world(2).run(varlen_programs.shows_of_whole_documents) == [0, 0]


def test_sums_over_pieces_repeat_to_the_bit(world: Worlds) -> None:
    first, again = (world(3).run(varlen_programs.packed_bits, 20) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_offsets_that_change_in_place(world: Worlds) -> None:
    assert all(world(2).run(varlen_programs.offsets_in_place))


def test_few_copies() -> None:
    """One document in chunks of 64 has its first keys in every piece: too many copies."""
    document, short = "0,8192", ",".join(map(str, range(0, 8193, 64)))
    layout = Layout.balanced(None, 8192, 2, chunk=64)
    assert not few_copies(layout, Sight(None, 0, document))
    assert few_copies(layout, Sight(64, 0, document))
    assert few_copies(layout, Sight(None, 0, short))
    assert few_copies(Layout.zigzag(8192, 2), Sight(None, 0, document))


def test_a_document_of_many_chunks_is_not_copied(world: Worlds) -> None:
    """It is a call for each chunk, as without documents."""
    case = Case("many", sequences=((400, 400),), causal=True, d=16)
    assert max(_check(world(2), case, torch.float32, "chunks of 8")) > 2


@pytest.mark.parametrize("number", range(40))
def test_packings(number: int) -> None:
    """Packed keys are those of each piece, and sums are those of a loop."""
    draw = random.Random(number)
    cu = [0]
    while len(cu) < draw.randint(2, 9):
        cu.append(cu[-1] + draw.choice((0, 1, 5, 30, 90)))
    text = ",".join(map(str, cu))
    layout = programs.uneven(max(1, cu[-1]), 3) if cu[-1] else Layout.zigzag(0, 3)
    sight = Sight(*draw.choice(((None, None), (None, 0), (9, 0), (4, -1))), text)
    for rank in range(3):
        way = route(layout, layout, sight, rank)
        pieces = pieces_of(layout, sight, rank)
        assert [i for one in pieces for i in one.queries] == layout.positions(rank).tolist()
        if not pieces:
            assert way.parts == ()
            continue
        (part,) = way.parts
        packing = part.packing
        assert packing is not None
        needed = sorted({j for one in pieces for j in one.keys})
        assert way.length == len(needed)
        keys = torch.tensor(needed).view(1, -1, 1, 1)
        want = [j for one in pieces for j in one.keys]
        assert packing.packed(keys).flatten().tolist() == want
        gradient = torch.rand(1, len(want), 1, 1, dtype=torch.float64)
        total = dict.fromkeys(needed, 0.0)
        for j, x in zip(want, gradient.flatten().tolist(), strict=True):
            total[j] += x
        got = packing.sums(gradient, torch.float64).flatten()
        torch.testing.assert_close(got, torch.tensor(list(total.values()), dtype=torch.float64))


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
    for found in world(2).run(varlen_programs.wrong_packed):
        assert found == texts
