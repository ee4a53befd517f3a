"""The launches of a backward, found without running it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from rowmax.call.inputs import Tensors, Wanted
from rowmax.call.problem import Problem
from rowmax.gpu import hopper
from rowmax.testing import CASES, Case, make

ahead = importlib.import_module("rowmax.gpu.ahead")
compiled = importlib.import_module("rowmax.gpu.compiled")
backward = importlib.import_module("rowmax.gpu.hopper.backward_host")
plans = importlib.import_module("rowmax.gpu.hopper.backward_plan")
host = importlib.import_module("rowmax.gpu.hopper.host")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU stand for a Hopper GPU."""
    monkeypatch.setattr(hopper, "_missing", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compiled.Launch, "on", lambda launch, like, t: launch(t))
    for module in (host, plans):
        monkeypatch.setattr(module, "processors", lambda device: 132)


def kinds(found: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return all that decides which kernels these launches compile."""
    return [
        (launch.kernel, compiled._kinds(args), launch.options, launch.grid)
        for launch, args in found
    ]


def call_of(case: Case) -> tuple[Problem, Tensors, Wanted]:
    """Return the call of a case, and the gradients that Hopper makes of it."""
    problem, tensors = make(case, dtype=torch.bfloat16).problem()
    refused = hopper.supports(problem, "backward")
    if refused is not None:
        pytest.skip(refused)
    lacking = hopper.lacks(problem, "backward")
    there = (getattr(tensors, name) is not None for name in Wanted._fields)
    made = (f"d{name}" not in lacking for name in Wanted._fields)
    return problem, tensors, Wanted(*map(all, zip(there, made, strict=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backward_without_values_has_the_launches_of_one_with_them(case: Case) -> None:
    problem, tensors, wanted = call_of(case)

    def run(out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Any:
        return backward.backward(problem, tensors, out, lse, dout, None, wanted)

    out = torch.zeros(problem.out_shape, dtype=torch.bfloat16)
    lse = torch.zeros(problem.lse_shape)
    with compiled.recorded_by(running=False) as wants:
        run(out, lse, torch.zeros_like(out))  # also makes the plan, whose tables have values
    wants.sort(key=lambda x: not x[0].copies)
    found = kinds(ahead.arguments(problem, tensors, run))
    assert found == kinds((x, x.arguments(t, bases)) for x, t, bases in wants)
    assert len(found) >= 3 or 0 in (*problem.out_shape, problem.nk)
