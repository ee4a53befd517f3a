"""The model of efficiency: its limits, its order, and figures computed by hand elsewhere."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import distributed_model as model
from benchmarks.distributed import COLUMNS
from benchmarks.distributed_cells import CELLS, document_lengths, layout_for, mask_of, named, short
from benchmarks.distributed_model import IDEAL, PASSES, STRATEGIES, Machine, main, predict
from rowmax.bench.cells import Cell

NAMES = ("causal-64k", "mha-64k", "full-64k", "window-256k", "documents-64k")
#: no cost except that of bytes between devices
WIRE_ONLY = Machine(launches=0.0, slower=0.0, memory=float("inf"), latency=0.0, host=0.0)


def cell(name: str) -> Cell:
    return named(name)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", PASSES)
def test_limits(name: str, strategy: str, what: str):
    """One device has efficiency 1; without costs only the imbalance is lost."""
    assert predict(cell(name), strategy, what, 1).efficiency == 1.0
    free = predict(cell(name), strategy, what, 8, IDEAL)
    assert free.efficiency == pytest.approx(1 / free.imbalance)
    assert 0.0 < predict(cell(name), strategy, what, 8).efficiency < free.efficiency


def test_imbalance_is_that_of_the_layout_and_of_heads():
    of_documents = cell("documents-64k")
    _, layout = layout_for(of_documents, "keys", 8)
    want = layout.imbalance(mask_of(of_documents))
    assert predict(of_documents, "keys", "forward", 8, IDEAL).imbalance == want
    few = replace(cell("causal-64k"), hq=6, hk=6)
    assert predict(few, "heads", "forward", 4, IDEAL).efficiency == pytest.approx(6 / 8)
    assert predict(few, "keys", "forward", 4, IDEAL).efficiency == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", PASSES)
def test_monotony(strategy: str, what: str):
    """Longer sequences, faster wires and fewer devices lose less."""

    def rising(values: list[Any]) -> bool:
        return all(a < b for a, b in pairwise(values))

    lengths = [cell(f"causal-{n}") for n in ("16k", "64k", "256k", "1m")]
    assert rising([predict(x, strategy, what, 8).efficiency for x in lengths])
    some = cell("mha-32k")
    speeds = [replace(WIRE_ONLY, wires={2: x}, pulls=x, slower=0.05) for x in (20.0, 100.0, 400.0)]
    assert rising([predict(some, strategy, what, 8, x).efficiency for x in speeds])
    between = [Machine(between=x) for x in (5.0, 50.0, 200.0)]
    assert rising([predict(some, strategy, what, 16, x).efficiency for x in between])
    devices = [predict(some, strategy, what, n).efficiency for n in (32, 16, 8, 4, 2)]
    assert rising(devices)


def test_an_exposed_gather():
    """A forward of 64k tokens and eight kv heads: all copies, and those that nothing hides.

    The last device copies half as much as the first one, and waits for its first head. The first
    one computes its own chunk meanwhile.
    """
    for devices, share in ((2, 0.0142), (4, 0.0427), (8, 0.0997)):
        n = 65536 / devices
        wire = 4 * (devices - 1) * n * 8 * 128 / 370e9
        assert wire / (2 * devices * n * n * 32 * 128 / 690e12) == pytest.approx(share, 0.01)
        found = predict(cell("causal-64k"), "keys", "forward", devices, WIRE_ONLY)
        assert found.wire == pytest.approx(share, 0.01)
        assert found.exposed == pytest.approx(share / 2 / 8, 0.01)
        assert found.efficiency == pytest.approx(1 / (1 + found.exposed), 1e-3)
    found = predict(cell("full-64k"), "keys", "forward", 4, WIRE_ONLY)
    assert found.exposed == pytest.approx(found.wire / 8)
    assert found.wire > 0.02


def test_stages_hide_copies_of_a_backward():
    """A forward has one stage. Copies that take longer than its kernels are not hidden."""
    assert model.pulled(cell("mha-64k"), False, 4).stages == (1.0,)
    slow = replace(WIRE_ONLY, pulls=10.0)
    found = predict(cell("mha-64k"), "keys", "forward", 4, slow)
    assert found.exposed == pytest.approx(found.wire - 1.0, 1e-2)
    # the last device waits for half of the first stage; gradients leave while kernels compute
    assert model.pulled(cell("causal-256k"), True, 4).stages == (1 / 8, 7 / 8)
    found = predict(cell("causal-256k"), "keys", "backward", 4, WIRE_ONLY)
    come = predict(cell("causal-256k"), "keys", "forward", 4, WIRE_ONLY).wire
    come *= 2 / 5 * 620 / 690  # five products for two
    assert found.exposed == pytest.approx(come / 8 / 2, 1e-3)
    assert found.wire == pytest.approx(3 * come, 1e-3)  # as many rows leave, in float32


def test_documents_are_one_call_of_a_rank():
    found = model.pulled(cell("documents-64k"), False, 2)
    assert found.calls == 1
    assert found.come < model.pulled(replace(cell("documents-64k"), packed=()), False, 2).come
    assert model.pulled(cell("causal-64k"), False, 2).calls == 2


def test_the_time_of_the_host_is_a_limit():
    slow = replace(WIRE_ONLY, host=1e6)
    some = cell("causal-16k")
    ideal = some.flops(2) / 8 / 690e12
    assert predict(some, "keys", "forward", 8, slow).efficiency == pytest.approx(ideal)


def test_shares_of_the_wire():
    """Percent of the computing: keys in the backward, heads in the forward."""
    for name, of_keys, of_heads in (
        ("causal-64k", (1.7, 4.8, 11.0), (4.0, 5.6, 6.4)),
        ("mha-64k", (6.9, 19.2, 44.0), (6.4, 8.9, 10.2)),
    ):
        for n, keys, heads in zip((2, 4, 8), of_keys, of_heads, strict=True):
            machine = replace(Machine(), pulls=Machine().wire(n))
            assert 100 * predict(cell(name), "keys", "backward", n, machine).wire == pytest.approx(
                keys, 0.02
            )
            assert 100 * predict(cell(name), "heads", "forward", n).wire == pytest.approx(
                heads, 0.02
            )


def test_rows_that_hide_copies():
    """4060 and 4380 rows a device within a node, as many as kv heads; 6.8 times between nodes."""
    machine = Machine()
    rows = [model.hiding_rows(32, 32, what, machine, 340.0) for what in PASSES]
    assert [round(x, -1) for x in rows] == [4060, 4380]
    assert model.hiding_rows(32, 8, "forward", machine, 340.0) == pytest.approx(rows[0] / 4)
    assert model.hiding_rows(32, 32, "forward", machine, 50.0) == pytest.approx(27600)


def test_a_window_moves_a_halo_alone():
    of_window = cell("window-256k")
    assert model.received_rows(of_window, 8) == 1024
    assert model.received_rows(replace(of_window, window=1000), 8) == 1024
    assert model.received_rows(cell("causal-64k"), 4) == 3 * 65536 / 4


def test_heads_within_a_node_and_keys_between_send_less_to_other_nodes():
    for what in PASSES:
        grid, keys = (
            model.traffic(cell("causal-1m"), name, what, 32, 8) for name in ("grid", "keys")
        )
        for few, many in zip(grid, keys, strict=True):
            assert few.outside <= many.outside / 7


def test_documents_fill_the_sequence():
    lengths = document_lengths(65536)
    assert sum(lengths) == 65536
    assert max(lengths) <= 16384
    assert document_lengths(65536) == lengths != document_lengths(65536, 1)
    of_documents = cell("documents-64k")
    assert of_documents.n == 65536
    small = short(of_documents, 4096)
    assert sum(small.packed) == 4096
    assert small.packed[:-1] == lengths[: len(small.packed) - 1]
    # half of documents have at most 500 to 1024 tokens; most tokens are in long ones
    some = sorted(x for seed in range(20) for x in document_lengths(2**20, seed))
    assert 500 < some[len(some) // 2] < 1024
    assert sum(x for x in some if x > 4096) > 0.5 * sum(some)


def test_every_named_cell_is_one():
    for name in CELLS:
        (found,) = named(name)
        assert found.pairs > 0


def rows_of(path: Path, efficiency: float) -> list[dict[str, str]]:
    usual = {"devices": "4", "dtype": "bfloat16", "b": "1", "d": "128", "dbias": "0"}
    sizes = {"n": "65536", "hq": "32", "hk": "8", "causal": "1", "documents": "", "window": ""}
    row = {"cell": "causal-64k", "pass": "forward", "provider": "rowmax:keys"} | usual | sizes
    one = cell("causal-64k").flops(2) / 500e9  # ms at 500 TFLOP/s
    row |= {"one_ms": f"{one}", "efficiency": f"{efficiency}"}
    wire = {"cell": "8 MiB", "pass": "wire", "provider": "all_to_all", "devices": "4", "gbs": "100"}
    torch = row | {"provider": "torch:allgather"}
    unnamed = row | {"cell": "D128 N65536 causal", "provider": "rowmax:heads:deterministic"}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="")
        table.writeheader()
        table.writerows([wire, row, torch, unnamed])
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_measured_rows_have_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """At the speed and the wire of the file; torch's rows have none."""
    rows = rows_of(tmp_path / "rows.csv", 0.9)
    keys, heads = model.compare(rows, Machine())
    machine = replace(Machine(), wires={4: 100.0}, forward=500.0)
    assert keys.predicted == pytest.approx(
        predict(cell("causal-64k"), "keys", "forward", 4, machine).efficiency
    )
    assert keys.error == pytest.approx(keys.predicted - 0.9)
    assert heads.predicted == pytest.approx(
        predict(cell("causal-64k"), "heads", "forward", 4, machine).efficiency
    )
    assert main(["--csv", str(tmp_path / "rows.csv")]) == 0
    out = capsys.readouterr().out
    assert f"{keys.predicted:.3f}" in out
    assert out.splitlines()[-1].startswith("2 rows, mean error ")


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["--devices", "2", "16", "--cells", "full-64k", "--strategies", "grid"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4
    assert lines[1].split()[:5] == ["full-64k", "forward", "grid", "2", "0.956"]
    with pytest.raises(SystemExit):
        main(["--devices", "12"])


ROOT = Path(__file__).parents[1]


def measured(name: str) -> list[model.Measured]:
    path = ROOT / f"benchmarks/results/{name}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return model.compare(list(csv.DictReader(file)), Machine())


def test_the_errors_that_the_documents_state():
    """The rows of keys are of two files, those of heads of an earlier one."""
    two, four = measured("distributed_two"), measured("distributed_four")
    heads = [one for one in measured("distributed") if one.provider == "rowmax:heads"]
    assert [len(two), len(four), len(heads)] == [5, 16, 12]
    assert {one.devices for one in two} == {one.devices for one in heads} == {2}
    figures = []
    for rows in (two, heads, four):
        errors = [abs(one.error) for one in rows]
        figures += [sum(errors) / len(errors), max(errors)]
    text = (ROOT / "docs/performance/devices.md").read_text(encoding="utf-8")
    words = " ".join(text.split())
    want = "{:.3f} on average by keys, at most {:.3f}; {:.3f} by heads, at most {:.3f}. On four "
    want += "devices it is {:.3f} by keys, at most {:.3f}:"
    assert want.format(*figures) in words, want.format(*figures)
    for name in ("causal-64k", "causal-128k", "mha-64k"):
        row = [
            ", ".join(f"{predict(cell(name), 'keys', what, n).efficiency:.2f}" for what in PASSES)
            for n in (4, 8)
        ]
        row.append(
            ", ".join(f"{predict(cell(name), 'grid', what, 16).efficiency:.2f}" for what in PASSES)
        )
        assert f"| {name} | {' | '.join(row)} |" in text
