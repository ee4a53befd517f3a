"""Small models on one thread, and the definition of each feature computed once.

One thread is faster than two here, and not slowed by what else the machine does.
"""

from __future__ import annotations

import pytest

from rowmax.cli import checks
from tests import kept_definitions


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Apply ``one_thread`` to every test of this folder."""


@pytest.fixture(autouse=True)
def _definitions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the definition of a feature for later tests: half of the time of a check."""
    monkeypatch.setattr(checks, "check_feature", kept_definitions.check_feature)
