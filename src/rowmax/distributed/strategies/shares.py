"""The gradients of inputs that all ranks hold: shares, or sums over ranks."""

from __future__ import annotations

from torch import Tensor

from ..calls import ShardedCall
from ..collectives import all_sum

Optional = Tensor | None


def reduced(
    call: ShardedCall, bias: Optional, sink: Optional, heads: Optional
) -> tuple[Optional, Optional, Optional]:
    """Return this rank's shares, or their sums with ``reduce_replicated``.

    The gradient of bias has its dtype, except that of a call whose gradients are parts.
    """
    if call.place.reduce_replicated:
        if bias is not None and call.bias_rows == "one":
            bias = all_sum(bias, call.group)
        sink, heads = (None if t is None else all_sum(t, call.group) for t in (sink, heads))
    given = call.tensors.bias
    if bias is not None and given is not None and not call.wide:
        bias = bias.to(given.dtype)
    return bias, sink, heads
