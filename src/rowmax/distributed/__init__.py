"""Exact attention over a sequence that is cut across devices.

>>> from rowmax import distributed as rd
>>> layout = rd.Layout.zigzag(4096, ranks=4)
>>> layout.positions(1)[:3]
tensor([512, 513, 514])
"""

from .attention import attention
from .context import Context, checkpoint_contexts, context_parallel, current_context
from .explain import Direction, Explanation, Prediction, Roofline, Wire, explain
from .layout import Layout
from .sharding import shard, unshard
from .varlen import attention_varlen

__all__ = [
    "Context", "Direction", "Explanation", "Layout", "Prediction", "Roofline", "Wire", "attention",
    "attention_varlen", "checkpoint_contexts", "context_parallel", "current_context", "explain",
    "shard", "unshard",
]  # fmt: skip
