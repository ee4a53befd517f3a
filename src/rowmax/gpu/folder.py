"""The folder of what rowmax keeps from process to process."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$ROWMAX_CACHE``, else rowmax's folder in the user's cache directory.

    Raises:
        RuntimeError: this user has no home.
    """
    given, home = os.environ.get("ROWMAX_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path(home or Path.home() / ".cache") / "rowmax"
