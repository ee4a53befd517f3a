"""PyTorch's own attention functions, computed by rowmax.

``enable()`` replaces ``torch.nn.functional.scaled_dot_product_attention`` and
``torch.nn.attention.varlen.varlen_attn`` until ``disable()``, or within a ``with`` block.
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call the former. Calls that rowmax does
not take go to torch, unchanged; ``explain`` says which and why.

The replaced object is the attribute of the module, and not an operator of ATen, for these reasons.

- It needs no private interface. Dynamo traces the function, so a graph holds rowmax's operators,
  and it guards the attribute: ``enable()`` and ``disable()`` compile again.
- Compiled graphs of an overridden operator look like torch's own. torch's cache on disk returns
  graphs compiled without the override: tried with torch 2.13, where the override was never called.
- The fused operators of ATen, for which ``torch.nn.attention.register_flash_attention_impl`` is
  meant, take no masks, no float32 on a GPU and no gradient of a float mask.
- A Python kernel of ATen's dispatcher took 3 us a call more than a function. The checks and the
  views of a call take about 6 us, of 93 us for the smallest call (two cores of a Xeon).

The name "rowmax" is registered there nevertheless: ``activate_flash_attention_impl("rowmax")`` is
``enable()``, and ``restore_flash_attention_impl()`` takes it back.

>>> import torch, torch.nn.functional as F
>>> from rowmax.integrations import sdpa
>>> q = torch.randn(1, 4, 128, 64)
>>> with sdpa.enable():
...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
>>> sdpa.explain(q, q, q, is_causal=True).by
'rowmax'
"""

from .dense import scaled_dot_product_attention
from .route import Route, explain, explain_varlen
from .switch import Enabled, disable, enable, is_enabled
from .varlen import varlen_attn

__all__ = [
    "Enabled", "Route", "disable", "enable", "explain", "explain_varlen", "is_enabled",
    "scaled_dot_product_attention", "varlen_attn",
]  # fmt: skip
