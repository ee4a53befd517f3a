"""Collectives over flat tensors of unequal lengths, for gloo and NCCL.

No sum is left to a collective: its order would differ between libraries and topologies. Summands
are copied, and added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Group

# torch 2.13 has the new name, and warns of the old one
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Return the flat tensors of all ranks, of these sizes."""
    most = max(sizes)
    if most == 0 or group.size == 1:
        return [x] * group.size
    if x.numel() < most:  # the collective needs equal sizes
        x = torch.cat((x, x.new_zeros(most - x.numel())))
    found = x.new_empty(group.size * most)
    _gather(found, x.contiguous(), group=group.process_group)
    return [part[:size] for part, size in zip(found.split(most), sizes, strict=True)]


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Return what all ranks send to this one, in the order of ranks; x is what it sends to each."""
    found = x.new_empty(sum(received))
    dist.all_to_all_single(found, x, list(received), list(sent), group=group.process_group)
    return found


def all_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks, added in their order."""
    parts = all_gather(x.flatten(), [x.numel()] * group.size, group)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.view(x.shape)


def all_objects(x: Any, group: Group) -> list[Any]:
    """Return the picklable values of all ranks."""
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, x, group=group.process_group)
    return found


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Return the tensor of rank 0 of the group."""
    found = x.clone()
    dist.broadcast(found, group=group.process_group, group_src=0)
    return found
