"""The cache of plans. A plan holds tables on the device, which its launches read."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from . import compat


class Plans(OrderedDict[Any, Any]):
    """Plans by key, in the order of their last use. Past ``most`` the oldest are dropped.

    None is dropped while a CUDA graph is alive, for a replay reads the tables of its plans. A
    search for graphs takes tens of milliseconds, so a half is dropped at once. While there are
    graphs the next search waits until there are twice as many plans.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._look_at = most

    def keep(self, key: Any, plan: Any) -> None:
        self[key] = plan
        if len(self) <= self._look_at:
            return
        if compat.graphs_exist():
            self._look_at = 2 * len(self)
            return
        self._look_at = self.most
        while len(self) > self.most // 2:
            self.popitem(last=False)
