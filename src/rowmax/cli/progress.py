"""Progress of the demo: a live line on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from .clock import Clock

EVERY = 10.0  # seconds between plain lines


class Progress:
    """Shows the latest text of ``say``: what is done and what comes.

    Plain lines come from a thread of their own, because one step may take longer than the
    interval.
    """

    def __init__(
        self, console: Console, clock: Clock, text: str, every: float | None = None
    ) -> None:
        self.console, self.clock, self.text = console, clock, text
        self.every = EVERY if every is None else every
        self.live: Status | None = None
        if console.is_terminal:
            self.live = console.status(escape(text), spinner="line")
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        else:
            self._print()
            self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        if self.live is not None:
            self.live.stop()
        else:
            self.thread.join()

    def say(self, text: str) -> None:
        self.text = text
        if self.live is not None:
            self.live.update(escape(text))

    def _repeat(self) -> None:
        while not self.ended.wait(self.every):
            self._print()

    def _print(self) -> None:
        line = f"{self.clock.elapsed:4.0f} s  {self.text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
