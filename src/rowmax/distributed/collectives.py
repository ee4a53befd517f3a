"""Collectives over flat tensors of unequal lengths, for gloo and NCCL.

No sum is left to a collective: its order would differ between libraries and topologies. Summands
are copied, and added in the order of ranks.

A copy begins at once, on the stream of its group or on a thread. It runs while work that is issued
before its ``wait`` runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Group

# torch 2.13 has the new name, and warns of the old one
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Copy:
    """A copy under way. It holds the memory that is sent and received until ``wait``."""

    def __init__(self, work: Any, sent: Tensor, found: list[Tensor]) -> None:
        self._work, self._sent, self._found = work, sent, found

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks, and hold them no longer.

        On a GPU the current stream waits and the host goes on. A second call returns nothing.
        """
        work, found = self._work, self._found
        if work is not None:
            work.wait()
        self._work, self._sent, self._found = None, None, []
        return found


class Waits(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Wait for it."""


class UnderWay(list[Waits]):
    """The copies of a call. An error waits for those that have begun: none outlives the call.

    A copy that fails then has the same cause, or follows from it on another rank.
    """

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            for copy in self:
                with contextlib.suppress(RuntimeError):
                    copy.wait()


def all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Return the flat tensors of all ranks, of these sizes. A grid joins heads, then keys."""
    if not group.parts:
        return begin_all_gather(x, sizes, group).wait()
    keys, heads = group.parts
    rows = [sizes[n * heads.size :][: heads.size] for n in range(keys.size)]
    row = torch.cat(all_gather(x, rows[keys.rank], heads))
    each = all_gather(row, [sum(one) for one in rows], keys)
    return [x for one, row in zip(rows, each, strict=True) for x in row.split(one)]


def begin_all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> Copy:
    """Return the copy of the flat tensors of all ranks, of these sizes."""
    most = max(sizes)
    if most == 0 or group.size == 1:
        return Copy(None, x, [x] * group.size)
    if x.numel() < most:  # the collective needs equal sizes
        x = torch.cat((x, x.new_zeros(most - x.numel())))
    found, x = x.new_empty(group.size * most), x.contiguous()
    work = _gather(found, x, group=group.process_group, async_op=True)
    parts = [part[:size] for part, size in zip(found.split(most), sizes, strict=True)]
    return Copy(work, x, parts)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Return what all ranks send to this one, in the order of ranks; x is what it sends to each."""
    return begin_all_to_all(x, sent, received, group).wait()[0]


def begin_all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Copy:
    """Return the copy of what all ranks send to this one, one tensor."""
    found = x.new_empty(sum(received))
    work = dist.all_to_all_single(
        found, x, list(received), list(sent), group=group.process_group, async_op=True
    )
    return Copy(work, x, [found])


def all_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks, added in their order."""
    parts = all_gather(x.flatten(), [x.numel()] * group.size, group)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.view(x.shape)


def all_objects(x: Any, group: Group) -> list[Any]:
    """Return the picklable values of all ranks."""
    if group.parts:
        keys, heads = group.parts
        return [one for row in all_objects(all_objects(x, heads), keys) for one in row]
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, x, group=group.process_group)
    return found


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Return the tensor of rank 0 of the group."""
    if group.parts:
        keys, heads = group.parts
        return broadcast(broadcast(x, keys), heads)
    found = x.clone()
    dist.broadcast(found, group=group.process_group, group_src=0)
    return found
