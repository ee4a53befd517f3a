"""Packed sequences: documents of one long sequence, whose rows are distributed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..call.check import number
from ..errors import bad, check_integers, wrong_type
from ..masks import Causal, Documents, Mask, as_mask
from ..rules.mask import ids_of_offsets
from .agreement import refuse_together
from .attention import attention
from .groups import group_of
from .layout import Layout
from .offsets import Offsets, captured, offsets_of, on_device

_DENSE = "attention of [1, n, H, D] with mask=Documents(cu_seqlens=...)"


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup | None = None,
    layout: Layout,
    k_layout: Layout | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within packed sequences whose rows are distributed over ranks.

    The call is ``attention`` of one sequence with ``Documents``; ranks need not hold whole
    sequences.

    Args:
        q: own rows ``[n, Hq, D]``; k and v likewise.
        cu_seqlens_q: ``[S + 1]``, where each sequence's queries start among those of all ranks:
            0 first, never falling, ``layout.n`` last. Equal on all ranks.
            On a GPU a tensor is read once, which waits for it; on the CPU nothing waits.
        cu_seqlens_k: the same for keys. Under causal, a window or ALiBi, which align each sequence
            to its own keys, the same tensor or equal values.
        mask: None, ``Causal`` or a window.
        options: those of ``attention``, except bias and dropout.

    Returns:
        out ``[n, Hq, Dv]`` of own rows, or (out, lse ``[Hq, n]``).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    group = group_of(mesh)
    try:
        for name, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor) or t.dim() != 3:
                got = f"shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
                raise bad(name, got, "a 3-D tensor [n, H, D] of own rows")
        _refuse(options)
        pairs = _band(mask, causal)
        placed = options.get("alibi") is not None
        both = _documents(cu_seqlens_q, cu_seqlens_k, layout, pairs, placed, q.device)
    except (TypeError, ValueError) as error:
        refuse_together(group, error)
    out, lse = attention(
        *(t[None] for t in (q, k, v)), mesh=mesh, layout=layout, k_layout=k_layout,
        mask=both, return_lse=True, **options,
    )  # fmt: skip
    # a view: the derivative of a selection is a copy among zeros
    out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _refuse(options: dict[str, Any]) -> None:
    """Raise for the options that count sequences, and positions within them."""
    if options.get("bias") is not None:
        raise bad("bias", "a tensor, with packed sequences", f"None, or {_DENSE}")
    p = number("dropout_p", options.get("dropout_p", 0.0))
    if p:  # counters of one device are (sequence, position within it)
        raise bad("dropout_p", f"{p}, with packed sequences", f"0, or {_DENSE}")


def _band(mask: Any, causal: bool) -> Mask:
    if mask is None and isinstance(causal, bool):
        return _CAUSAL if causal else _FULL
    given = as_mask(mask)
    others = (given.documents or None, given.lengths, given.prefix, given.allowed)
    if any(x is not None for x in others):
        raise bad("mask", repr(mask), f"None, Causal() or a Window, or {_DENSE}")
    if not isinstance(causal, bool):
        raise wrong_type("causal", repr(causal), "True or False")
    return given & Causal() if causal else given


_FULL, _CAUSAL = Mask(), Causal() & Mask()


@lru_cache(maxsize=64)
def _known_documents(
    values: Offsets, device: torch.device, left: int | None, right: int | None
) -> Mask:
    """Return the mask of packed sequences within a band, of offsets that the host knows."""
    return Mask(left, right) & Documents(cu_seqlens=on_device(values, device))


def _documents(
    cu_q: Tensor, cu_k: Tensor, layout: Any, pairs: Mask, placed: bool, device: torch.device
) -> Mask:
    """Return the mask of packed sequences within a band; ``placed``: distances are read."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_integers(name, cu, (1,))
    if cu_q.shape != cu_k.shape:
        want = f"as many offsets as cu_seqlens_q, {cu_q.shape[0]}"
        raise bad("cu_seqlens_k", f"{cu_k.shape[0]} offsets", want)
    if not isinstance(layout, Layout):
        raise wrong_type("layout", type(layout).__name__, "a Layout")
    if cu_q.shape[0] == 1:  # a mask has one document at least: here one without rows
        cu_k, cu_q = (torch.cat([cu, cu]) for cu in (cu_k, cu_q))
    values_q = offsets_of(cu_q)
    values_k = values_q if cu_k is cu_q else offsets_of(cu_k)
    if values_q and values_q[-1] != layout.n:
        want = f"the rows of all ranks, {layout.n}"
        raise bad("cu_seqlens_q", f"last offset {values_q[-1]}", want)
    if values_q is not None and values_q == values_k:
        return _known_documents(values_q, device, pairs.left, pairs.right)
    if values_q is not None and values_k is not None:
        cu_q, cu_k = (on_device(values, device) for values in (values_q, values_k))
        same = False
    else:
        same = cu_q is cu_k
        for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            if cu.device != device and captured():
                got = f"a tensor on {cu.device} while a CUDA graph is captured"
                raise bad(name, got, f"one on {device}, as q is")
        cu_q, cu_k = cu_q.to(device), cu_k.to(device)
        same = same or (not torch.compiler.is_compiling() and torch.equal(cu_q, cu_k))
    if same:
        return pairs & Documents(cu_seqlens=cu_k)
    if placed or pairs.left is not None or pairs.right is not None:
        want = (
            "those of cu_seqlens_q (while compiling, the same tensor): causal, windows and alibi "
            "align each sequence to its own keys"
        )
        raise bad("cu_seqlens_k", "other offsets", want)
    checked = Documents(cu_seqlens=cu_q).documents[0].cu_seqlens
    assert checked is not None
    return pairs & Documents(cu_seqlens=cu_k, q_ids=ids_of_offsets(checked, layout.n)[0])
