"""``rowmax bench`` on small problems: its table, its files and its errors; no time is asserted."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

pytest.importorskip("typer")

from rich.console import Console

from rowmax.bench import providers
from rowmax.bench.cells import Cell, inputs_of
from rowmax.bench.providers import UnsupportedError
from rowmax.bench.run import COLUMNS, Contestant, Result, Run, Turns
from rowmax.bench.worker import Pace
from rowmax.cli import bench
from rowmax.cli.bench import BenchSpec

from .test_app import invoke

SMALL = ("bench", "--device", "cpu", "--heads", "2", "-d", "16", "--turns", "2", "--seconds", "0")
OURS = ("--providers", "rowmax:torch,sdpa")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_prints_and_stores_every_figure(tmp_path: Path):
    path = tmp_path / "bench.csv"
    passes = ("--passes", "forward,both,error", "--csv", str(path))
    code, text = invoke(*SMALL, *OURS, "-n", "32,64", "--causal", *passes)
    assert code == 0, text
    for part in ("Forward", "TFLOP/s", "x sdpa's speed", "share of what the tolerance rule"):
        assert part in text
    rows = rows_of(path)
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 2 * 3 * 2
    assert {row["n"] for row in rows} == {"32", "64"}
    for row in rows:
        assert all(row[name] for name in ("device", "torch", "date"))
        if row["pass"] == "error":
            assert 0 < float(row["error_share"]) <= 1
        else:
            assert float(row["ms"]) > 0
            assert bool(row["ratio"]) == (row["provider"] == "rowmax:torch")


@pytest.mark.parametrize(
    "features",
    [
        ("--window", "9,0"),
        ("--bias", "1hqk", "--bias-gradient"),
        ("--alibi", "--causal"),
        ("--documents", "3"),
        ("--kv-heads", "1"),
        ("--dropout", "0.2"),
        ("--softcap", "5"),
    ],
)
def test_every_feature_is_within_the_rule(features: tuple[str, ...], tmp_path: Path):
    path = tmp_path / "bench.csv"
    passes = ("--passes", "forward,error", "--csv", str(path))
    code, text = invoke(*SMALL, *OURS, "-n", "40", *features, *passes)
    assert code == 0, text
    shares = [row for row in rows_of(path) if row["pass"] == "error"]
    peer = features[0] not in ("--softcap", "--dropout")
    assert [row["provider"] for row in shares] == ["rowmax:torch", "sdpa"][: 1 + peer]
    assert ("without softcap" in text) == (features[0] == "--softcap")


def test_a_wrong_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    from rowmax.tiled import forward

    def off(problem, tensors):
        out, lse = forward(problem, tensors)
        return out * 1.01, lse

    monkeypatch.setattr("rowmax.tiled.forward", off)
    code, text = invoke(*SMALL, *OURS, "-n", "40", "--passes", "forward,error")
    assert code == 1
    assert "WRONG" in text
    assert "allowed" in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("-n", "512,x"), "--lengths: got '512,x'; want integers"),
        (("-n", "0"), "--lengths: got '0'; want integers of 1 or more"),
        (("-b", "0"), "--batch: got 0; want 1 or more"),
        (("--kv-heads", "3"), "--kv-heads: got 3; want a divisor of the 8 query heads"),
        (("--dtype", "float64"), "--dtype: got 'float64'; want bfloat16, float16, float32"),
        (("--window", "9"), "--window: got '9'; want left,right"),
        (("--window", "9,3"), "--window: got '9,3'; want left,0"),
        (("--bias", "xy"), "--bias: got 'xy'; want letters of bhqk or 1"),
        (("--bias-gradient",), "--bias-gradient: got no --bias; want --bias as well"),
        (("--passes", "sideways"), "--passes: got 'sideways'; want some of forward, backward"),
        (("--passes", ","), "--passes: got ','; want some of"),
        (("--providers", "rowmax,fa9"), "--providers: got 'fa9'; want some of rowmax, sdpa"),
        (("--csv", "/nowhere/x.csv"), "--csv: got '/nowhere/x.csv'; want a file in a folder"),
        (("--device", "meta"), "--device: got 'meta'; want cpu or cuda"),
        (("--turns", "0"), "--turns"),
    ],
)
def test_bad_options_are_named_before_anything_is_measured(
    options: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench, "Run", lambda *_: pytest.fail("it began"))
    code, text = invoke("bench", *(() if "--device" in options else ("--device", "cpu")), *options)
    assert code == 2
    assert wanted in text
    assert "Traceback" not in text


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    code, text = invoke("bench", "--device", "cpu", "--plots", str(tmp_path))
    assert code == 2
    assert 'matplotlib is not installed; want pip install "rowmax[bench]"' in text


def test_plots_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from rowmax.cli.bench_plots import ceiling, draw

    usual = {"cell": "D64 N64 causal, H8", "provider": "rowmax", "dtype": "bfloat16"}
    usual |= {"device": "NVIDIA H200", "torch": "2", "date": "today"}
    figures = {"forward": "tflops", "memory": "peak_mib", "error": "error_share"}
    rows = [
        usual | {"pass": what, column: "0.5", "n": n}
        for what, column in figures.items()
        for n in (64, 128)
    ]
    paths = draw(rows, tmp_path)
    assert [path.name for path in paths] == ["forward.png", "memory.png", "error.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert ceiling(rows[0]) == 989
    assert ceiling(rows[0] | {"dtype": "float32"}) is None
    assert ceiling(rows[0] | {"device": "AMD EPYC"}) is None


def test_the_best_peer_sets_the_ratio():
    run = Run(Pace("cpu", 0.0), ("rowmax", "flash", "math"), Turns(1), say=lambda text: None)
    times = {"rowmax": 2.0, "flash": 3.0, "math": 9.0}
    found = {Contestant(name): Result(ms, 1, {}) for name, ms in times.items()}
    rows = {one.provider: run.row(Cell(64, 16, 1, 2), "forward", one, found) for one in found}
    assert (rows["rowmax"]["ratio"], rows["rowmax"]["peer"]) == ("1.500", "flash")
    assert "ratio" not in rows["flash"]


def test_the_order_of_turns_rotates():
    orders: list[str] = []

    class Worker:
        def turn(self, name: str) -> float:
            orders.append(name)
            return 1.0

    run = Run(Pace("cpu", 0.0), ("a", "b", "c"), Turns(4), say=lambda text: None)
    run.take_turns("forward", {Contestant(name): Worker() for name in "abc"})
    turns = ["".join(orders[n : n + 3]) for n in range(0, 12, 3)]
    assert len(set(turns)) == 4
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)


def test_scores_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(providers, "free_bytes", lambda device: 1 << 20)
    cell = Cell(512, 16, 1, 2, dtype="float32")
    with pytest.raises(UnsupportedError, match=r"GiB of scores, .* GiB are free"):
        providers.provider("math").make(cell, inputs_of(cell, "cpu"))


def test_the_usual_passes_and_providers():
    spec = BenchSpec(device="cpu", plots=Path("plots"))
    assert spec.wanted_passes == ["forward", "backward", "memory", "error"]
    assert spec.wanted_providers == ["rowmax", "flash", "math"]
    assert [cell.n for cell in spec.cells] == [256, 512, 1024, 2048]
    assert {cell.dtype for cell in spec.cells} == {"float32"}
    assert "cudnn" in providers.installed_providers("cuda")


def test_a_table_of_memory_counts_less_as_better():
    row = {"cell": "D64 N64 full", "pass": "memory", "n": 64, "provider": "rowmax"}
    row |= {"peak_mib": "2.0", "ratio": "2.000", "peer": "flash"}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(bench.results([row], ["memory"]))
    assert "0.50 x flash's memory" in console.export_text()


def test_free_memory_is_known_here():
    from rowmax.bench.timing import free_bytes

    free = free_bytes("cpu")
    assert free is None or free > 1 << 20
