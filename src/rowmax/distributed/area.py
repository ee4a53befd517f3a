"""The pairs that a mask allows to each query: the weights by which rows are distributed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import arguments
from ..call.blocks import Block, block_of
from ..call.inputs import Options, Tensors
from ..call.normalize import normalized
from ..call.problem import problem_of
from ..masks import Mask, as_mask
from ..rules import mask as rules
from ..rules.over_tensors import any_range

_ROWS = 512  # rows of a boolean mask that are counted together


def areas(mask: Mask | Tensor | None, nq: int, nk: int) -> Tensor:
    """Return the number of allowed pairs of each query, summed over sequences, int64 ``[Nq]``.

    Raises:
        TypeError, ValueError: a mask that does not fit a call of these lengths on the CPU.
    """
    record = as_mask(mask)
    allowed = record.allowed
    heads = allowed.shape[-3] if allowed is not None and allowed.dim() > 2 else 1
    batch = _batch(record)
    q, k = (torch.zeros(()).expand(batch, n, heads, 1) for n in (nq, nk))
    tensors, options, _ = normalized(arguments(q, k, k, mask=record))
    return _counted(tensors, options) if allowed is not None else by_ranges(tensors, options)


def _batch(mask: Mask) -> int:
    """Return the number of sequences that a mask distinguishes."""
    sizes = [t.shape[0] for t in (mask.lengths, mask.prefix) if t is not None]
    if mask.allowed is not None and mask.allowed.dim() == 4:
        sizes.append(mask.allowed.shape[0])
    for one in mask.documents:
        sizes += [t.shape[0] for t in (one.ids, one.q_ids) if t is not None and t.dim() == 2]
        sizes += [] if one.starts is None else [one.starts.shape[0]]
    return max(sizes, default=1) if 0 not in sizes else 0


def _counted(tensors: Tensors, options: Options) -> Tensor:
    """Count the pairs of a boolean mask."""
    parts = [torch.zeros(0, dtype=torch.int64)]
    for start in range(0, tensors.q.shape[1], _ROWS):
        part = block_of(tensors, options, Block(i=slice(start, start + _ROWS)))
        parts.append(rules.dense(problem_of(*part), part[0]).sum((0, 1, 3)))
    return torch.cat(parts)


def by_ranges(tensors: Tensors, options: Options) -> Tensor:
    """Return the number of pairs of each query of a call on the CPU without a boolean mask.

    Every query sees one range of keys, and of them those of its own document.
    """
    problem = problem_of(tensors, options)
    i = torch.arange(problem.nq).view(1, 1, -1, 1)
    found = any_range(i, i, *rules.band_of(problem, tensors))
    sizes = (problem.batch, 1, problem.nq, 1)
    low, high = (torch.as_tensor(x).expand(sizes)[:, 0, :, 0] for x in found)
    high = high.clamp(max=problem.nk).maximum(low)
    if tensors.q_ids is None or tensors.k_ids is None:
        return (high - low).sum(0)
    q_ids, k_ids = (t.expand(problem.batch, -1) for t in (tensors.q_ids, tensors.k_ids))
    each = [_of_document(*rows) for rows in zip(q_ids, k_ids, low, high, strict=True)]
    return torch.stack(each).sum(0) if each else torch.zeros(problem.nq, dtype=torch.int64)


def _of_document(q_ids: Tensor, k_ids: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return how many keys of each range have the id of its query."""
    # (id, position) as one number: the keys of a document are together, in their order
    step = k_ids.shape[0] + 1
    keys = (k_ids.long() * step + torch.arange(k_ids.shape[0])).sort()[0]
    first, end = (torch.searchsorted(keys, q_ids.long() * step + x) for x in (low, high))
    return end - first
