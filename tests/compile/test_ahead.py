"""Kernels that threads compile: once each, and to their end when the process ends."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

KERNELS = ["backward", "finish", "prepare"]


def compiled(how: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return (kernel, thread, how it came) of each compile of a process that ends well."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("ROWMAX_CACHE", str(cache))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-m", "tests.compile.ahead", how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    # triton 3.9 names instances that its bindings leak, with and without threads
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return sorted(line.split() for line in done.stdout.splitlines())


def test_a_call_waits_and_compiles_nothing_twice(tmp_path, monkeypatch):
    found = compiled("needed", tmp_path, monkeypatch)
    assert found == [[name, "rowmax-compile", "compiled"] for name in KERNELS]


def test_a_process_ends_well_while_threads_compile(tmp_path, monkeypatch):
    first = compiled("exit", tmp_path, monkeypatch)
    assert ["backward", "rowmax-compile", "compiled"] in first
    second = compiled("needed", tmp_path, monkeypatch)
    assert ["backward", "rowmax-compile", "found"] in second  # in the cache
