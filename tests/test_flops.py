"""torch's counter of operations counts those of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax.testing import Case, make
from tests import forks

from .small_calls import BACKEND, attention, inputs


def test_flops_are_counted() -> None:
    q, k, v = inputs(2, 10, grad=True)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v).sum().backward()
    product = 2 * 2 * 2 * 10 * 10 * 8
    assert counter.get_total_flops() == 7 * product
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * product * 55 // 100
    cu = torch.tensor([0, 3, 10])
    with FlopCounterMode(display=False) as counter:
        rowmax.attention_varlen(q[0], k[0], v[0], cu, cu, backend=BACKEND)
    assert counter.get_total_flops() == 2 * 2 * 2 * (9 + 49) * 8


_FIRST = """
import sys, torch, rowmax
from contextlib import nullcontext
from torch.utils.flop_counter import FlopCounterMode
what = sys.argv[1]
q, k, v = (torch.randn(1, 10, 2, 8, requires_grad=True) for _ in range(3))
counter = FlopCounterMode(display=False)
with counter if what != "backward" else nullcontext(), torch.inference_mode(what == "inference"):
    out = rowmax.attention(q, k, v)
if what == "backward":
    with counter:
        out.sum().backward()
print(counter.get_total_flops())
"""


@pytest.mark.parametrize(("what", "products"), [("forward", 2), ("inference", 2), ("backward", 5)])
def test_flops_of_the_first_call_are_counted(what: str, products: int) -> None:
    """A counter keeps a copy of the registry from before our operators were registered."""
    done = forks.run(_FIRST, what, preload=("torch._dynamo",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == products * 2 * 2 * 10 * 10 * 8


@pytest.mark.parametrize("nq", [0, 1, 7, 12])
@pytest.mark.parametrize("nk", [0, 1, 4, 11])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 0), (0, 3), (20, 30), (5, None)])
def test_flops_count_the_band(nq: int, nk: int, band: tuple[int | None, int | None]) -> None:
    call = make(Case("band", b=2, nq=nq, nk=nk, hq=3, d=5, dv=4, left=band[0], right=band[1]))
    problem, tensors = call.problem()
    pairs = int(rowmax.rules.mask.dense(problem, tensors).sum()) * 2 * 3
    assert rowmax.call.flops.forward_flops(problem) == 2 * pairs * (5 + 4)
    assert rowmax.call.flops.backward_flops(problem) == 2 * pairs * (3 * 5 + 2 * 4)
    # with positions that lengths move, the count is that of the longest, which is the most
    aligned, tensors = make(replace(call.case, lengths=(0.5, 0.2), align="lengths")).problem()
    assert int(rowmax.rules.mask.dense(aligned, tensors).sum()) * 3 <= pairs
    assert rowmax.call.flops.forward_flops(aligned) == 2 * pairs * (5 + 4)
