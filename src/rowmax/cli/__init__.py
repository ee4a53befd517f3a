"""The command line. Needs the extra "cli": ``pip install "rowmax[cli]"``."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    require_libraries()
    from .app import app

    app()


def require_libraries() -> None:
    """Exit with code 2 and a line on stderr if typer or rich is missing."""
    if find_spec("typer") is None or find_spec("rich") is None:
        hint = 'pip install "rowmax[cli]", in a checkout ".[cli]"'
        message = f"rowmax: the command line needs typer and rich: {hint}"
        print(message, file=sys.stderr)
        raise SystemExit(2)
