"""Keep what programs print of their versions, so that no process starts for it."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from .folder import cache_folder, read, write

_lock = threading.Lock()


def version_text(path: str, **options: Any) -> bytes:
    """Return the output of ``path --version``, with the options of ``subprocess.check_output``.

    A process takes 6 ms, and Triton and rowmax start five for ptxas in a first call. A file in
    ``ROWMAX_CACHE`` holds the outputs, each with the size and the time of the program.

    Raises:
        OSError: nothing runs there.
        subprocess.CalledProcessError: the program failed.
    """
    stamp = _stamp(path)
    name = f"{path} {sorted(options.items())}"
    with _lock:
        folder = None if stamp is None else _folder()
        if folder is None:
            return subprocess.check_output([path, "--version"], **options)
        file = folder / "versions.json"
        kept = read(file)
        with suppress(TypeError, KeyError, ValueError, AttributeError):
            if kept[name]["stamp"] == stamp:
                return kept[name]["output"].encode("utf-8", "surrogateescape")
        output = subprocess.check_output([path, "--version"], **options)
        if _stamp(path) == stamp:
            entry = {"stamp": stamp, "output": output.decode("utf-8", "surrogateescape")}
            with suppress(OSError):
                write(file, kept | {name: entry})
        return output


def _stamp(path: str) -> list[int] | None:
    """Return the size and the time of a program; None for a script, which may start any other."""
    if not os.path.isabs(path):
        return None
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return None
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _folder() -> Path | None:
    try:
        return cache_folder()
    except RuntimeError:  # this user has no home
        return None
