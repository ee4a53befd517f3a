"""The lists of tiles, compared with the map of ``rules/mask.tile_states``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowmax.call.inputs import Tensors
from rowmax.gpu import kernel_args, launch, tile_maps
from rowmax.gpu.compat import is_compiled
from rowmax.gpu.kernel_args import Pointers
from rowmax.gpu.tile_lists import tile_lists_kernel
from rowmax.gpu.tiles import Tiles
from rowmax.gpu.triton.backward_dkdv import DKDV
from rowmax.gpu.triton.forward import FORWARD
from rowmax.rules.mask import FULL, PARTIAL
from rowmax.testing import Case, make

CASES = [
    Case("booleans", b=2, nq=150, nk=200, hq=2, allowed="bhqk"),
    Case("one-mask", b=2, nq=128, nk=128, hq=2, allowed="11qk", causal=True),
    Case("rows", b=3, nq=90, nk=140, hq=4, hk=2, allowed="b1q1", left=40),
    Case("keys", b=2, nq=90, nk=140, hq=2, allowed="11k", lengths=(0.5,)),
    Case("documents", b=2, nq=200, hq=2, documents="sorted", causal=True),
    Case("unsorted", b=1, nq=100, hq=2, documents="unsorted", allowed="1hqk"),
    Case("prefix", b=2, nq=150, hq=2, documents="sorted", prefix=(0.5,), causal=True),
    Case("aligned", b=2, nq=60, nk=150, hq=2, allowed="b1qk", lengths=(0.5,), align="lengths",
         causal=True),
    Case("packed", hq=2, sequences=((60, 90), (70, 30)), allowed="11qk", causal=True),
    Case("blocks", b=1, nq=512, hq=1, causal=True, allowed="11qk"),
]  # fmt: skip


@pytest.mark.skipif(
    is_compiled(tile_lists_kernel), reason="the kernels were imported without TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("blocks", [(16, 32), (64, 16), (128, 64)])
@pytest.mark.parametrize("spec", [FORWARD, DKDV], ids=["queries", "keys"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lists_hold_the_tiles_of_the_map(case: Case, spec: Any, blocks: tuple[int, int]) -> None:
    problem, tensors = make(case).problem()
    if case.name == "blocks":  # whole tiles, where random pairs would leave none
        i = torch.arange(problem.nq)
        allowed = (i[:, None] // 64 + i // 64) % 3 > 0
        tensors = tensors._replace(allowed=allowed[None, None])
    tensors = kernel_args.prepared(tensors)
    tiles = Tiles(*blocks, 4, 2)
    job = launch.build_job(spec, problem, tensors, tiles, {})
    assert job.lists is not None
    made = tile_maps.tile_pointers(problem, tensors, tiles, spec.resident)
    for t in made.values():
        t.fill_(-1)
    job.lists.run(launch.of_lists(Pointers(*tensors, **made)))
    states = tile_maps.tile_states(problem, tensors, tiles)
    if spec.resident == "keys":
        states = states.transpose(2, 3)
    rows = states.flatten(0, 2)
    assert len(made["order"]) == len(rows)
    for order, counts, state in zip(made["order"], made["counts"], rows, strict=True):
        full, partial = counts.tolist()
        half = len(order) // 2
        assert order[:full].tolist() == (state == FULL).nonzero()[:, 0].tolist()
        assert order[half : half + partial].tolist() == (state == PARTIAL).nonzero()[:, 0].tolist()
        assert (order[full:half] == -1).all()
        assert (order[half + partial :] == -1).all()


@pytest.mark.parametrize(
    ("t", "whole"),
    [
        (torch.ones(2, 3, 5, 64, dtype=torch.bool), True),
        (torch.ones(2, 1, 5, 64, dtype=torch.bool).expand(2, 3, 5, 64), True),
        (torch.ones(2, 3, 5, 1, dtype=torch.bool), True),
        (torch.ones(1, 1, 5, 64, dtype=torch.bool)[..., :50], True),
        (torch.ones(1, 1, 5, 64, dtype=torch.bool).view(-1)[: 4 * 64 + 50].as_strided(
            (1, 1, 5, 50), (320, 320, 64, 1)), True),
        (torch.ones(4 * 64 + 50, dtype=torch.bool).as_strided((1, 1, 5, 50), (320, 320, 64, 1)),
         False),  # the last row ends with the memory
        (torch.ones(1, 1, 5, 50, dtype=torch.bool), False),
        (torch.ones(1, 1, 64, 5, dtype=torch.bool).transpose(2, 3), False),
        (torch.ones(1, 1, 5, 80, dtype=torch.bool)[..., 1:65], False),
    ],
)  # fmt: skip
def test_masks_are_read_by_units(t: torch.Tensor, whole: bool) -> None:
    assert kernel_args.in_units(t) == whole
    q = torch.zeros(2, 5, 3, 16)
    allowed = kernel_args.prepared(Tensors(q, q, q, allowed=t)).allowed
    assert allowed is not None
    assert (allowed is t) == whole
    assert torch.equal(allowed, t)
    assert kernel_args.in_units(allowed)
    if t.stride(1) == 0:  # heads share the copy
        assert allowed.stride(1) == 0
