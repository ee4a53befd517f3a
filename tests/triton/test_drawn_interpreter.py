"""Small random calls, each drawn from a seed, on the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from rowmax.call import dispatch as backends
from tests.drawn import drawn, wrong

interpreter = importlib.import_module("triton.runtime.interpreter")
forward = importlib.import_module("rowmax.gpu.triton.forward")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the interpreter's own, of numpy
    pytest.mark.skipif(
        not isinstance(forward.forward_kernel, interpreter.InterpretedFunction),
        reason="the kernels were imported without TRITON_INTERPRET=1",
    ),
]

BUDGET = 2500  # scores of a call
CALLS = 8  # for each part: half a minute in all


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends._DEVICES, "triton", ("cpu", "cuda", "xpu"))
    backends.choose.cache_clear()
    yield
    backends.choose.cache_clear()


@pytest.mark.parametrize("part", range(4))
def test_drawn_calls_are_right_float32(part: int) -> None:
    for seed in range(CALLS * part, CALLS * (part + 1)):
        one = drawn(seed, "float32", BUDGET)
        texts = wrong(one, "triton")
        assert not texts, "\n".join([*texts, one.snippet("triton", "cpu")])
