"""The kernel that copies rows compiles to wide accesses, without a device."""

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
from rowmax.distributed.row_places import RowPlaces
from rowmax.gpu import row_copies

heads, d, by_heads = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
dtype = getattr(torch, sys.argv[4])
k = torch.empty(1, 4096, heads, d, dtype=dtype)
sizes = (1, heads, d), (1, heads, d)
places = RowPlaces(sizes, 4096, by_heads)
flat = torch.empty(4096 * places.width, dtype=dtype)
found = []
row_copies.Launch.public = lambda self, t: found.append((self, t))
row_copies.copy_rows(k, k, flat, places.distances, ((0, 1, 4000),))
((launch, t),) = found
made = launch.compile(*launch.arguments(t), target=GPUTarget("cuda", 90, 32))
print(made.asm["ptx"])
"""


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize(("heads", "d"), [(8, 128), (3, 64), (1, 8), (5, 96)])
def test_rows_are_copied_16_bytes_at_a_time(heads: int, d: int, by_heads: bool) -> None:
    stores = stores_of(heads, d, by_heads, "bfloat16")
    assert all("st.global.v4.b32" in line for line in stores), stores


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_of_every_dtype_are_copied(dtype: str) -> None:
    stores_of(3, 24, True, dtype)


def stores_of(heads: int, d: int, by_heads: bool, dtype: str) -> list[str]:
    """Return the lines of the compiled kernel that store."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), before])
    command = [sys.executable, "-c", PROGRAM, str(heads), str(d), str(by_heads), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stores = [line for line in done.stdout.splitlines() if "st.global" in line]
    assert stores
    return stores
