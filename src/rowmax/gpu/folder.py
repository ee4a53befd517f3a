"""The folder of what rowmax keeps from process to process."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$ROWMAX_CACHE``, else rowmax's folder in the user's cache directory.

    Raises:
        RuntimeError: this user has no home.
    """
    given, home = os.environ.get("ROWMAX_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path(home or Path.home() / ".cache") / "rowmax"


def write(path: Path, text: str) -> None:
    """Write a file at once: another process reads the old text or the new. Errors are ignored."""
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)
    except OSError:  # a folder that cannot be written, or a full disk
        with suppress(OSError):
            part.unlink()
