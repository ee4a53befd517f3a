"""The calls of a rank on two streams, so that no multiprocessor waits for the last tiles of one.

A kernel has a block for each multiprocessor, and its blocks end at different times. Where one has
ended, a block of the next call begins. ``pulls.gains_by_two_streams`` says which calls gain.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .streams import OnStream


class Abreast:
    """Streams of some calls: the current one for the first, ``second`` for the others, if given.

    The second waits for what the current stream has at the beginning. At the end the current one
    waits for the second.
    """

    def __init__(self, second: torch.cuda.Stream | None) -> None:
        self._second, self._calls = second, 0

    def __enter__(self) -> Abreast:
        if self._second is not None:
            self._current = torch.cuda.current_stream(self._second.device)
            self._second.wait_stream(self._current)
        return self

    def call(self) -> AbstractContextManager[object]:
        """Return the context of the next call."""
        self._calls += 1
        if self._second is None or self._calls == 1:
            return nullcontext()
        return OnStream(self._second)

    def __exit__(self, *error: Any) -> None:
        if self._second is not None:
            self._current.wait_stream(self._second)
