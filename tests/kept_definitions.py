"""The definition of each feature of ``rowmax check``, computed once for all tests of a process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from rowmax.cli import checks
from rowmax.cli.features import Feature

_JUDGES: dict[tuple[Feature, torch.device, int], checks.Judge] = {}
_check_feature, _judge = checks.check_feature, checks.Judge


def check_feature(
    feature: Feature, device: torch.device, names: Any, seed: int
) -> dict[str, checks.Result]:
    """Return the results as ``checks.check_feature``: half of its time is the definition.

    A feature, a device and a seed give the same tensors each time.
    """
    key = feature, device, seed

    def kept(*call: Any) -> checks.Judge:
        if key not in _JUDGES:
            _JUDGES[key] = _judge(*call)
        return _JUDGES[key]

    with mock.patch.object(checks, "Judge", kept):
        return _check_feature(feature, device, names, seed)
