"""Calls of cases and their references, computed once for all backends of a process."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rowmax.testing import Call, Case, Expected, cotangents, expected, make

Cotangents = tuple[Tensor, Tensor | None]


@cache
def reference(
    case: Case, dtype: torch.dtype = torch.float32, *, with_dlse: bool = True
) -> tuple[Call, Cotangents, Expected]:
    """Return the call of a case, its cotangents and its references. Tests must not change them."""
    call = make(case, dtype=dtype)
    dout, dlse = cotangents(call)
    grads = dout, dlse if with_dlse else None
    return call, grads, expected(call, *grads)
