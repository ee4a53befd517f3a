"""Few keys: one program a kv head computes all gradients (``gpu/triton/short.py``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rowmax.call.problem import Problem, Wanted
from rowmax.gpu import short_keys
from rowmax.testing import CASES, COVERING, Case, answer, complaints, cotangents, expected, make
from rowmax.testing import poisoned
from tests.drawn import drawn, wrong
from tests.triton.test_interpreter import _watched, interpreter  # noqa: F401  (a fixture)

forward = importlib.import_module("rowmax.gpu.triton.forward")
short = importlib.import_module("rowmax.gpu.triton.short")
launch = importlib.import_module("rowmax.gpu.launch")
tiles = importlib.import_module("rowmax.gpu.tiles")

pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter's own, of numpy
interpreted = pytest.mark.skipif(
    not isinstance(forward.forward_kernel, interpreter.InterpretedFunction),
    reason="the kernels were imported without TRITON_INTERPRET=1",
)

Forced = Callable[..., list[int]]
#: cases whose backward can be one of few keys
TAKEN = [case for case in COVERING if case.sequences is None and case.nk != 0 and case.nq != 0]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Return a function that sends backwards to the kernel; its list counts the launches."""

    def forced(parts: int = 1, block_q: int = 64) -> list[int]:
        count = [0]

        def tiles_of(problem: Problem, wanted: Wanted | None = None) -> Any:
            if problem.varlen or not problem.nk or wanted is None or any(wanted[3:]):
                return None
            count[0] += 1
            return tiles.Tiles(block_q, tiles.padded(problem.nk), 4, 2, parts=parts)

        launch._jobs.clear()
        monkeypatch.setattr(short_keys, "tiles_of", tiles_of)
        return count

    return forced


def check(case: Case, dtype: torch.dtype, taken: list[int]) -> None:
    call = make(replace(case, grads=("q", "k", "v")), dtype=dtype)
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend="triton")
    found = complaints(got, want)
    assert not found, "\n".join(found)
    assert taken[0] > 0


@interpreted
@pytest.mark.parametrize("case", TAKEN[::2], ids=str)
def test_float32(case: Case, forced: Forced) -> None:
    check(case, torch.float32, forced())


@interpreted
@pytest.mark.parametrize("case", TAKEN[1::4], ids=str)
def test_float16(case: Case, forced: Forced) -> None:
    check(case, torch.float16, forced(block_q=32))


@interpreted
@pytest.mark.parametrize("case", TAKEN[3::4], ids=str)
def test_parts(case: Case, forced: Forced) -> None:
    check(case, torch.float32, forced(parts=3, block_q=16))
