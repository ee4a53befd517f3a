"""Run the Hopper kernels without a GPU, as Python over numpy: see README.md in this folder."""

from .host import TensorDescriptor, run
from .language import install
from .threads import Stuck

__all__ = ["Stuck", "TensorDescriptor", "install", "run"]
