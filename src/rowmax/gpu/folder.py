"""The folder of what rowmax keeps from process to process."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return ``$ROWMAX_CACHE``, else rowmax's folder in the user's cache directory.

    Raises:
        RuntimeError: this user has no home.
    """
    given, home = os.environ.get("ROWMAX_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path(home or Path.home() / ".cache") / "rowmax"


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing if it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: Path, values: dict[str, Any], indent: int | None = None) -> None:
    """Write a file at once: another process reads the old values or the new.

    Raises:
        OSError: a folder that cannot be written, or a full disk.
    """
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(values, indent=indent, sort_keys=indent is not None))
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
