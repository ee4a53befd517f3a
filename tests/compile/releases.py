"""Limits of machine code by the release of triton that compiles it.

Each was measured. A later release than these is held to those of the last.
"""

from __future__ import annotations

from typing import TypeVar

import triton

T = TypeVar("T")
#: triton 3.6 comes with torch 2.11, 3.7 with torch 2.13
RELEASES = (3, 6), (3, 7), (3, 9)
RELEASE = max(r for r in RELEASES if r <= tuple(map(int, triton.__version__.split(".")[:2])))


def measured(*limits: T) -> T:
    """Return the limit of this release, of one for each of RELEASES."""
    return limits[RELEASES.index(RELEASE)]
