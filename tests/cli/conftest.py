"""Small models on one thread, and the definition of each feature computed once.

One thread is faster than two here, and not slowed by what else the machine does.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from rowmax.cli import checks

_JUDGES: dict[Any, checks.Judge] = {}


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Apply ``one_thread`` to every test of this folder."""


@pytest.fixture(autouse=True)
def _definitions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the definition of a feature for later tests: half of the time of a check.

    A feature, a device and a seed give the same tensors each time.
    """
    check, judge = checks.check_feature, checks.Judge

    def check_feature(feature: Any, device: Any, names: Any, seed: int) -> Any:
        def kept(*call: Any) -> checks.Judge:
            key = feature, device, seed
            if key not in _JUDGES:
                _JUDGES[key] = judge(*call)
            return _JUDGES[key]

        with mock.patch.object(checks, "Judge", kept):
            return check(feature, device, names, seed)

    monkeypatch.setattr(checks, "check_feature", check_feature)
