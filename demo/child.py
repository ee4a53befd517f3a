"""A child process that reports in lines of JSON and can be stopped at any time.

No compiler and no kernel can be stopped from within its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


class Child:
    """Runs ``python -m module arguments`` with as many threads and collects the printed lines."""

    def __init__(
        self, module: str, *arguments: object, on_line: Callable[[Any], None] = lambda line: None
    ) -> None:
        self.lines: list[Any] = []
        self._on_line = on_line
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=hasattr(os, "killpg"),  # its own children end with it
            env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": path},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if not text.endswith("\n"):  # the process was stopped within a line
                return
            line = json.loads(text)
            self.lines.append(line)
            self._on_line(line)

    @property
    def running(self) -> bool:
        """Return True until the process has ended and all its lines are read."""
        return self._reader.is_alive()

    def wait(self, seconds: float | None) -> bool:
        """Wait until it ends, at most that long if given; return True if it has ended."""
        self._reader.join(seconds)
        return not self.running

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if not self._errors.closed:
            self._errors.close()

    def error(self) -> str | None:
        """Wait for the end; return the text on stderr if the process failed, else None."""
        if self._process.wait() == 0:
            return None
        self._errors.seek(0)
        return self._errors.read().strip() or f"exit code {self._process.returncode}"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def read_arguments() -> Any:
    """Return the arguments of this child process."""
    return json.loads(sys.argv[1])


def report(line: Any) -> None:
    """Send a line to the parent."""
    print(json.dumps(line), flush=True)
