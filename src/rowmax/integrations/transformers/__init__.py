"""``attn_implementation="rowmax"`` for transformers: importing this module registers it.

>>> import rowmax.integrations.transformers
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=16)
>>> config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="rowmax")
>>> LlamaForCausalLM(config).config._attn_implementation
'rowmax'
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    if error.name != "transformers":  # one that transformers itself needs
        raise
    raise ImportError(
        "rowmax.integrations.transformers: transformers 5.17 or newer is not installed; "
        'pip install "rowmax[hf]", in a checkout ".[hf]"'
    ) from error

from .attention import attention_forward
from .masks import MaskValue, attention_mask, skip_full_masks

__all__ = ["NAME", "MaskValue", "attention_forward", "attention_mask", "skip_full_masks"]

#: the value of ``attn_implementation``. "flash" in it would change what transformers passes.
NAME = "rowmax"

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
