"""Import the model of the backward under Triton's interpreter, for forks of a process."""

import os

os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")

from . import backward_model  # noqa: F401
