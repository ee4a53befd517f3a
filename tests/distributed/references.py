"""The definition's answers for the table of cases, each computed once for all tests."""

from __future__ import annotations

from functools import cache

import torch

from rowmax.testing import Case, Expected, cotangents, expected, make


@cache
def reference(case: Case, dtype: torch.dtype) -> Expected:
    """Return the definition's answer of a case, with its tolerances."""
    call = make(case, dtype=dtype)
    return expected(call, *cotangents(call))
