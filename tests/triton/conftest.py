"""Triton's interpreter: it must be switched on before the kernels are imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
