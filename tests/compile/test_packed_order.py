"""The kernel that makes the order of packed sequences compiles, without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
from triton.backends.compiler import GPUTarget
from rowmax.gpu.hopper import packed

runs, forward = int(sys.argv[1]), sys.argv[2] == "True"
cu = torch.zeros(5, dtype=torch.int32)
out, lse = torch.empty(1, 300, 4, 64, dtype=torch.bfloat16), torch.empty(1, 4, 300)
sink = torch.empty(4, dtype=torch.bfloat16)
found = []
packed.Launch.__call__ = lambda self, t: found.append((self, t))
rows = (out, lse, sink) if forward else ()
packed.order(cu, cu, (300, 300), 128, *rows, late=packed.Late(runs, 2, 132))
((launch, t),) = found
made = launch.compile(*launch.arguments(t), target=GPUTarget("cuda", 90, 32))
print(made.asm["ptx"])
"""


@pytest.mark.parametrize(("runs", "forward"), [(1, True), (1, False), (4, False)])
def test_the_order_compiles(runs: int, forward: bool) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), before])
    command = [sys.executable, "-c", PROGRAM, str(runs), str(forward)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "st.global" in done.stdout
