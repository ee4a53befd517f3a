"""Keep kernels that tests compile in another way, for other processors say, from run to run.

They are compiled again when the text of the kernels, or of the program that compiles them, changes.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest


def kept_folder(config: pytest.Config, name: str, *texts: str) -> Path | None:
    """Return a folder of pytest's cache, emptied if a text has changed; None without a cache."""
    from rowmax.cpu.kernel import _fingerprint

    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return None
    folder = config.cache.mkdir(f"kernels-{name}")  # pyright: ignore
    key = hashlib.sha256("\0".join((_fingerprint(), *texts)).encode()).hexdigest()
    stamp = folder / "key.txt"
    if not stamp.exists() or stamp.read_text() != key:
        shutil.rmtree(folder)
        folder.mkdir()
        stamp.write_text(key)
    return folder
