"""Small models on one thread: faster than two, and not slowed by what else the machine does."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Apply ``one_thread`` to every test of this folder."""
