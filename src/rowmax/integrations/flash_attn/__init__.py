"""The functions of flash-attn 2 (interface of 2.8), computed by rowmax on any device.

    import rowmax.integrations.flash_attn as flash_attn

``install()`` makes ``import flash_attn`` in other code find this module.
``docs/integrations/flash_attn.md`` lists what is honoured and what raises.

>>> import torch
>>> import rowmax.integrations.flash_attn as flash_attn
>>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
>>> flash_attn.flash_attn_func(q, k, v, causal=True).shape
torch.Size([1, 8, 2, 16])
"""

from __future__ import annotations

import sys

from . import bert_padding
from .functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "bert_padding", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "install",
]  # fmt: skip

#: the release of flash-attn with this interface; other code compares versions
__version__ = "2.8.4"


def install() -> None:
    """Make ``import flash_attn`` find this module, in the whole process.

    Call it before the first import of code that imports flash_attn. It provides the modules
    ``flash_attn``, ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding``.

    Raises:
        RuntimeError: another flash_attn is imported already.
    """
    this = sys.modules[__name__]
    found = sys.modules.get("flash_attn")
    if found is not None and found is not this:
        where = getattr(found, "__file__", None)
        raise RuntimeError(
            f"install(): flash_attn is imported already, from {where}; want install() before the "
            "first import of flash_attn"
        )
    sys.modules["flash_attn"] = this
    sys.modules["flash_attn.flash_attn_interface"] = this
    sys.modules["flash_attn.bert_padding"] = bert_padding
