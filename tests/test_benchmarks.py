"""The benchmark program on the CPU: tiny cells, no time asserted."""

from __future__ import annotations

import ast
import csv
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import key_parts, variants
from benchmarks.command import main
from benchmarks.processes import ROOT
from benchmarks.sets import SETS
from rowmax.bench import run
from rowmax.bench.cells import Cell, allowed, cells, inputs_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # from torch, on kernels that it does not choose
]
TINY = "n=64 d=16 b=2 hq=2 dtype=float32"
FEATURES = (
    f"{TINY} causal=1",
    f"{TINY} hk=1 window=20",
    f"{TINY} softcap=5 alibi=1",
    f"{TINY} lengths=40+64 bias=1hqk|b11k|11q1 dbias=1",
    f"{TINY} bias=bhqk documents=3 causal=1",
    "n=64 d=16 b=1 hq=2 dtype=float32 causal=1 documents=3 offsets=1",
    f"{TINY} dropout=0.25",
    "d=16 hq=2 dtype=float32 causal=1 packed=30+7",
    "d=16 hq=4 hk=2 dtype=float32 causal=1 nq=3 packed=30+7",
    f"{TINY} nq=3 hk=1 causal=1",
    f"{TINY} nq=5 window=20 alibi=1",
    f"{TINY} nq=1 lengths=40+64 bias=1hqk",
    f"{TINY} hk=1 causal=1 sink=1",
)


def measured(tmp_path: Path, *arguments: str) -> list[dict[str, str]]:
    path = tmp_path / "rows.csv"
    usual = ("--device", "cpu", "--turns", "2", "--turn-seconds", "0.001", "--csv", str(path))
    assert main([*arguments, *usual]) == 0
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_few_queries_stand_at_the_last_keys():
    (cell,) = cells("n=64 d=16 b=2 hq=4 hk=2 dtype=float32 nq=3 window=9")
    x = inputs_of(cell, "cpu")
    assert x.q.shape == x.dout.shape == (2, 3, 4, 16)
    pairs = allowed(cell, x)
    assert pairs is not None
    assert pairs.shape == (1, 1, 3, 64)
    assert [row.nonzero().flatten().tolist()[-1] for row in pairs[0, 0]] == [61, 62, 63]
    assert pairs.sum() == 3 * 10
    assert cell.pairs == 2 * 3 * 10
    assert cell.streamed == 2 * 12 * 2 * 2 * 16 * 4
    assert "nq 3" in cell.name
    with pytest.raises(ValueError, match="nq: got 3 with documents"):
        cells("nq=3 documents=2")
    with pytest.raises(ValueError, match="offsets: got True; want documents"):
        cells("offsets=1")


@pytest.mark.parametrize("text", ["packed=30+7 window=9", "n=40 window=50", "packed=30+7 causal=1"])
def test_pairs_of_sequences_are_counted(text: str):
    (cell,) = cells(f"d=16 b=1 hq=1 dtype=float32 {text}")
    i = torch.arange(max(cell.packed or (cell.n,)))
    distance = i[:, None] - i
    seen = [
        ((distance >= 0) & (distance <= (cell.window or cell.n)))[:n, :n].sum().item()
        for n in cell.packed or (cell.n,)
    ]
    half = sum(cell.packed) / 2 if cell.causal else 0  # the diagonal of a causal mask counts half
    assert cell.pairs == sum(seen) - half


def test_packed_sequences_have_as_many_queries_each():
    (cell,) = cells("d=16 hq=4 hk=2 dtype=float32 nq=3 causal=1 packed=50+70")
    x = inputs_of(cell, "cpu")
    assert x.q.shape == x.dout.shape == (6, 4, 16)
    assert x.k.shape == (120, 2, 16)
    assert x.q_offsets is not None
    assert x.offsets is not None
    assert (x.q_offsets.tolist(), x.offsets.tolist()) == ([0, 3, 6], [0, 50, 120])
    assert cell.pairs == 3 * 120
    assert "nq 3" in cell.name


def test_every_feature_is_timed_and_agrees_with_a_peer(tmp_path: Path):
    providers = ("rowmax:torch", "rowmax:torch:deterministic", "sdpa", "none")
    passes = ("forward", "backward", "both")
    rows = measured(tmp_path, "--cells", *FEATURES, "--passes", *passes, "--providers", *providers)
    assert {row["pass"] for row in rows} == set(passes)
    ours = [row for row in rows if row["provider"] == "rowmax:torch"]
    assert len(ours) == 3 * sum(len(cells(text)) for text in FEATURES)
    for row in ours:
        assert float(row["off"]) < 1e-5
        assert row["turns"] == "2"
        assert all(row[name] for name in ("device", "torch", "date", "threads", "ms", "tflops"))
    peers = [row for row in ours if row["peer"]]
    assert {row["peer"] for row in peers} == {"sdpa"}
    assert len(ours) - len(peers) == 6  # with a softcap and with a sink, which it lacks


def test_tangents_and_second_derivatives_are_timed(tmp_path: Path):
    cell = "n=40 d=16 b=1 hq=2 causal=1 dtype=float32"
    passes = ("jvp", "second")
    rows = measured(tmp_path, "--cells", cell, "--passes", *passes, "--providers", "rowmax:torch")
    assert [row["pass"] for row in rows] == list(passes)
    assert all(float(row["off"]) < 1e-5 for row in rows)


def test_the_host_and_the_products_of_matrices_are_timed(tmp_path: Path):
    cell = "n=16 d=16 b=1 hq=1 dtype=float32"
    passes = ("host", "host-both", "matmul")
    rows = measured(tmp_path, "--cells", cell, "--passes", *passes, "--providers", "sdpa")
    assert [bool(row["host_us"]) for row in rows] == [True, True, False]
    assert rows[2]["provider"] == "torch"


def test_another_checkout_is_timed_in_the_same_run(tmp_path: Path):
    more = ("--against", str(ROOT), "--passes", "forward", "--processes", "1")
    rows = measured(tmp_path, "--cells", TINY, "--providers", "rowmax:torch", *more)
    assert [row["version"] for row in rows] == ["", str(ROOT)]
    assert rows[0]["peer"] == f"rowmax:torch @ {ROOT}"
    assert float(rows[0]["ratio"]) > 0


def test_a_training_step_compares_losses_and_gradients(tmp_path: Path):
    cell = "n=64 d=16 b=1 hq=2 causal=1 layers=1"
    providers = ("none", "sdpa", "rowmax:torch")
    rows = measured(tmp_path, "--cells", cell, "--passes", "step", "--providers", *providers)
    assert [row["provider"] for row in rows] == list(providers)
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert rows[2]["off"]
    assert "losses" in rows[2]["note"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_read_in_a_process_of_its_own(tmp_path: Path):
    cell = "n=1024 d=64 b=1 hq=8 dtype=float32"
    (row,) = measured(tmp_path, "--cells", cell, "--passes", "memory", "--providers", "sdpa")
    assert float(row["peak_mib"]) >= 3 * 2  # three gradients of 2 MiB


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(run.BOUNDS, "float32", 0.0)
    arguments = ("--device", "cpu", "--turns", "1", "--turn-seconds", "0.001", "--cells", TINY)
    assert main([*arguments, "--passes", "forward", "--providers", "rowmax:torch"]) == 1


@pytest.mark.parametrize("name", SETS)
def test_the_cells_of_a_set_have_names_of_their_own(name: str):
    found = [cell for text in SETS[name] for cell in cells(text)]
    assert found
    assert len({cell.name for cell in found}) == len(found)
    assert all(cell.pairs > 0 for cell in found)


@dataclass(frozen=True)
class Tile:
    block_q: int = 64
    block_k: int = 64
    split: bool = False


def test_a_change_of_a_tile_is_a_text():
    tile, constants = variants.changed(Tile(), "128,32,split,STAGED=0,TOGETHER=0.25")
    assert tile == Tile(128, 32, True)
    assert constants == {"STAGED": 0, "TOGETHER": 0.25}
    assert variants.changed(Tile(), "shipped") == (Tile(), {})
    assert variants.changed(Tile(), "pair.block_q=32", "dq") == (Tile(), {})
    assert variants.changed(Tile(), "pair.block_q=32", "pair") == (Tile(32), {})


def test_every_change_that_is_tried_is_of_a_kernel():
    lines = [line.split(" ")[0] for line in variants.TRIED.strip().splitlines()]
    assert set(lines) <= set(variants.KERNELS)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_private_names_of_the_adapter_exist():
    tree = ast.parse(Path(variants.__file__ or "").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rowmax"):
            module = import_module(node.module or "")
            for x in node.names:
                assert hasattr(module, x.name) or import_module(f"{node.module}.{x.name}")


def test_a_cell_is_posed_with_its_terms() -> None:
    cell = Cell(n=64, d=16, b=1, hq=2, window=8, alibi=True, softcap=2.0, dtype="float32")
    tensors, problem, _ = variants.posed(cell, inputs_of(cell, "cpu"))
    assert (problem.left, problem.right, problem.softcap) == (8, 0, 2.0)
    assert tensors.heads is not None
    causal = Cell(n=64, d=16, b=1, hq=2, causal=True, dtype="float32")
    assert variants.posed(causal, inputs_of(causal, "cpu"))[1].right == 0
    packed = Cell(n=64, d=16, b=1, hq=2, packed=(40, 24), dtype="float32")
    _, problem, dout = variants.posed(packed, inputs_of(packed, "cpu"))
    assert problem.varlen
    assert dout.shape == problem.out_shape == (1, 64, 2, 16)


@pytest.mark.parametrize("part", ["", "fused"])
def test_a_backward_with_a_change_is_launched(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take the arguments that they are given, and shares have the memory they write."""
    pytest.importorskip("triton.experimental.gluon")
    host = import_module("rowmax.gpu.hopper.backward_host")
    plans = import_module("rowmax.gpu.hopper.backward_plan")
    hopper = import_module("rowmax.gpu.hopper")
    monkeypatch.setattr(hopper, "forward", lambda p, t: (torch.empty_like(t.q), torch.empty(1)))
    monkeypatch.setattr(plans, "processors", lambda _: 132)
    row_pass = mock.create_autospec(host.prepare, return_value=(None, None))
    launched = {name: mock.create_autospec(getattr(host, name)) for name in ("launch", "run")}
    for name, function in (launched | {"prepare": row_pass}).items():
        monkeypatch.setattr(host, name, function)
    cell = Cell(n=300, d=128, b=1, hq=4, hk=1)
    variants.hopper_backward(part, cell, inputs_of(cell, "cpu"), "SHARES=4")()
    function = launched["run" if part else "launch"]
    function.assert_called_once()
    if part:
        made = function.call_args.args[5]
        assert made.k.numel() == 4 * 2 * 300 * 128
        assert made.v.offset == 4 * 4 * 300 * 128


def test_parts_of_the_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is a plan of its own, and the usual one is that of the host."""
    pytest.importorskip("triton.experimental.gluon")
    host = import_module("rowmax.gpu.hopper.host")
    monkeypatch.setattr(host, "processors", lambda _: 132)
    cell = Cell(n=4096, nq=256, d=64, b=1, hq=4, hk=1, causal=True)
    x = inputs_of(cell, "cpu")
    found = key_parts.contestants(cell, x, [1, 4, 64])
    assert [(backend, parts) for backend, _, parts, _ in found] == [
        ("hopper", n) for n in (1, 4, 16)
    ]
    assert [chosen for *_, chosen in found] == [0, 0, 1]
    for _, change, parts, chosen in found:
        for text in (change, *["shipped"] * chosen):
            plan, pointers, run, _ = variants._forward_launch(cell, x, text)
            assert plan.parts == parts
            merged = mock.Mock()
            monkeypatch.setattr(host, "merge_parts", merged)
            monkeypatch.setattr(type(plan), "run", lambda *_: None)
            t = pointers()
            assert run(t).shape == (1, 256, 4, 64)
            assert t.out.shape[0] == (parts if parts > 1 else 1)
            assert merged.called == (parts > 1)
    few = Cell(n=8192, nq=1, d=64, b=1, hq=8, hk=1)
    assert key_parts.contestants(few, inputs_of(few, "cpu"), [])[-1][:2] == ("triton", "shipped")
