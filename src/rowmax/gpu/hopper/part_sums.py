"""The sum of the parts of a gradient that several blocks make, or of two such gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def sum_parts(t, n, BLOCK: tl.constexpr):
    """Store the sum of parts, added in their order; program 1 of axis 1 has the second gradient."""
    gdc_wait()
    parts, total, size = t.parts, t.total, n.size
    if t.other_parts is not None:
        second = tl.program_id(1) == 1
        if second:
            parts, total, size = t.other_parts, t.other_total, n.other_size
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    place = parts + i
    for _ in range(n.parts):
        x += tl.load(place, mask=i < size, other=0.0)
        place += size
    tl.store(total + i, x.to(total.dtype.element_ty), mask=i < size)
