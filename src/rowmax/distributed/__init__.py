"""Exact attention over a sequence that is cut across devices."""

from .attention import attention
from .layout import Layout
from .sharding import shard, unshard

__all__ = ["Layout", "attention", "shard", "unshard"]
