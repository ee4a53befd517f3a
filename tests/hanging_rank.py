"""A program of ranks that hangs for one provider, in a module that is imported quickly."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import distributed_calls
from benchmarks.ranks import Rank


def check_short(rank: Rank, cell: Any, name: str, peer: str) -> dict[str, Any]:
    if name.startswith("rowmax:heads") and rank.rank == 1:
        time.sleep(100)
    return distributed_calls.check_short(rank, cell, name, peer)
