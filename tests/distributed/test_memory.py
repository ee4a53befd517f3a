"""The memory of a call is what its explanation states: no rank holds all pairs, or rows twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rowmax
from rowmax import distributed as rd

from . import memory_programs, programs
from .world import World

Worlds = Callable[[int], World]
ROOT = Path(__file__).parents[2]
N = 2048


@pytest.mark.parametrize(
    ("stages", "shape", "way"),
    [
        (1, (), "collectives"),
        (4, (), "collectives"),
        (1, (), "shared"),
        (4, (), "shared"),
        (2, (2, 2), "collectives"),
    ],
)
def test_keys(stages: int, shape: tuple[int, ...], way: str, world: Worlds) -> None:
    """The peak of tensors that live is that of the formula, to a fifth, and the results."""
    for both in world(4).run(memory_programs.memory, "keys", stages, shape, way, N, False):
        for back, found in enumerate(both):
            peak, formula = found["peak"] - found["results"], found["formula"]
            if way == "shared":  # own rows, and gradients of all ranks, are in files
                assert 0.85 * formula < peak + found["shared"] <= 1.05 * formula, found
            elif not shape:
                assert 0.99 * formula < peak <= (1.2 if back else 1.25) * formula, found
            else:
                assert 0.75 * formula < peak <= 1.1 * formula, found


@pytest.mark.parametrize(("strategy", "copies"), [("heads", 2), ("queries", 4)])
def test_other_strategies(strategy: str, copies: int, world: Worlds) -> None:
    """Rows that arrive are copied a few times, as the documents say."""
    for both in world(4).run(memory_programs.memory, strategy, 1, (), "collectives", N, False):
        for found in both:
            assert found["formula"] / 2 < found["peak"] - found["results"], found
            assert found["peak"] - found["results"] <= (copies + 0.5) * found["formula"], found


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_no_tensor_has_all_pairs(shape: tuple[int, ...], world: Worlds) -> None:
    """With twice as many positions, everything is twice as large, and not four times."""
    small, large = (
        world(4).run(memory_programs.memory, "keys", 1, shape, "collectives", n, True)
        for n in (N // 2, N)
    )
    for one, two in zip(small, large, strict=True):
        for a, b in zip(one, two, strict=True):
            assert b["peak"] < 2.2 * a["peak"]
            assert b["largest"] <= b["formula"]


def test_a_million_tokens() -> None:
    """The figures of the documents: GiB besides q, k, v, out and their gradients."""
    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    like, n = torch.zeros((), dtype=torch.bfloat16), 2**20
    for ranks, mesh, way in (
        (4, None, "shared"),
        (8, None, "shared"),
        (16, None, "collectives"),
        (16, (2, 8), "collectives"),
    ):
        q, k = (like.expand(1, n // ranks, heads, 128) for heads in (32, 8))
        given: dict[str, Any] = {"layout": rd.Layout.zigzag(n, ranks), "mask": rowmax.Causal()}
        with programs.copies(way):
            found = rd.explain(q, k, k, mesh=mesh, strategy="keys", **given)
            with mock.patch("rowmax.distributed.explain.takes_places", return_value=True):
                less = rd.explain(q, k, k, mesh=mesh, strategy="keys", **given)
        saved = (found.backward.memory - less.backward.memory) / 2**30
        assert saved == (7.0 if way == "shared" else 0.0)
        places = f"{ranks} GPUs" if mesh is None else "2 hosts of 8 GPUs, two dimensions"
        places += ", NCCL" if mesh is None and ranks == 16 else ""
        forward, backward = (one.memory / 2**30 for one in (found.forward, found.backward))
        assert f"| {places} | {forward:.1f} | {backward:.1f} |" in text, (forward, backward)
