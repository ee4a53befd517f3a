"""rowmax: exact attention for PyTorch, tile by tile, with every derivative."""

from .attention import attention, attention_varlen
from .block_masks import from_block_mask
from .explain import Explanation, explain
from .masks import (
    Causal,
    Dilated,
    Documents,
    KeyPadding,
    LeftPadding,
    Mask,
    Prefix,
    PrefixLengths,
    Window,
)
from .operators.primitives import logsumexp, softmax
from .reference.online import merge
from .warmup import Warmup, warmup

__version__ = "0.1.0"

__all__ = [
    "Causal", "Dilated", "Documents", "Explanation", "KeyPadding", "LeftPadding", "Mask", "Prefix",
    "PrefixLengths", "Warmup", "Window", "attention", "attention_varlen", "explain",
    "from_block_mask", "logsumexp", "merge", "softmax", "warmup",
]  # fmt: skip
