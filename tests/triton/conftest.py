"""Make the interpreter of these tests faster."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET"):
    from tests.interpreter import speed_up

    speed_up()
