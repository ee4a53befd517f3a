"""The part of a case that is compiled into GPU kernels. Cases with equal parts share kernels.

It is computed from the case alone, so that the search draws calls that compile nothing new.

    python -m tests.gpu.compiled_in --groups 40 --dtype float32

counts the Triton kernels of the search's calls on a CPU, with a stand-in for the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Hashable
from typing import Any

import torch

from rowmax.call.dispatch import beyond
from rowmax.call.problem import Problem
from rowmax.gpu import tiles as plain
from rowmax.gpu.kernel_args import folded
from rowmax.gpu.tile_maps import listed
from rowmax.gpu.triton import backward, forward
from rowmax.gpu.triton.backward import bias_sum
from rowmax.testing import Case
from tests.drawn import Drawn, given_cotangents, problem_of

#: used on a machine without a GPU
H200 = plain.Limits("NVIDIA H200", 232448, 32, split=True, wgmma=True)
PROCESSORS = 132


def compiled_in(case: Case, dtype: str, backend: str) -> Hashable:
    """Return the compiled-in part of the numbers that ``drawn.varied`` varies."""
    p = problem_of(case, dtype)
    if backend not in ("triton", "hopper"):
        return None
    # without q_ids, queries use the ids of keys from an offset on
    ids = case.documents is None or case.documents == "queries" or p.nq > p.nk or p.offset % 4 == 0
    same = (p.hq, p.hk, p.left is None, p.right is None, p.positions is None, ids)
    if backend == "hopper":
        return same, (_hopper(p, case), _triton(p) if p.bias is not None else None)
    return same, _triton(p)


def _triton(p: Problem) -> Hashable:
    cuda = torch.cuda.is_available()
    limits = plain.limits_of(torch.device("cuda", 0)) if cuda else H200
    jobs = ["forward", "delta", "dq"]
    jobs += ["dk", "dv"] if max(p.d, p.dv) > plain.BOTH_UP_TO else ["dkdv"]
    found: list[Hashable] = [p.total_q == 0 or p.batch == 0, p.total_k == 0]
    if p.bias is not None:
        found += [min(p.batch, 2), bias_sum(p), p.hq // p.bias[1], p.nk % 8 == 0, p.nk % 4 == 0]
        jobs.append("dbias")
    if p.heads:
        jobs.append("dheads")
    for job in jobs:
        tiles = plain.chosen(plain.kind_of(job, p), limits, p)
        found += [tiles, p.nq % tiles.block_q == 0, p.nk % tiles.block_k == 0]
    # a single row has no stride
    found += [min(n, 2) for n in (p.nq, p.nk, p.total_q, p.total_k)]
    return (*found, folded(p), listed(p))


def _hopper(p: Problem, case: Case) -> Hashable:
    from rowmax.gpu import hopper
    from rowmax.gpu.hopper import backward_bias, backward_plan, backward_tiles, host
    from rowmax.gpu.hopper import tiles as forward

    refused = beyond(hopper.LIMITS, p), hopper._refused_backward(p)
    if any(refused) or not (p.total_k and p.total_q and p.batch):
        return refused
    bias = None
    if p.bias is not None:
        bias = torch.empty(p.bias, dtype=p.bias_dtype, device="meta")
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3) if case.transposed else bias
    how = host.bias_path(p, bias)
    cuda = torch.cuda.is_available()
    processors = host.processors(torch.device("cuda", 0)) if cuda else PROCESSORS
    tile = forward.tile_for(p, how, processors)
    found: list[Hashable] = [forward.config_for(p, tile, how, forward.packed_heads(p, tile, how))]
    by = backward_bias.gradient_by(p) if p.bias is not None else ""
    for one in backward_tiles.tiles_of(p, backward_bias.kind_of(p) == "tile"):
        options = backward_plan.bias_options(p, one, by)
        found.append(backward_tiles.config_for(p, one, **options))
    if by == "shared":
        found.append(backward_tiles.config_for(p, backward_tiles.shared_bias_tile(p)))
    return (*found, by)


# --- counting ----------------------------------------------------------------------------------


def kernels_of(drawn: Drawn, known: set[Hashable]) -> int:
    """Add the kernels of a call to ``known``; return how many are new.

    Nothing runs: jobs stop before their launch, with tiles for an H200.
    """
    compiled = importlib.import_module("rowmax.gpu.compiled")
    on, limits = compiled.Launch.on, plain.limits_of
    before = len(known)

    def note(launch: Any, like: Any, t: Any) -> None:
        signature = launch.signature(*launch.arguments(t))
        options = tuple(launch.options.items())
        known.add((id(launch.kernel), *(tuple(x.items()) for x in signature), options))

    compiled.Launch.on, plain.limits_of = note, lambda _: H200
    try:
        _stopped(drawn)
    finally:
        compiled.Launch.on, plain.limits_of = on, limits
    return len(known) - before


def _stopped(drawn: Drawn) -> None:
    call = drawn.call()
    problem, tensors = call.problem()
    # lengths on a GPU, which the host does not read
    found = problem_of(drawn.case, drawn.dtype, "cpu")
    problem = problem._replace(nq=found.nq, nk=found.nk)
    out, lse = forward(problem, tensors)
    wanted = call.wanted
    dout, dlse = given_cotangents(call, drawn.seed)
    if call.case.packed:
        dout, dlse = dout[None], None if dlse is None else dlse[None]
    if any(wanted):
        backward(problem, tensors, out, lse, dout, dlse, wanted)


def main() -> None:
    from tests.gpu.random_search import Group, calls_of

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--per-group", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=int, default=1_000_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    known: set[Hashable] = set()
    calls, late = 0, 0
    for seed in range(given.groups):
        group = Group(seed, given.dtype, "triton", "cpu", given.per_group, given.budget)
        for n, drawn in enumerate(calls_of(group)):
            more = kernels_of(drawn, known)
            calls += 1
            late += more if n else 0
    print(
        f"{given.dtype}: {calls} calls in {given.groups} groups, {len(known)} kernels, of which "
        f"{late} after the first call of a group; {calls / max(len(known), 1):.1f} calls a kernel"
    )


if __name__ == "__main__":
    main()
