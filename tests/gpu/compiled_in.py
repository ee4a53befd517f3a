"""What GPU kernels are compiled for, of a case: two cases of the same are served by the same
kernels. Computed from the case alone, so that calls can be drawn that compile nothing new."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from rowmax.problem import Problem
from rowmax.triton import tiles as plain
from rowmax.triton.backward import bias_sum
from rowmax.triton.bundles import folded
from rowmax.triton.maps import listed
from tests.cases import Case
from tests.drawn import problem_of

#: where there is no GPU to ask
H200 = plain.Limits("NVIDIA H200", 232448, 32)
PROCESSORS = 132


def compiled_in(case: Case, dtype: str, backend: str) -> Hashable:
    """What of the numbers that ``drawn.varied`` changes is compiled in."""
    p = problem_of(case, dtype)
    if backend == "hopper":
        return (_hopper(p, case), _triton(p) if p.bias is not None else None)
    return _triton(p) if backend == "triton" else None


def _triton(p: Problem) -> Hashable:
    cuda = torch.cuda.is_available()
    limits = plain.limits_of(torch.device("cuda", 0)) if cuda else H200
    jobs = ["forward", "delta", "query_gradients"]
    jobs += ["dk", "dv"] if max(p.d, p.dv) > plain.BOTH_UP_TO else ["key_gradients"]
    found: list[Hashable] = [p.total_q == 0 or p.batch == 0, p.total_k == 0]
    if p.bias is not None:
        found += [bias_sum(p), p.hq // p.bias[1], p.nk % 8 == 0, p.nk % 4 == 0]
        jobs.append("bias_gradient")
    for job in jobs:
        kind = plain.kind_of(job, p)
        tiles = plain.user_tiles(limits.name).get(str(kind)) or plain.table(kind, limits)
        tiles = plain.shortened(tiles or next(plain.candidates(kind, limits)), p)
        found += [tiles, p.nq % tiles.block_q == 0, p.nk % tiles.block_k == 0]
    # of one row there is no step to the next
    found += [min(n, 2) for n in (p.nq, p.nk, p.total_q, p.total_k)]
    return (*found, folded(p), listed(p))


def _hopper(p: Problem, case: Case) -> Hashable:
    from rowmax import hopper
    from rowmax.hopper import launch
    from rowmax.hopper import tiles as forward
    from rowmax.hopper.gradients import biases, plans
    from rowmax.hopper.gradients import tiles as gradients

    refused = hopper._refused(p), hopper._refused_backward(p)
    if any(refused) or not (p.total_k and p.total_q and p.batch):
        return refused
    bias = None
    if p.bias is not None:
        bias = torch.empty(p.bias, dtype=p.bias_dtype, device="meta")
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3) if case.transposed else bias
    how = launch.how_bias_comes(p, bias)
    cuda = torch.cuda.is_available()
    processors = launch.processors(torch.device("cuda", 0)) if cuda else PROCESSORS
    tile = forward.tile_for(p, how, processors)
    found: list[Hashable] = [forward.config_for(p, tile, how, forward.packed_heads(p, how))]
    by = biases.gradient_by(p) if p.bias is not None else ""
    for kind, one in gradients.tiles_of(gradients.sizes_of(p.d, p.dv)).items():
        found.append(gradients.config_for(p, one, **plans.bias_options(p, kind, by)))
    return (*found, by)
