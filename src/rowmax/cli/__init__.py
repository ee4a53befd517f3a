"""The command line. Needs the extra "cli": ``pip install "rowmax[cli]"``."""

from __future__ import annotations

import sys
import time


def main() -> None:
    """Run the command that ``sys.argv`` asks for."""
    try:
        from .app import app
        from .clock import age
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        message = 'rowmax: the command line needs typer and rich: pip install "rowmax[cli]"'
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    app(obj=time.monotonic() - age())
