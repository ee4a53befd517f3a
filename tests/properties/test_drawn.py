"""Calls drawn whole from a seed, against the float64 definition, on the backends of a CPU.

Hypothesis draws the seeds, the same in every run, so that a change is what makes a test fail;
``tests/gpu/random_search.py --device cpu`` goes through others. A failure prints the smallest call
that was found to fail as well: seeds themselves do not shrink.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..drawn import Drawn, drawn, reduced, wrong

CALLS = 20  # for each backend and dtype: half a minute in all on two cores


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cpu", "torch"])
@settings(
    max_examples=CALLS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**31 - 1))
def test_drawn_calls_are_right(name: str, dtype: str, seed: int) -> None:
    if name == "cpu" and find_spec("numba") is None:
        pytest.skip("the cpu backend needs numba, an extra")
    one = drawn(seed, dtype)
    texts = wrong(one, name)
    assert not texts, explained(one, name, texts)


def explained(one: Drawn, backend: str, texts: list[str]) -> str:
    """Return the faults, and Python for the call and for the smallest call that fails."""

    def fails(other: Drawn) -> bool:
        try:
            return bool(wrong(other, backend))
        except Exception:
            return True

    small = reduced(one, fails, most=60)
    parts = [*texts, one.snippet(backend, "cpu"), "the smallest found:"]
    return "\n".join([*parts, small.snippet(backend, "cpu")])
