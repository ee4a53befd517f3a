"""Explanations count the bytes that move, the pairs of each rank and the time of a roofline."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rowmax
from rowmax import distributed as rd
from rowmax.distributed.explain import ROOFLINES
from rowmax.distributed.strategies import STRATEGIES

from . import context_programs as programs
from .programs import copies
from .world import World

Worlds = Callable[[int], World]
ROOT = Path(__file__).parents[2]


def rows(n: int, hq: int = 8, hk: int = 2, d: int = 128) -> tuple[torch.Tensor, ...]:
    """Return q, k and v of a rank, without memory."""
    one = torch.zeros((), dtype=torch.bfloat16)
    return tuple(one.expand(1, n, h, d) for h in (hq, hk, hk))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["plain", "window", "bias", "documents"])
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_that_move(size: int, kind: str, strategy: str, world: Worlds) -> None:
    for parts in world(size).run(programs.explained, size, strategy, kind):
        for want, counted in parts:
            assert tuple(want) == counted
            assert sum(counted) > 0


def test_a_plan_without_processes() -> None:
    """Figures of the formulas: keys and values in, and their gradients in float32 back."""
    layout = rd.Layout.zigzag(65536, 4)
    found = rd.explain(*rows(16384), layout=layout, causal=True, device="NVIDIA H200")
    shard = 16384 * 2 * 2 * 128 * 2  # rows, heads, k and v, head size, bytes
    assert found.strategy == "keys"
    assert found.rank == 0
    # the last chunk is seen by its own rank alone; the two of the middle by half of the ranks
    assert found.forward.wire[0] == (1.5 * shard, 3 * shard)
    assert found.forward.wire[3] == (3 * shard, 1.5 * shard)
    assert found.backward.wire[0] == ((1.5 + 2 * 3) * shard, (3 + 2 * 1.5) * shard)
    # rows as they arrive and in order; then their sums, and copies that leave and that come
    assert found.forward.memory == 2 * 4 * shard
    assert found.backward.memory == 4 * shard + 2 * (4 + 4 + 2.5) * shard
    assert found.loads is not None
    assert sum(found.loads) == 8 * 65536 * 65537 // 2
    assert found.imbalance == pytest.approx(1.0)
    roofline = found.roofline
    assert roofline is not None
    flops = max(found.loads) * 2 * 256
    assert found.forward.flops == flops
    time = found.forward.time
    assert time is not None
    assert time.compute == flops / roofline.forward
    assert time.wire == 3 * shard / roofline.wire
    assert time.hidden == min(1.0, time.compute / time.wire)


def test_memory_that_ranks_share() -> None:
    """Rows of all stages, where others read own ones, twice, and gradients of keys of every call.

    The first chunk of rank 0 is seen by both calls of three ranks and by one of the last, which has
    neighbouring chunks; the last chunk by one call. A call has gradients of all keys at most.
    """
    layout = rd.Layout.zigzag(65536, 4)
    shard = 16384 * 2 * 2 * 128 * 2
    with copies("shared"):
        found = rd.explain(*rows(16384), layout=layout, causal=True, device="H200")
        assert found.forward.memory == 2 * 4 * shard
        assert found.backward.memory == (2 * 4 + 2 * ((7 + 1) / 2 + 4)) * shard
        # chunks of gradients, in float32: the last rank writes those of its one call
        both = zip(found.backward.wire, found.forward.wire, strict=True)
        moved = [(a.sent - b.sent, a.received - b.received) for a, b in both]
        assert [sent // shard for sent, _ in moved] == [6, 6, 6, 3]
        assert [received // shard for _, received in moved] == [5, 5, 5, 6]
        # more than stays in shared memory between calls: others read a copy of own rows
        long = rd.explain(*rows(1 << 18, 8, 8), layout=rd.Layout.zigzag(1 << 20, 4), causal=True)
        assert long.forward.memory == (4 + 1) * 64 * shard


def test_what_does_not_fit_under_compute() -> None:
    """A short sequence, many kv heads and a slow wire: only a share can be hidden."""
    layout = rd.Layout.zigzag(4096, 4)
    slow = rd.Roofline(600e12, 500e12, 50e9)
    found = rd.explain(*rows(1024, 8, 8), layout=layout, device=slow)
    assert found.forward.time is not None
    assert 0 < found.forward.time.hidden < 0.5
    assert f"at most {found.forward.time.hidden:.0%} of the copies" in str(found)
    assert "600 and 500 TFLOP/s, 50 GB/s each way (given)" in str(found)
    assert "copies and products take turns in 'keys'" in str(found)
    long = rd.explain(*rows(65536, 32, 8), layout=rd.Layout.zigzag(65536 * 4, 4), device="H200")
    assert "copies and products overlap in 'keys'" in str(long)


def test_figures_of_the_roofline_are_those_of_the_results() -> None:
    roofline = ROOFLINES["H200"]
    for name, value in (("forward", roofline.forward), ("backward", roofline.backward)):
        with (ROOT / f"benchmarks/results/hopper_{name}.csv").open(encoding="utf-8") as file:
            (row,) = [
                row
                for row in csv.DictReader(file)
                if (row["case"], row["implementation"]) == ("D128 N16384 causal", "rowmax")
            ]
        assert float(row["tflops"]) * 1e12 == value
        assert "H200" in row["device"]


@pytest.mark.parametrize("device", [None, "NVIDIA A100"])
def test_an_unknown_device(device: str | None) -> None:
    found = rd.explain(*rows(1024), layout=rd.Layout.zigzag(4096, 4), device=device)
    assert found.roofline is None
    assert found.forward.time is None
    assert "share of copies that products can hide: unknown" in str(found)


def test_imbalance_of_masks_and_strategies() -> None:
    layout = rd.Layout.contiguous(4096, 2)
    found = rd.explain(*rows(2048), layout=layout, causal=True)
    assert found.imbalance == pytest.approx(layout.imbalance(rowmax.Causal()))
    assert "balance   most loaded rank 1.500" in str(found)
    by_heads = rd.explain(*rows(2048, hq=6), layout=layout, causal=True, strategy="heads")
    assert by_heads.imbalance == 1.0
    layout = rd.Layout.contiguous(4096, 4)
    by_heads = rd.explain(*rows(1024, hq=6, hk=6), layout=layout, causal=True, strategy="heads")
    assert by_heads.imbalance == pytest.approx(2 * 4 / 6)
    documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 3000, 4096])) & rowmax.Causal()
    found = rd.explain(*rows(1024), layout=layout, mask=documents)
    assert found.imbalance == pytest.approx(layout.imbalance(documents))
    own = torch.ones(1024, 4096, dtype=torch.bool)
    found = rd.explain(*rows(1024), layout=layout, mask=own)
    assert (found.imbalance, found.forward.flops) == (None, None)
    assert "balance   unknown" in str(found)


def test_documents_that_the_host_knows() -> None:
    """Only the keys of a rank's documents move, and pieces are copied."""
    cu = [0, 3072, 3584, 4096]
    layout = rd.Layout.documents(cu, 2)
    mask = rowmax.Documents(cu_seqlens=torch.tensor(cu)) & rowmax.Causal()
    found = rd.explain(*rows(2048), layout=layout, mask=mask)
    # one rank has both ends of the cut document, the other one its middle half
    assert layout.chunks(0)[0] == range(768)
    row = 2 * 2 * 128 * 2
    assert found.forward.wire[0].received == 1536 * row
    assert found.forward.wire[1].received == 768 * row
    gathered, copied = 3072 + 512, 768 + 3072 + 512
    assert found.forward.memory == (2 * gathered + copied) * row
    own, sent = 2048, 768
    assert found.backward.memory == (5 * gathered + 3 * copied + 2 * (own + sent)) * row
    assert found.imbalance == pytest.approx(layout.imbalance(mask))


def test_few_queries_of_many_keys() -> None:
    """Queries move by default where that copies less than half of what keys would."""
    keys, one = rd.Layout.contiguous(65536, 4), rd.Layout.contiguous(4, 4)
    q, _, _ = rows(1)
    _, k, v = rows(16384)
    found = rd.explain(q, k, v, layout=one, k_layout=keys, causal=True)
    assert found.strategy == "queries"
    gathered, result = 8 * 128 * 2, 8 * 129 * 4
    assert found.forward.wire[1] == (3 * (gathered + result),) * 2
    assert found.imbalance == pytest.approx(1.0, abs=1e-3)
    # all ranks see the last rank's keys in a window, so few of them move
    found = rd.explain(q, k, v, layout=one, k_layout=keys, mask=rowmax.Window(8, 0))
    assert found.strategy == "keys"
    q, _, _ = rows(8192)
    found = rd.explain(q, k, v, layout=rd.Layout.zigzag(32768, 4), k_layout=keys, causal=True)
    assert found.strategy == "keys"
    lengths = rowmax.PrefixLengths(torch.tensor([70]), align="lengths") & rowmax.Causal()
    q, _, _ = rows(1)
    found = rd.explain(q, k, v, layout=one, k_layout=keys, mask=lengths)
    assert found.strategy == "keys"
    reason = "a rank's keys alone have no position aligned to the lengths"
    assert found.others["queries"] == f"not able: {reason}"
    with pytest.raises(ValueError, match=f"strategy: got 'queries' \\({reason}\\); want 'auto'"):
        rd.explain(q, k, v, layout=one, k_layout=keys, mask=lengths, strategy="queries")


def test_reasons() -> None:
    layout = rd.Layout.zigzag(4096, 4)
    found = rd.explain(*rows(1024), layout=layout)
    assert found.others["heads"].startswith("able, but 'auto' prefers another; it would copy ")
    assert found.others["heads"].endswith("; 4 ranks would hold copies of 2 kv heads")
    found = rd.explain(*rows(1024, hq=2), layout=layout)
    assert found.others["heads"].endswith("; 2 of 4 ranks would have no head")
    found = rd.explain(*rows(1024), layout=layout, strategy="heads")
    assert found.others["keys"].startswith("able, but strategy='heads' is asked for; it would copy")


def test_refusals() -> None:
    layout = rd.Layout.zigzag(4096, 4)
    words: Any = 3
    for more, text in (
        ({"strategy": "rings"}, "strategy: got 'rings'"),
        ({"rank": 4}, "rank: got 4; want 0 to 3, or None"),
        ({"device": words}, "device: got int; want a name, a Roofline or None"),
        ({"mask": "words"}, "mask: got str"),
        ({"layout": words}, "layout: got int; want a Layout"),
        ({"layout": rd.Layout.zigzag(4000, 4)}, "q: got 1024 rows on rank 0; want"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            rd.explain(*rows(1024), **{"layout": layout, **more})


def test_no_number_is_drawn() -> None:
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    rd.explain(*rows(1024), layout=rd.Layout.zigzag(4096, 4), dropout_p=0.1)
    assert torch.equal(torch.rand(1), want)
