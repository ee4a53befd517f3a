"""Progress of a command: a live line on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.status import Status

INTERVAL = 10.0  # seconds between plain lines


class Progress:
    """Shows the latest text: what is done and what comes next.

    A thread prints the plain lines, because one step may take longer than the interval.
    """

    def __init__(
        self,
        console: Console,
        text: str,
        elapsed: Callable[[], float] | None = None,
        interval: float = INTERVAL,
    ) -> None:
        """Begin plain lines with the seconds that ``elapsed`` returns, by default since now."""
        start = time.monotonic()
        self._console, self._text, self._interval = console, text, interval
        self._elapsed = elapsed or (lambda: time.monotonic() - start)
        self._live: Status | None = None
        if console.is_terminal:
            self._live = console.status(escape(text), spinner="line")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        else:
            self._print()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        else:
            self._thread.join()

    def show(self, text: str) -> None:
        """Replace the text."""
        self._text = text
        if self._live is not None:
            self._live.update(escape(text))

    def _repeat(self) -> None:
        while not self._ended.wait(self._interval):
            self._print()

    def _print(self) -> None:
        line = f"{self._elapsed():4.0f} s  {self._text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
