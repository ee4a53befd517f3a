"""The search over random calls: that it counts, goes on after a process that dies or hangs, and
writes down what failed so that it can be made again and made smaller."""

from __future__ import annotations

import csv
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rowmax.testing import Case, make

from .drawn import Drawn, RefusedError, from_json, reduced
from .gpu import random_search

SMALL = Drawn(Case("small", b=1, nq=5, hq=1, d=4), "float32", 0)


def nothing_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    return []


def at_times(kind: str, drawn: Drawn, backend: str, device: str) -> list[str]:
    """One call in eight fails."""
    if drawn.seed % 8:
        return []
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(100)
    if kind == "raises":
        raise RuntimeError("out of bounds")
    if kind == "refused":
        raise RefusedError("it takes no such thing")
    return ["dq: max error 1"]


def _search(tmp_path: Path, check: random_search.Check, *words: str) -> random_search.Search:
    words = (
        *("--device", "cpu", "--backend", "cpu,torch", "--dtype", "float32", "--processes", "2"),
        *("--per-group", "8", "--every", "1", "--out", str(tmp_path / "out.csv")),
        *("--failures", str(tmp_path / "failures.txt"), *words),
    )
    found = random_search.Search(random_search.arguments(list(words)), check)
    found.run()
    return found


@pytest.mark.parametrize(
    ("kind", "counted", "calls"),
    [
        ("wrong", "wrong", "60"),
        ("raises", "fault", "60"),
        ("dies", "fault", "9"),  # a process takes seconds to start
        ("refused", "refused", "60"),
    ],
)
def test_what_fails_is_counted_and_the_search_goes_on(
    kind: str, counted: str, calls: str, tmp_path: Path
) -> None:
    found = _search(tmp_path, partial(at_times, kind), "--calls", calls)
    counts = list(found.counts.values())
    assert all(c.calls + c["refused"] >= int(calls) for c in counts), "it went on"
    assert sum(c[counted] for c in counts)
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    names = "dtype,backend,calls,wrong,faults,device,torch,triton,date"
    assert list(rows[0]) == names.split(",")
    for row, c in zip(rows, counts, strict=True):
        assert int(row["calls"]) == c["right"] + c["wrong"] + c["fault"]
        assert int(row["wrong"]) == c["wrong"]
        assert int(row["faults"]) == c["fault"]
    text = (tmp_path / "failures.txt").read_text()
    lines = [line for line in text.splitlines() if line.startswith("# drawn ")]
    assert len(lines) == sum(c["wrong"] + c["fault"] for c in counts)
    for line in lines:
        drawn = from_json(line.split(" ", 3)[3])
        assert drawn.seed % 8 == 0
        assert drawn.snippet("cpu", "cpu") in text.replace("'torch', 'cpu'", "'cpu', 'cpu'")


def test_a_call_that_hangs_is_a_fault(tmp_path: Path) -> None:
    found = _search(tmp_path, partial(at_times, "hangs"), "--limit", "1", "--calls", "4")
    assert found.failed
    assert all("hangs" in texts[0] for *_, texts in found.failed)


def test_the_same_seed_draws_the_same_calls() -> None:
    job = random_search.Job(3, "float32", "triton", "cpu", 6, 40_000)
    first, again = (list(random_search.calls_of(job)) for _ in range(2))
    assert first == again
    assert len({drawn.case for drawn in first}) > 1


def test_a_call_is_written_and_read_back() -> None:
    case = Case("x", sequences=((3, 4), (0, 0)), lengths=(0.5, 1.0), grads=("q",), layout="a/b/c")
    drawn = Drawn(case, "bfloat16", 2**31 - 1)
    assert from_json(drawn.as_json()) == drawn


def test_a_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SMALL.snippet("torch", "cpu"), {})
    assert capsys.readouterr().out == "[]\n"


def test_one_call_in_a_child() -> None:
    assert random_search.in_a_child(SMALL, "torch", "cpu", 100) == "right"
    assert random_search.in_a_child(SMALL, "hopper", "cpu", 100).startswith("refused")
    bad = replace(SMALL, case=replace(SMALL.case, layout="none/such"))
    assert random_search.in_a_child(bad, "torch", "cpu", 100).startswith("unprepared")


def test_a_failure_is_made_small() -> None:
    """All that the failure does not need goes."""
    case = Case(
        "large", b=3, nq=200, nk=131, hq=8, hk=4, d=96, dv=40, causal=True, softcap=5.0,
        bias="bhqk", sink=True, dropout=0.1, layout="sliced", documents="sorted", alibi=True,
    )  # fmt: skip

    def fails(drawn: Drawn) -> bool:
        c = drawn.case
        make(c)  # it can be made
        nk = c.nq if c.nk is None else c.nk
        return c.softcap > 0 and nk >= 17 and c.hq > (c.hk or c.hq) and c.d > 16

    small = reduced(Drawn(case, "float32", 0), fails, most=500).case
    assert fails(Drawn(small, "float32", 0))
    assert (small.bias, small.documents, small.dropout, small.layout) == (None, None, 0.0, "bnhd")
    assert (small.causal, small.sink, small.alibi) == (False, False, False)
    assert (small.b, small.hq, small.hk) == (1, 2, 1)
    assert small.d <= 32
    assert (small.dv or small.d) <= 32
    assert (small.nq if small.nk is None else small.nk) == 17


def test_a_packed_failure_is_made_small() -> None:
    case = Case("packed", sequences=((40, 70), (0, 9), (33, 5), (64, 64)), sink=True, hq=2)

    def fails(drawn: Drawn) -> bool:
        return any(n > 20 and m < 7 for n, m in drawn.case.sequences or ())

    small = reduced(Drawn(case, "float32", 0), fails).case
    assert small.sequences is not None
    assert len(small.sequences) == 1
    assert not small.sink
