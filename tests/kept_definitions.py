"""The definition of each feature of ``rowmax check``, computed once for all tests of a process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from rowmax.cli import checks
from rowmax.cli.features import Feature
from rowmax.testing import Expected

_EXPECTED: dict[tuple[Feature, torch.device, int], Expected] = {}
_check_feature, _expected = checks.check_feature, checks.expected


def check_feature(
    feature: Feature, device: torch.device, names: Any, seed: int
) -> dict[str, checks.Result]:
    """Return the results as ``checks.check_feature``: half of its time is the definition.

    A feature, a device and a seed give the same tensors each time.
    """
    key = feature, device, seed

    def kept(*call: Any) -> Expected:
        if key not in _EXPECTED:
            _EXPECTED[key] = _expected(*call)
        return _EXPECTED[key]

    with mock.patch.object(checks, "expected", kept):
        return _check_feature(feature, device, names, seed)
