"""In a context, the calls of a model are those of one device, or raise."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from rowmax import torch_compat

from . import context_programs as programs
from .world import World

Worlds = Callable[[int], World]
NO_CONTEXT = (
    "RuntimeError: rowmax.attention: called in a backward, as activation checkpointing does"
)
OTHERS = (
    "for cross attention want rowmax.distributed.attention with k_layout=; for a part of the model "
    "whose rows every rank has, want it in context_parallel(mesh, None)"
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_are_those_of_one_device(size: int, world: Worlds) -> None:
    world(size).run(programs.same_as_one_device, size)


@pytest.mark.parametrize("size", [1, 2])
def test_contexts_nest_and_belong_to_a_thread(size: int, world: Worlds) -> None:
    world(size).run(programs.scopes, size)


def test_a_warm_call_does_not_skip_the_context(world: Worlds) -> None:
    world(2).run(programs.warm)


def test_a_backward_after_the_context_in_another_thread(world: Worlds) -> None:
    world(2).run(programs.backward_elsewhere)


def test_checkpoints(world: Worlds) -> None:
    """With its contexts a checkpoint is right; without them it raises, and is never wrong."""
    for errors in world(2).run(programs.checkpoints):
        assert [text[: len(NO_CONTEXT)] for text in errors] == [NO_CONTEXT] * 2
        assert "context_fn=rowmax.distributed.checkpoint_contexts" in errors[0]


def test_a_compiled_block_has_a_graph_for_each_context(world: Worlds) -> None:
    """No graph of one context runs in another, and each is a full graph."""
    assert world(2).run(programs.compiled) == [3, 3]


def test_other_layouts_for_keys(world: Worlds) -> None:
    world(2).run(programs.cross)


def test_refusals(world: Worlds) -> None:
    parts = world(2).run(programs.refused)
    for rank, found in enumerate(parts):
        where = f"on rank {rank} in context_parallel, by attention"
        assert found[0] == f"ValueError: k: got 40 rows {where}; want own rows, 48; {OTHERS}"
        assert found[1] == f"ValueError: q: got 40 rows {where}; want own rows, 48; {OTHERS}"
        assert "q: got a nested tensor in context_parallel" in found[2]
        assert "mask: got shape [48, 48]; want one that broadcasts to" in found[3]
        assert f"k: got 40 rows {where}_varlen" in found[4]
        assert "cu_seqlens_q: got last offset 48; want the rows of all ranks, 96" in found[5]
        assert found[6].startswith("TypeError: q: got str")
        assert found[7].startswith("TypeError: layout: got str; want a Layout")
        assert "layout: got 3 ranks; want those of the group, 2" in found[8]
        assert found[9].startswith("TypeError: mask: got str")
        assert "strategy: got 'rings'" in found[10]
        assert "mask: got a value with a layout of None" in found[11]
        assert "max_seqlen_q: got 95; want at least the longest sequence, 96" in found[12]
        assert "max_seqlen_k: got -1; want 0 or more" in found[13]


def test_torchs_attention_in_a_context(world: Worlds) -> None:
    """A call that rowmax does not take raises: torch would attend to the rows of one rank."""
    for mask, dropout, packed in world(2).run(programs.by_sdpa):
        assert "attn_mask of shape [48, 32] does not broadcast to [1, 2, 48, 64]" in mask
        assert "dropout_p is 1.0" in dropout
        for text in (mask, dropout):
            assert text.startswith("NotImplementedError: scaled_dot_product_attention: ")
            assert "In context_parallel want a call that rowmax computes" in text
        assert packed.startswith("NotImplementedError: varlen_attn: num_splits is 1")


def test_without_contexts_a_call_reads_one_flag() -> None:
    """The flag is False in a process that never entered a context."""
    code = "import rowmax, rowmax.distributed as rd; from rowmax.call import around; "
    code += "assert rd.current_context() is None; print(around.used)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_backward_is_noticed_without_torchs_private_function() -> None:
    """Threads that Python did not start are those of autograd for a GPU."""
    found = []

    def look(grad: torch.Tensor) -> None:
        found.append(torch_compat.is_in_backward())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(look)
    x.sum().backward()
    assert found == [True]
    assert not torch_compat.is_in_backward()
    with mock.patch.object(torch_compat, "_C", object()):
        assert not torch_compat.is_in_backward()
        with mock.patch.object(threading.current_thread(), "_name", "Dummy-1"):
            assert torch_compat.is_in_backward()
