"""Run ``python -m demo``."""

import time

from rowmax.cli import require_libraries

from .clock import process_age

if __name__ == "__main__":
    require_libraries()
    from .app import app

    app(obj=time.monotonic() - process_age())
