"""The Hopper forward is right on the emulator, in a process of its own: that replaces triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_every_case_is_right() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hopper.forward_model"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    wrong = [line for line in done.stdout.splitlines() if " seed " in line]
    assert done.returncode == 0, "\n".join(wrong) or done.stderr[-2000:]
    counts = re.search(r"(\d+) right, 0 wrong", done.stdout)
    assert counts is not None
    assert int(counts[1]) > 100
