"""The Hopper backward without a GPU: its kernels on a machine made of threads and numpy.

In processes of their own, since the machine takes the place of Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels():
    pytest.importorskip("numpy")
    run("tests.hopper.backward_model")


def test_turns():
    pytest.importorskip("numpy")
    run("tests.hopper.turns_model")


@pytest.mark.skipif(
    find_spec("triton") is None or sys.platform != "linux", reason="needs triton, on Linux"
)
def test_host_and_kernels():
    pytest.importorskip("numpy")
    for only in ("first-64", "first-lengths", "empty-batch"):
        run("tests.hopper.whole", "--only", only, TRITON_INTERPRET="1")
