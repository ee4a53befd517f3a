"""Models train across ranks as in one process: wrappers of torch, and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from . import training_programs as programs
from .world import World

Worlds = Callable[[int], World]


@cache
def _want() -> list[float]:
    return programs.one_process()


@pytest.mark.parametrize(
    ("size", "shape", "kind", "compiled"),
    [
        (2, (1, 2), "fsdp", False),
        (4, (2, 2), "ddp", False),
        (4, (2, 2), "fsdp", False),
        (4, (1, 2, 2), "fsdp", False),
        (2, (1, 2), "fsdp", True),
    ],
)
def test_a_gpt_trains_as_in_one_process(
    size: int, shape: tuple[int, ...], kind: str, compiled: bool, world: Worlds
) -> None:
    """The losses of each step, of plain descent: another scale of gradients would show."""
    want = _want()
    assert want[-1] < want[0] - 0.01
    for losses in world(size).run(programs.parallel, shape, kind, compiled):
        assert losses == pytest.approx(want, rel=1e-9)


CASES = [
    (2, "Llama", "plain", "zigzag"),
    (3, "Llama", "no cache", "zigzag"),
    (2, "Llama", "no cache", "contiguous"),
    (2, "Llama", "packed", "zigzag"),
    (3, "Llama", "packed", "zigzag"),
    (1, "Llama", "packed", "zigzag"),
    (3, "Llama", "packed row", "zigzag"),
    (3, "Llama", "padding", "zigzag"),
    (2, "Mistral", "no cache", "zigzag"),
    (2, "Mistral", "packed", "contiguous"),
    (2, "Llama", "checkpoints", "zigzag"),
]


@pytest.mark.parametrize(("size", "kind", "case", "layout"), CASES)
def test_models_of_transformers(
    size: int, kind: str, case: str, layout: str, world: Worlds
) -> None:
    """Loss and gradients, with masks that transformers makes of own rows."""
    pytest.importorskip("transformers")
    world(size).run(programs.same_as_one_process, size, kind, case, layout)


def test_a_model_of_transformers_on_two_dimensions(world: Worlds) -> None:
    pytest.importorskip("transformers")
    world(2).run(programs.same_as_one_process, 2, "Llama", "packed", "zigzag", (1, 2))


def test_refusals_of_transformers(world: Worlds) -> None:
    pytest.importorskip("transformers")
    want: dict[str, Any] = {
        "no position ids": "position_ids: got 0 at position 24 of the sequence, after 23; want "
        "layout.positions(rank); for packed sequences",
        "own position ids": "position_ids: got 0 at position 24 of the sequence, after 23; want",
        "packed with a cache": "position_ids: got 0 at position 32 of the sequence, after 31; want",
        "a jump": "position_ids: got 36 at position 31 of the sequence, after 30; want",
        "a dense mask": "mask: got shape [1, 1, 48, 48]; want one that broadcasts to",
        "other rows": "attention_mask: got a mask of 20 queries and 20 keys, or a cache; want own "
        "rows, 48, of queries and of keys",
        "a rule of its own": "attention_mask: got a mask function in context_parallel: ",
        "compiled": "no error",  # the graph breaks where position ids are read
    }
    for found in world(2).run(programs.refused_models):
        assert found.pop("documents of the context") == "no error"
        assert "Error: " in found.pop("generate")
        for name, text in found.items():
            assert want[name] in text, name
