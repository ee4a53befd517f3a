"""The examples of two pages run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


@pytest.mark.parametrize("name", ["flash_attn", "pair_bias"])
def test_the_examples_run(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (PAGES / link).exists(), link
