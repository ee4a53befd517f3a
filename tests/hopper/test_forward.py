"""The Hopper forward is right on the emulator, in a process of its own: that replaces triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("share", range(3))
def test_every_case_is_right(share: int) -> None:
    """Shares keep the time of a test within its limit on loaded machines."""
    done = run("tests.hopper.forward_model", "--shares=3", f"--share={share}")
    wrong = [line for line in done.stdout.splitlines() if re.search(r"seed \d+: ", line)]
    assert done.returncode == 0, "\n".join(wrong) or done.stderr[-2000:]
    counts = re.search(r"(\d+) right, 0 wrong", done.stdout)
    assert counts is not None
    assert int(counts[1]) > 50


def test_a_reference_that_lags_is_right() -> None:
    done = run("tests.hopper.lagging_model")
    assert done.returncode == 0, done.stdout[-2000:] or done.stderr[-2000:]
    counts = re.search(r"(\d+) right, 0 wrong, (\d+) rows overflowed", done.stdout)
    assert counts is not None
    assert int(counts[1]) > 60
    assert int(counts[2]) > 1000


def test_overflowed_rows_need_the_second_launch() -> None:
    done = run("tests.hopper.lagging_model", "--unmended", "--only", "parts")
    assert done.returncode == 1
    assert re.search(r"parts steps of 200: wrong lse: .* are NaN", done.stdout)
