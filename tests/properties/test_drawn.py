"""Calls drawn whole from a seed, against the float64 definition, on the backends of a CPU.

A failure prints the smallest call that was found to fail as well. The seeds are fixed, so that a
change is what makes a test fail; ``tests/gpu/random_search.py --device cpu`` goes through others.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ..drawn import Drawn, drawn, reduced, wrong

CALLS = 20  # of each backend and dtype: half a minute in all on two cores


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_drawn_calls_are_right(name: str, dtype: str) -> None:
    if name == "cpu" and find_spec("numba") is None:
        pytest.skip("the cpu backend needs numba, an extra")
    first = 10_000 * ["float32", "float64", "bfloat16", "float16"].index(dtype)
    for seed in range(first, first + CALLS):
        one = drawn(seed, dtype)
        texts = wrong(one, name)
        assert not texts, explained(one, name, texts)


def explained(one: Drawn, backend: str, texts: list[str]) -> str:
    """What is wrong, and Python for the call and for the smallest that fails."""

    def fails(other: Drawn) -> bool:
        try:
            return bool(wrong(other, backend))
        except Exception:
            return True

    small = reduced(one, fails, most=60)
    parts = [*texts, one.snippet(backend, "cpu"), "the smallest found:"]
    return "\n".join([*parts, small.snippet(backend, "cpu")])
