"""Offsets of packed sequences that the host knows: plans of rows and copies are made from them.

Values on the CPU are free to read. Those of a GPU are read once for each tensor, which waits for
it. Later calls compare the tensor with a copy on the GPU, and nothing waits.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules.mask import ids_of_offsets
from ..torch_compat import assert_later, has_values, moved
from .streams import OnStream

Offsets = tuple[int, ...]


class _Known(NamedTuple):
    """The offsets that were read from a tensor on a GPU."""

    tensor: weakref.ref[Tensor]
    version: int
    values: Offsets
    copy: Tensor | None  # None: a tensor of ``on_device``, which nothing else writes


_known: dict[int, _Known] = {}
_checks: dict[torch.device, torch.cuda.Stream] = {}


def offsets_of(cu: Tensor) -> Offsets | None:
    """Return the values of offsets, or None where the host must not read them.

    That is while a call is traced or captured. Values that change without torch's knowledge, such
    as those that a graph of CUDA writes, raise on the device.
    """
    if not has_values(cu) or cu.is_meta or captured():
        return None
    if cu.device.type == "cpu":
        return tuple(cu.tolist())
    if cu.is_inference():
        return None
    found = _known.get(id(cu))
    if found is not None and found.tensor() is cu and found.version == cu._version:
        if found.copy is not None:
            _check_unchanged(cu, found.copy)
        return found.values
    values = tuple(cu.tolist())
    _remember(cu, values, cu.clone())
    return values


def _check_unchanged(cu: Tensor, copy: Tensor) -> None:
    """Compare offsets on a GPU with their copy, in a stream that no call waits for."""
    message = "cu_seqlens: values changed in place, unseen by torch; want a new tensor"
    stream = _checks.get(cu.device)
    if stream is None:
        stream = _checks[cu.device] = torch.cuda.Stream(cu.device)
    stream.wait_stream(torch.cuda.current_stream(cu.device.index))
    with OnStream(stream):
        assert_later((cu == copy).all(), message)
    for t in (cu, copy):  # no memory of theirs is given away before
        t.record_stream(stream)


def _remember(cu: Tensor, values: Offsets, copy: Tensor | None) -> None:
    key = id(cu)
    there = weakref.ref(cu, lambda _: _known.pop(key, None))
    _known[key] = _Known(there, cu._version, values, copy)


def captured() -> bool:
    """Return True while a CUDA graph is captured: it may outlive every table that is kept here."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=32)
def on_device(values: Offsets, device: torch.device) -> Tensor:
    """Return offsets as int32 on a device, without waiting for it."""
    with torch.inference_mode(False):
        cu = moved(torch.tensor(values, dtype=torch.int32), device)
    _remember(cu, values, None)
    return cu


@lru_cache(maxsize=64)
def text_of(values: Offsets) -> str:
    """Return offsets as operators carry them."""
    return ",".join(map(str, values))


@lru_cache(maxsize=64)
def parsed(text: str) -> Offsets:
    """Return the offsets of a text."""
    return tuple(map(int, text.split(",")))


@lru_cache(maxsize=16)
def ids_on(text: str, n: int, device: torch.device) -> Tensor:
    """Return the document of each of n positions, int32 ``[1, n]``."""
    with torch.inference_mode(False):
        return ids_of_offsets(on_device(parsed(text), device), n)
