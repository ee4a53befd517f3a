"""The example of the emulator's page runs, and shows what a missing wait does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

PAGE = Path(__file__).with_name("README.md")
WAIT = "    mbarrier.wait(full, 0)\n"


def run(text: str) -> str:
    """Return what Python prints of a text, in a process of its own: it replaces triton."""
    root = PAGE.parents[2]
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=root, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert run(example) == "tensor([64., 64.])\n"
    without_wait = example.replace(WAIT, "")
    assert without_wait != example
    again = "\nwhile not out.isnan().any():\n    " + example.splitlines()[-2]
    assert "nan" in run(without_wait.replace("\nprint", f"{again}\nprint"))
