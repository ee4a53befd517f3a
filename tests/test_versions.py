"""The output of a program that names its version is kept from process to process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rowmax.gpu import versions
from rowmax.gpu.versions import version_text

TEXT = f"Python {sys.version.split()[0]}\n".encode()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return the commands of processes that start; the cache is an empty folder."""
    found: list[Any] = []
    real = subprocess.check_output

    def check_output(command: Any, **options: Any) -> Any:
        found.append(command)
        return real(command, **options)

    monkeypatch.setattr(versions.subprocess, "check_output", check_output)
    monkeypatch.setenv("ROWMAX_CACHE", str(tmp_path / "cache"))
    return found


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Return a link to a program."""
    path = tmp_path / "program"
    path.symlink_to(Path(sys.executable).resolve())
    return str(path)


def test_a_program_starts_once(started: list[Any], program: str) -> None:
    assert [version_text(program) for _ in range(3)] == [TEXT] * 3
    assert started == [[program, "--version"]]
    version_text(program, stderr=subprocess.STDOUT)  # another output
    assert len(started) == 2
    version_text(program)
    assert len(started) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="programs have another form")
def test_a_new_program_starts_again(started: list[Any], program: str) -> None:
    version_text(program)
    os.unlink(program)
    other = shutil.which("bash") or shutil.which("gcc")
    assert other is not None
    os.symlink(os.path.realpath(other), program)
    assert version_text(program) != TEXT
    assert len(started) == 2


def test_a_script_starts_every_time(started: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho one\n")
    script.chmod(0o755)
    assert version_text(str(script)) == version_text(str(script)) == b"one\n"
    assert len(started) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "\x00"])
def test_a_broken_file_is_written_again(
    text: str, started: list[Any], program: str, tmp_path: Path
) -> None:
    version_text(program)
    file = tmp_path / "cache" / "versions.json"
    file.write_text(text)
    assert version_text(program) == version_text(program) == TEXT
    assert len(started) == 2


def test_a_cache_that_cannot_be_written(
    started: list[Any], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    assert version_text(program) == TEXT
    monkeypatch.delenv("ROWMAX_CACHE")

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(versions, "cache_folder", no_home)
    assert version_text(program) == TEXT
    assert len(started) == 2


def test_a_program_that_is_missing_is_an_error(started: list[Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        version_text(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        version_text("no-such-program-of-rowmax")
