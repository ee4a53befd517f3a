"""The programs that measure and check attention across devices, on gloo with two processes."""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from benchmarks import distributed, distributed_calls
from benchmarks import ranks as processes
from benchmarks.distributed_cells import named
from benchmarks.ranks import ENVIRONMENT, Failure, Rank, Ranks, RanksError
from rowmax import distributed as rd
from rowmax.bench import run
from rowmax.testing import Case

from . import hanging_rank
from .distributed.drawn import spread_of, spreads
from .gpu import distributed as checks
from .gpu import distributed_search as search
from .gpu import results

pytestmark = pytest.mark.usefixtures("one_thread")
PROVIDERS = ("one:torch", "rowmax:keys:torch", "rowmax:heads:torch")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, "cpu") as found:
        yield found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks of a process that has imported this file. Those of ``ranks`` are started."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    monkeypatch.setattr(processes, "METHOD", "forkserver")


# --- processes -----------------------------------------------------------------------------------


def environment(rank: Rank) -> tuple[dict[str, str | None], int]:
    total = torch.ones(())
    dist.all_reduce(total)
    return {name: os.environ.get(name) for name in ENVIRONMENT}, int(total) * 10 + rank.rank


def fails(rank: Rank, which: int) -> int:
    if rank.rank == which:
        raise ValueError("out of bounds")
    return rank.rank


def hangs(rank: Rank, which: int) -> None:
    if rank.rank == which:
        time.sleep(100)
    dist.barrier()


def test_ranks_share_a_group_and_an_environment(ranks: Ranks):
    for rank, found in enumerate(ranks.run(environment, limit=30)):
        assert found == (ENVIRONMENT, 20 + rank)
    assert not set(ENVIRONMENT) & set(os.environ)
    assert ranks.run(fails, 1, limit=30, only=(0,)) == [0]


def test_an_error_that_every_rank_survives_is_reported(ranks: Ranks):
    good, bad = ranks.attempt(fails, 1, limit=30)
    assert good == 0
    assert isinstance(bad, Failure)
    with pytest.raises(RanksError, match="rank 1: ValueError: out of bounds"):
        ranks.run(fails, 1, limit=30)
    assert ranks.alive


@pytest.mark.usefixtures("forked")
def test_ranks_that_hang_are_killed():
    found = Ranks(2, "cpu", time.time() + 60)
    begin = time.time()
    with pytest.raises(RanksError, match="not done within 1 s"):
        found.run(hangs, 1, limit=1)
    assert time.time() - begin < 10
    assert not found.alive
    assert not any(process.is_alive() for process in found.processes)


# --- measurements --------------------------------------------------------------------------------


def measured(tmp_path: Path, *words: str) -> tuple[int, list[dict[str, str]]]:
    path = tmp_path / "rows.csv"
    usual = ("--device", "cpu", "--devices", "2", "--turns", "2", "--turn-seconds", "0.001")
    code = distributed.main([*usual, "--pause", "0", "--csv", str(path), *words])
    with path.open(newline="") as file:
        return code, list(csv.DictReader(file))


@pytest.mark.usefixtures("forked")
def test_cells_are_timed_against_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Wrong results are not timed, nor torch's ring, which has no attention of a CPU."""
    monkeypatch.setitem(run.BOUNDS, "bfloat16", -1.0)  # all of its results are wrong
    tiny = "n=128 d=16 b=1 hq=2 causal=1"
    cells = ("tiny-documents", "tiny-window", "tiny-dbias", f"{tiny} dtype=float32", tiny)
    names = (*PROVIDERS, "torch:allgather")
    code, rows = measured(tmp_path, "--cells", *cells, "--providers", *names)
    assert code == 1
    wrong = [row for row in rows if row["dtype"] == "bfloat16"]
    assert [row["provider"] for row in wrong] == ["one:torch"] * 2
    timed = [row for row in rows if row["dtype"] == "float32"]
    assert len(timed) == 4 * 2 * 3
    by_key = {(row["cell"], row["pass"], row["provider"]): row for row in timed}
    for (cell, what, name), row in by_key.items():
        assert all(row[x] for x in ("ms", "tflops", "host_us", "layout", "device", "torch", "date"))
        if name != "one:torch":
            one = float(by_key[cell, what, "one:torch"]["ms"])
            assert float(row["efficiency"]) == pytest.approx(one / 2 / float(row["ms"]), 1e-2)
            assert float(row["off"]) < 1e-5
    layouts = {row["layout"] for row in timed if row["provider"] == "rowmax:keys:torch"}
    assert layouts == {"documents", "contiguous", "zigzag"}
    wires = [row for row in rows if row["pass"] == "wire"]
    assert {row["provider"] for row in wires} == {"all_gather", "reduce_scatter", "all_to_all"}
    assert all(float(row["mib"]) > 0 and float(row["ms"]) > 0 for row in wires)
    out = capsys.readouterr().out
    assert "tiny-window: torch:allgather: without window" in out
    assert out.count("; not timed\n") == 4  # when it is found, and at the end


@pytest.mark.usefixtures("forked")
def test_a_provider_whose_ranks_hang_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its ranks are killed; others take their place, and the other providers are timed."""
    monkeypatch.setattr(distributed_calls, "check_short", hanging_rank.check_short)
    monkeypatch.setattr(distributed, "COMPILE", 5.0)
    words = ("--cells", "tiny-documents", "--no-wire", "--passes", "forward")
    code, rows = measured(tmp_path, *words, "--providers", *PROVIDERS)
    assert code == 1
    assert [row["provider"] for row in rows] == list(PROVIDERS[:2])
    assert "rowmax:heads:torch: rank 0, 1: not done within 5 s" in capsys.readouterr().out


def test_the_time_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--cells", "tiny-documents", "--no-wire", "--providers", "one:torch")
    code, rows = measured(tmp_path, *words, "--seconds", "0.5")
    assert (code, rows) == (1, [])  # no rank starts in half a second
    assert "no process could start" in capsys.readouterr().out


def shifted(rank: Rank) -> dict[str, Any]:
    """Return the check of a call whose results are larger on the last rank."""
    real = rd.attention

    def wrong(*given: Any, **options: Any) -> Any:
        return real(*given, **options) + rank.rank

    with mock.patch.object(rd, "attention", wrong):
        (cell,) = named("tiny-causal")
        return distributed_calls.check_short(rank, cell, "rowmax:keys:torch", "one:torch")


def test_wrong_rows_are_found_on_their_rank(ranks: Ranks):
    first, last = ranks.run(shifted, limit=60)
    assert first["off"] < 1e-5
    assert last["off"] > 1.0


def positions(rank: Rank, causal: bool) -> tuple[str, torch.Tensor]:
    text = f"n=64 d=16 b=1 hq=2 dtype=float32 causal={int(causal)}"
    found = distributed_calls.contestant(rank, named(text)[0], "torch:alltoall")
    return found.layout, found.positions


@pytest.mark.filterwarnings("ignore")
def test_rows_of_torch_are_where_it_expects_them(ranks: Ranks):
    """Its context distributes rows as ``zigzag`` does, or as ``contiguous`` if not causal."""
    for causal in (True, False):
        layout = rd.Layout.zigzag(64, 2) if causal else rd.Layout.contiguous(64, 2)
        for rank, (name, found) in enumerate(ranks.run(positions, causal, limit=60)):
            assert name == ("zigzag" if causal else "contiguous")
            assert torch.equal(found, layout.positions(rank))


def test_messages_have_sizes_of_the_cells():
    cells = [named(name)[0] for name in ("causal-16k", "causal-64k", "documents-64k")]
    # 8 heads of 128, K and V: 16 MiB in bfloat16 for 4096 of 16k rows
    assert distributed.sizes_of(cells, 4) == [16.0, 32.0, 64.0, 128.0]


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_checks_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.csv"
    words = ["--device", "cpu", "--out", str(out), "--repeats", "2", "--backend", "torch"]
    only = "2 repeats: features,dropout,one rank: features,packed-causal,packed-window"
    assert checks.main([*words, "--only", only]) == 0
    rows = results.read(out)
    names = {row.check for row in rows}
    assert {"2 repeats: features", "dropout", "one rank: features", "packed-causal"} <= names
    assert {row.kind for row in rows} == {"distributed"}
    assert {row.dtype for row in rows} == {*checks.DTYPES, "all"}
    assert all(row.variant.startswith("2 ranks") for row in rows)
    assert sum(row.right for row in rows) > 15
    assert "0 wrong" in capsys.readouterr().out
    assert checks.main([*words, "--only", "such a name"]) == 2


def wrong_case(rank: Rank) -> list[str]:
    """Return what a check says of values that are larger on the last rank."""
    real = rd.attention

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return real(q, k, v * (1.0 + 0.1 * rank.rank), **options)

    case = Case("plain", nq=100, d=16, causal=True)
    with mock.patch.object(rd, "attention", wrong):
        return checks.check_case(rank, case, "float32", 1, "zigzag", "keys", "torch")


def other_set(rank: Rank) -> list[str]:
    real = rd.attention

    def wrong(*given: Any, **options: Any) -> Any:
        return real(*given, **{**options, "seed": 5})

    with mock.patch.object(rd, "attention", wrong):
        return checks.check_dropout(rank, "float32", "zigzag", "keys", "torch")


def drifting(rank: Rank) -> list[str]:
    real, calls = rd.attention, []

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append(1)
        return real(q, k, v if len(calls) != 3 else v + 1, **options)

    case = Case("plain", nq=100, d=16)
    with mock.patch.object(rd, "attention", wrong):
        return checks.check_repeats(rank, case, "zigzag", "keys", 3, "torch")


def test_checks_find_what_is_wrong(ranks: Ranks):
    found = ranks.run(wrong_case, limit=60)
    assert any(text.startswith("out") for text in found[0])
    assert any(text.startswith("dv") for text in found[0])
    assert found[1] == []
    for texts in ranks.run(other_set, limit=60):
        assert texts
        assert texts[0].endswith("pairs")
    for texts in ranks.run(drifting, limit=60):
        assert "out differs in 1 of 3" in texts


def test_every_kind_lists_its_checks():
    given = checks.arguments(["--device", "cpu"])
    given.device, given.kinds = "cuda", tuple(checks.KINDS)
    found = checks.checks_of(given)
    keys = [one.key for one in found]
    assert len(set(keys)) == len(keys)
    assert {one.dtype for one in found} == {*checks.DTYPES, "all"}
    assert sum(one.function is checks.check_dtypes for one in found) == 3 * 2
    assert sum(one.function is checks.check_waits for one in found) == 3 * 3
    assert sum(one.function is checks.check_memory for one in found) == 3
    assert sum(one.function is checks.check_in_use for one in found) == 1
    given.all = True
    assert len(checks.checks_of(given)) > 3 * len(found)


def test_the_result_of_all_ranks_is_one():
    def stated(*texts: list[str]) -> str:
        group: Any = mock.Mock(**{"run.return_value": list(texts)})
        return checks.result_of(group, checks.checks_of(checks.arguments(["--device", "cpu"]))[0])

    assert stated([], []) == "right"
    assert stated(["refused: no"], ["refused: no"]) == "refused: no"
    assert stated(["right: 2 copies"], ["right: 3 copies"]) == "right: 2 copies"
    assert stated(["right: 2 copies"], ["9 copies"]) == "9 copies"
    group: Any = mock.Mock(**{"run.side_effect": RanksError("rank 1 has ended")})
    check = checks.checks_of(checks.arguments(["--device", "cpu"]))[0]
    assert checks.result_of(group, check) == "fault: rank 1 has ended"


# --- random calls --------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_a_search_counts_its_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "search.csv"
    words = ["--device", "cpu", "--minutes", "0.05", "--budget", "2000", "--out", str(out)]
    assert search.main([*words, "--dtype", "float32,float64"]) == 0
    rows = results.read(out)
    assert rows
    assert all(row.right or row.result.startswith("not run") for row in rows)
    assert all(row.variant.startswith("2 ranks ") for row in rows)
    assert "0 wrong, 0 fault" in capsys.readouterr().out


def test_a_search_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--device", "cpu", "--minutes", "0.05", "--out", str(tmp_path / "search.csv")]
    one = search.Search(search.arguments(words))
    calls = list(islice(spreads(0, 2, "float32", ("torch",), 2000), 3))
    found = [("right", []), ("wrong", ["out: 3 times the bound"]), ("right", [])]
    with (
        mock.patch.object(search, "Ranks"),
        mock.patch.object(search, "result_of", side_effect=found),
        mock.patch.object(one, "calls", return_value=calls),
    ):
        one.run()
    assert (one.bad, one.calls_made) == (1, 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["WRONG", "out: 3 times the bound"]
    assert spread_of(lines[2]) == calls[1]


def test_ranks_that_end_are_a_fault():
    one = next(spreads(0, 2, "float32", ("torch",), 2000))
    group: Any = mock.Mock(**{"run.side_effect": RanksError("rank 1 has ended")})
    assert search.result_of(group, one) == ("fault", ["rank 1 has ended"])
