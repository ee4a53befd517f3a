"""The search over random calls: it counts failures and writes Python that makes them again."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from rowmax.testing import Case, make

from . import extreme_bias
from .drawn import Drawn, RefusedError, changed, from_json, reduced
from .gpu import random_search, results, special_draws

SMALL = Drawn(Case("small", b=1, nq=5, hq=1, d=4), "float32", 0)


def at_times(kind: str, drawn: Drawn, backend: str, device: str) -> list[str]:
    """Fail one call in four, each in one of the ways that a call can."""
    if drawn.seed % 4:
        return []
    how = ("wrong", "raises", "refused")[drawn.seed // 4 % 3] if kind == "any" else kind
    if how == "dies or hangs":
        if drawn.seed % 8:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    if how == "raises":
        raise RuntimeError("out of bounds")
    if how == "refused":
        raise RefusedError("it takes no such thing")
    return ["dq: max error 1"]


def _search(tmp_path: Path, check: random_search.CheckCall, *words: str) -> random_search.Search:
    words = (
        *("--device", "cpu", "--backend", "cpu,torch", "--dtype", "float32", "--processes", "2"),
        *("--per-group", "8", "--every", "1", "--out", str(tmp_path / "out.csv")),
        *("--failures", str(tmp_path / "failures.txt"), *words),
    )
    found = random_search.Search(random_search.arguments(list(words)), check)
    found.run()
    return found


def test_failures_are_counted_and_the_search_goes_on(tmp_path: Path) -> None:
    found = _search(tmp_path, partial(at_times, "any"), "--calls", "150")
    counts = list(found.counts.values())
    assert all(c.calls >= 150 for c in counts)
    assert all(c[kind] for c in counts for kind in ("right", "wrong", "fault", "refused"))
    rows = results.read(tmp_path / "out.csv")
    assert [row.variant for row in rows] == ["cpu", "torch"]
    for row, c in zip(rows, counts, strict=True):
        assert (row.kind, row.dtype) == ("random-search", "float32")
        calls = c["right"] + c["wrong"] + c["fault"]
        assert row.result == f"wrong: {c['wrong']} wrong, {c['fault']} fault, {calls} calls"
    text = (tmp_path / "failures.txt").read_text()
    lines = [line for line in text.splitlines() if line.startswith("# drawn ")]
    assert len(lines) == sum(c["wrong"] + c["fault"] for c in counts)
    for line in lines:
        drawn = from_json(line.split(" ", 3)[3])
        assert drawn.seed % 4 == 0
        assert drawn.snippet("cpu", "cpu") in text.replace("'torch', 'cpu'", "'cpu', 'cpu'")


def test_a_call_that_dies_or_hangs_is_a_fault(tmp_path: Path) -> None:
    check = partial(at_times, "dies or hangs")
    found = _search(tmp_path, check, "--limit", "2", "--calls", "12", "--backend", "torch")
    (count,) = found.counts.values()
    assert count["fault"] == len(found.failed) > 0
    assert count["fault"] + count["right"] == count.calls >= 12
    for *_, drawn, texts in found.failed:
        assert drawn.seed % 4 == 0
        assert ("died (-9)" if drawn.seed % 8 else "hangs") in texts[0]


def refused(drawn: Drawn, backend: str, device: str) -> list[str]:
    raise RefusedError("it takes no such thing")


def test_a_search_that_computes_nothing_is_not_right(tmp_path: Path) -> None:
    found = _search(tmp_path, refused, "--minutes", "0.02", "--backend", "torch")
    assert found.idle == [("float32", "torch")]
    (row,) = results.read(tmp_path / "out.csv")
    assert row.result == f"not run: {found.counts['float32', 'torch']['refused']} refused"


def test_the_same_seed_draws_the_same_calls() -> None:
    job = random_search.Group(3, "float32", "triton", "cpu", 6, 40_000)
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


def test_calls_in_processes_of_their_own() -> None:
    bad = replace(SMALL, case=replace(SMALL.case, layout="none/such"))
    calls = [(SMALL, "torch"), (SMALL, "hopper"), (bad, "torch")]
    found = {
        (drawn, backend): result
        for drawn, backend, result in random_search.each_alone(calls, "cpu", 2, 100)
    }
    assert found[calls[0]] == "right"
    assert found[calls[1]].startswith("refused")
    assert found[calls[2]].startswith("unprepared")


def test_a_failure_is_made_small() -> None:
    """The reduced call has only what the failure needs."""
    case = Case(
        "large", b=3, nq=200, nk=131, hq=8, hk=4, d=96, dv=40, causal=True, softcap=5.0,
        bias="bhqk", sink=True, dropout=0.1, layout="sliced", documents="sorted", alibi=True,
    )  # fmt: skip

    def fails(drawn: Drawn) -> bool:
        c = drawn.case
        make(c)  # raises unless it is a call
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


def test_every_kind_of_calls_has_a_name_and_a_check() -> None:
    """A search of a kind without a name would end at its first report."""
    kinds = set(random_search.NAMES) - {""}
    assert kinds == set(random_search.CHECKS) >= set(special_draws.DRAWS)
    for kind in kinds:
        assert random_search.arguments(["--device", "cpu", f"--{kind}"]).special == kind


def test_calls_with_extreme_biases_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    job = random_search.Group(5, "float32", "torch", "cpu", 8, 20_000, "extremes")
    calls = [x for x in random_search.calls_of(job) if (x.case.nk or 0) >= extreme_bias.FEW_KEYS]
    assert calls
    for one in calls:
        assert one.case.bias in special_draws.OF_PAIRS
        assert extreme_bias.random_wrong(one, "torch", "cpu") == []
    right = extreme_bias.answer

    def off(*given: Any, **more: Any) -> Any:
        found = right(*given, **more)
        return replace(found, out=found.out * 1.01)

    monkeypatch.setattr(extreme_bias, "answer", off)
    assert any(extreme_bias.random_wrong(one, "torch", "cpu") for one in calls)  # 0 may be right
    (masked, *_) = (x for x in calls if extreme_bias.masked(x.case) and not x.case.packed)
    for name in ("q", "k", "v", "bias"):  # under a mask, each element has its own limit

        def wrong_there(*given: Any, name: str = name, **more: Any) -> Any:
            found = right(*given, **more)
            t = found.gradients[name].clone()
            t.view(-1)[-1] += 1.0
            return replace(found, gradients={**found.gradients, name: t})

        monkeypatch.setattr(extreme_bias, "answer", wrong_there)
        assert any(
            text.startswith(f"{name}: ")
            for text in extreme_bias.random_wrong(masked, "torch", "cpu")
        )
    with pytest.raises(RefusedError, match="neither"):
        extreme_bias.random_wrong(replace(calls[0], case=Case("plain")), "torch", "cpu")


def test_calls_are_compared_between_their_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each differs in one thing, the first and the last in the dtype; refused ones are left out."""
    group = random_search.Group(3, "float32", "torch", "cpu", 1, 20_000, "siblings")
    (drawn,) = random_search.calls_of(group)
    assert random_search.siblings_wrong(drawn, "torch", "cpu") == []
    seen: list[Any] = []
    refused = drawn

    def wrong(one: Any, *given: Any) -> list[str]:
        seen.append(one)
        if one == refused:
            raise random_search.RefusedError("none takes it")
        return [] if len(seen) < 6 else ["out"]

    monkeypatch.setattr(random_search, "wrong", wrong)
    with pytest.raises(random_search.RefusedError):
        random_search.siblings_wrong(drawn, "torch", "cpu")
    assert seen[-1] is drawn
    seen.clear()
    refused = replace(drawn, seed=drawn.seed + 1)
    (text,) = random_search.siblings_wrong(drawn, "torch", "cpu")
    assert text == f"{seen[0].dtype}: out"
    assert len(seen) == random_search.SIBLINGS + 2
    assert seen[0] == seen[-1]
    assert seen[0].dtype != drawn.dtype
    for one in seen[1 : random_search.SIBLINGS]:
        assert one.dtype == drawn.dtype
        here, there = changed(one.case), changed(drawn.case)
        assert len({x for x in here | there if here.get(x) != there.get(x)}) == 1
