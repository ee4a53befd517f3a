"""Attention across ranks is that of one device: the table of cases, dropout, dtypes, options."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from rowmax.testing import (
    CASES,
    COVERING,
    Answer,
    Call,
    Case,
    Expected,
    complaints,
    cotangents,
    expected,
    make,
)

from . import programs
from .world import World

Worlds = Callable[[int], World]
SIZES = (2, 3, 4)
#: each case at two places of this list, one after the other
PLACES = tuple(product(SIZES, programs.LAYOUTS))
_next = cycle(PLACES)
DENSE = [
    *(c for c in COVERING if not c.packed),
    *(
        c
        for c in CASES
        if not c.packed
        and c.name.startswith(("empty", "lengths", "documents", "window", "rows-nq=1-"))
    ),
]
TABLE = [(case, *next(_next)) for case in DENSE]


@cache
def _expected(case: Case, dtype: torch.dtype) -> tuple[Call, Expected]:
    call = make(case, dtype=dtype)
    return call, expected(call, *cotangents(call))


def _answer(
    world: World, case: Case, dtype: torch.dtype, kind: str, **overrides: Any
) -> tuple[Answer, list[Answer]]:
    parts = world.run(programs.own_answer, case, dtype, kind, world.size, overrides)
    queries, keys = programs.layouts(case, kind, world.size)
    return programs.whole_answer(make(case, dtype=dtype), queries, keys, parts), parts


def _check(world: World, case: Case, dtype: torch.dtype, kind: str, **overrides: Any) -> None:
    got, _ = _answer(world, case, dtype, kind, **overrides)
    wrong = complaints(got, _expected(case, dtype)[1])
    assert not wrong, "\n".join(wrong)


def _name(x: Any) -> str:
    return str(x)


@pytest.mark.parametrize(("case", "size", "kind"), TABLE, ids=_name)
def test_float32(case: Case, size: int, kind: str, world: Worlds) -> None:
    _check(world(size), case, torch.float32, kind, backend="torch")
