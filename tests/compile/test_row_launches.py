"""The plain launches of a Hopper backward compile: before its kernel, after it, sums of parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from rowmax.call.inputs import Wanted
from rowmax.gpu import ahead
from rowmax.gpu.hopper import backward_host, backward_plan, host
from rowmax.testing import Case, make

case = Case("", **eval(sys.argv[1]))
problem, tensors = make(case, dtype=torch.bfloat16).problem()
there = Wanted(*(getattr(tensors, name) is not None for name in Wanted._fields))

def run(out, lse, dout):
    return backward_host.backward(problem, tensors, out, lse, dout, None, there)

with (
    mock.patch.object(host, "processors", return_value=132),
    mock.patch.object(backward_plan, "processors", return_value=132),
    mock.patch.object(torch.cuda, "current_device", return_value=None),
    mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
):
    backward_plan.plan_of(problem, tensors, torch.zeros(problem.out_shape, dtype=torch.bfloat16))
    launches = ahead.arguments(problem, tensors, run)
for launch, arguments in launches:
    if not launch.copies:  # tests/compile/test_hopper_backward.py has the others
        launch.compile(*arguments, target=GPUTarget("cuda", 90, 32))
        print(launch.kernel.__name__)
"""


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ({"b": 1, "nq": 2048, "hq": 8, "hk": 1, "d": 128}, ["prepare", "finish", "sum_parts"]),
        ({"b": 1, "nq": 2048, "hq": 8, "hk": 1, "d": 256}, ["prepare", "sum_parts"]),
        (
            {"sequences": ((2000, 2000), (30, 1500)), "hq": 8, "hk": 1, "d": 96, "sink": True},
            ["_place", "prepare", "finish", "sum_parts"],
        ),
        ({"b": 2, "nq": 100, "d": 80}, ["prepare", "finish"]),
    ],
    ids=str,
)
def test_launches_before_and_after_compile(case: dict[str, object], names: list[str]) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), before])
    command = [sys.executable, "-c", PROGRAM, repr(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names
