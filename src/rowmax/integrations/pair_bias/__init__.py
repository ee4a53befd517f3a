"""Attention with a pair bias, as structure models train it, with others' signatures.

``triangle_attention``, ``attention_pair_bias`` and ``mask_to_kv_lengths`` have the signatures of
cuequivariance_torch, ``DS4Sci_EvoformerAttention`` that of deepspeed.ops.deepspeed4science. The
gradient of a bias that all rows share is summed in the kernel: no tensor has a score of each row.
``docs/integrations/pair_bias.md`` lists the differences.

>>> import torch
>>> from rowmax.integrations.pair_bias import triangle_attention
>>> q, k, v = (torch.randn(1, 6, 2, 6, 16) for _ in range(3))  # [B, N, H, S, D]
>>> bias = torch.randn(1, 1, 2, 6, 6, requires_grad=True)
>>> triangle_attention(q, k, v, bias).shape
torch.Size([1, 6, 2, 6, 16])
"""

from .evoformer import DS4Sci_EvoformerAttention
from .single import attention_pair_bias
from .triangle import mask_to_kv_lengths, triangle_attention

__all__ = [
    "DS4Sci_EvoformerAttention", "attention_pair_bias", "mask_to_kv_lengths", "triangle_attention",
]  # fmt: skip
