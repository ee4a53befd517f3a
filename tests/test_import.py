"""``import rowmax`` adds little time to ``import torch``, and no optional library."""

from __future__ import annotations

import json
import subprocess
import sys

ALLOWED = 0.3  # seconds
OPTIONAL = ("triton", "numba", "numpy", "rich", "typer", "click", "matplotlib", "transformers")

_TIMED = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import rowmax
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def _child(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_import_adds_little_to_that_of_torch():
    seconds, loaded = [], []
    for _ in range(4):  # the best of a few: other work on the machine only adds
        taken, loaded = json.loads(_child(_TIMED))
        seconds.append(taken)
        if taken < ALLOWED:
            break
    assert min(seconds) < ALLOWED
    tops = {name.partition(".")[0] for name in loaded}
    assert sorted(tops & set(OPTIONAL)) == []


def test_import_is_silent():
    command = [sys.executable, "-W", "error", "-c", "import rowmax"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == ""
    assert done.stderr == ""


def test_the_public_names_are_all_there():
    import rowmax

    assert sorted(rowmax.__all__) == rowmax.__all__
    for name in rowmax.__all__:
        assert getattr(rowmax, name).__doc__, f"{name} has no docstring"
