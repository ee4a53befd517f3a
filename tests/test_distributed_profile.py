"""The functions that ``benchmarks.distributed_profile --parts`` times."""

from __future__ import annotations

from functools import reduce
from importlib import import_module

import pytest

from benchmarks.distributed_profile import PARTS


@pytest.mark.parametrize("path", PARTS)
def test_a_part_is_a_function(path: str) -> None:
    module, _, attribute = path.partition(":")
    assert callable(reduce(getattr, attribute.split("."), import_module(f"rowmax.{module}")))
