"""The pool and the runner of the GPU's checks, on a CPU."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from rowmax import tiled
from rowmax.call.inputs import Places
from rowmax.gpu import hopper, triton
from rowmax.testing import CASES, Case

from .gpu import check, extremes, hopper_direct, kinds, launches, results
from .gpu.pool import VISIBLE, Event, Job, Pool, visible_gpus


def behave(how: str) -> Iterator[str]:
    yield f"{how} begins"
    if how == "raises":
        raise RuntimeError("out of bounds")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(100)
    yield f"{how} ends"


def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    names = ["dies", "hangs", "raises", "right", "right again"]
    pool = Pool(behave, 2, limit=100, device="cpu")  # the others may wait for a processor
    found: dict[str, list[Event]] = {name: [] for name in names}
    for event in pool.run([Job((name,), limit=2.0 * (name == "hangs")) for name in names]):
        if event is not None:
            found[event.job.args[0]].append(event)
    for name, events in found.items():
        ends = name.startswith("right")
        assert [e.kind for e in events] == (["message"] * (1 + ends) + ["end" if ends else "fault"])
        assert events[0].value == f"{name} begins"
    assert "died (-9)" in found["dies"][-1].value
    assert "hangs" in found["hangs"][-1].value
    assert "out of bounds" in found["raises"][-1].value


def place(name: str, seconds: float, folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yield where the job ran, and when, once jobs have begun on two GPUs."""
    begin = time.time()
    (folder / os.environ[VISIBLE]).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    time.sleep(seconds)
    yield name, os.getpid(), os.environ[VISIBLE], begin, time.time()


def test_jobs_are_spread_over_gpus_and_some_are_alone(tmp_path: Path) -> None:
    jobs = [Job(("alone", 0.4, tmp_path), alone=True) for _ in range(2)]
    jobs += [Job(("usual", 0.2, tmp_path)) for _ in range(9)]
    jobs += [Job(("fresh", 0.1, tmp_path), fresh=True)]
    pool = Pool(place, 3, limit=100, device="cpu", gpus=["3", "5"])
    ran = [e.value for e in pool.run(jobs) if e is not None and e.kind == "message"]
    assert Counter(name for name, *_ in ran) == {"alone": 2, "usual": 9, "fresh": 1}
    assert {gpu for _, _, gpu, *_ in ran} == {"3", "5"}
    assert VISIBLE not in os.environ or os.environ[VISIBLE] not in ("3", "5")
    for name, pid, gpu, begin, end in ran:
        others = [other for other in ran if other[1:3] != (pid, gpu)]
        if name == "alone":
            assert not [o for o in others if o[2] == gpu and o[3] < end and begin < o[4]]
        if name == "fresh":
            assert pid not in [other[1] for other in others]


def test_the_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2,GPU-8c1")
    assert visible_gpus("cuda") == ["2", "GPU-8c1"]
    assert visible_gpus("cpu") == [None]
    monkeypatch.setenv(VISIBLE, "")
    with pytest.raises(RuntimeError, match="no GPU"):
        visible_gpus("cuda")


# --- the runner --------------------------------------------------------------------------------


def run(tmp_path: Path, *words: str) -> tuple[int, list[results.Row]]:
    out = tmp_path / "out.csv"
    code = check.main(["--device", "cpu", "--processes", "1", "--out", str(out), *words])
    return code, results.read(out)


def test_checks_run_and_go_on_after_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--kind", "cases,hopper-forward", "--backend", "torch", "--only", "plain,such")
    code, rows = run(tmp_path, *words)
    assert code == 0
    assert [row.key for row in rows] == [
        ("cases", "plain", "bfloat16", "torch"),
        ("cases", "plain", "float32", "torch"),
        ("hopper-forward", "plain", "bfloat16", ""),
        ("hopper-forward", "plain", "float16", ""),
    ]
    assert [row.result for row in rows[:2]] == ["right", "right"]
    assert all(row.result.startswith("refused: ") for row in rows[2:])
    assert "2 hopper-forward: refused: " in capsys.readouterr().out

    first = [row._replace(date="earlier") for row in rows]
    first[1] = first[1]._replace(result="dq: max error 1")
    results.write(tmp_path / "first.csv", first)
    code, rows = run(tmp_path, *words, "--after", str(tmp_path / "first.csv"))
    assert code == 0
    assert [row.date == "earlier" for row in rows] == [True, False, True, True]

    code, rows = run(tmp_path, *words, "--minutes", "0")
    assert (code, rows) == (1, [])


def given(*words: str, device: str = "cpu") -> Any:
    found = check.arguments(["--device", "cpu", *words])
    found.device = device
    return found


def test_every_kind_lists_its_checks() -> None:
    """As on a GPU. Nothing runs."""
    options = given("--backend", "triton,hopper", device="cuda")
    found = {kind: list(make(options)) for kind, make in kinds.KINDS.items()}
    keys = [one.key for checks in found.values() for one in checks]
    assert len(set(keys)) == len(keys)
    assert all(len(checks) > 5 for checks in found.values())
    assert {one.variant for one in found["cases"] if one.dtype == "float32"} == {"triton"}
    assert all(one.fresh for kind in ("known-faults", "launches") for one in found[kind])
    assert {one.gpus for one in found["two-devices"]} == {2}
    assert {one.name for one in found["hopper-backward"]} >= {case.name for case in CASES}
    assert len(found["hopper-backward"]) == 4 * len({one.name for one in found["hopper-backward"]})
    names = {one.name for one in found["hopper-forward"]}
    assert len(found["hopper-forward"]) == 2 * len(names)
    barriers = list(kinds.KINDS["hopper-backward"](given("--tag", "every barrier")))
    assert barriers
    assert all(one.name.startswith("first-") for one in barriers)


def test_large_checks_begin_first_and_slow_ones_next() -> None:
    options = given("--backend", "triton", device="cuda")
    checks = [one for kind in ("cases", "extremes") for one in kinds.KINDS[kind](options)]
    names = [one.name for one in check.ordered(checks, 0)]
    some = len(extremes.LARGE)
    assert set(names[:some]) == set(extremes.LARGE)
    assert set(names[some : some + len(extremes.SMALL)]) == set(extremes.SMALL)


def fails(how: str) -> list[str]:
    if how == "raises":
        raise RuntimeError("out of bounds")
    return ["refused: it takes no bias"] if how == "refused" else [how] * (how != "right")


def test_results_are_as_the_rows_have_them() -> None:
    def result(how: str, may_refuse: bool = False) -> str:
        return next(kinds.run(kinds.Check("a", "b", "c", "d", fails, (how,), may_refuse)))

    assert result("right") == "right"
    assert result("dq: max error 1") == "dq: max error 1"
    assert result("raises").startswith("fault: ")
    assert result("refused", may_refuse=True) == "refused: it takes no bias"
    assert result("refused").startswith("wrong: ")


def test_small_cases_run_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--device", "cpu", "--sanitize", "--only", "small-d64-l"]) == 0
    out = capsys.readouterr().out
    assert "hopper-forward small-d64-long bfloat16  refused" in out
    assert out.endswith("1 checks, 0 wrong\n")
    assert check.main(["--device", "cpu", "--only", "no such name"]) == 2


def test_every_cache_of_launches_is_found() -> None:
    launches.forget_plans()


@pytest.mark.parametrize("elsewhere", [None, "cpu"])
def test_direct_calls_are_held_to_the_rule(
    elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the torch backend instead of the kernels."""

    def wrong_keys(*arguments: Any) -> Any:
        found = tiled.backward(*arguments)
        return found._replace(k=found.k * 2)

    def at_places(*arguments: Any, off: int = 0) -> Any:
        *given, places = arguments
        if not isinstance(places, Places):
            return tiled.backward(*arguments)
        found = tiled.backward(*given)
        for name in "kv":
            rows = getattr(found, name).flatten(0, 1).flatten(1)
            at = getattr(places, f"d{name}_rows")
            for memory, place in (
                (getattr(places, f"d{name}"), at),
                (getattr(places, f"d{name}_alone"), -1 - at),
            ):
                x, place = rows[place >= 0], (4 * place // rows.shape[1])[place >= 0]
                memory[place[off:]] = x[: len(x) - off].to(memory.dtype)
        return found._replace(k=None, v=None)

    def reads_padding(problem: Any, tensors: Any) -> Any:
        out, lse = tiled.forward(problem, tensors)
        return out, lse + int(tensors.v.isnan().any())

    case = Case("", b=2, nq=20, nk=30, lengths=(0.4, 0.7), bias="1hqk", causal=True)
    packed = Case("", sequences=((5, 9), (7, 4)), hk=2, sink=True)
    monkeypatch.setattr(triton, "backward", tiled.backward)
    monkeypatch.setattr(hopper, "backward", at_places)
    monkeypatch.setattr(hopper, "forward", tiled.forward)
    for one in (case, packed):
        assert hopper_direct.check_forward(one, "float16", 2, "cpu")[0].startswith("refused")
    monkeypatch.setattr(hopper, "supports", lambda *_: None)
    monkeypatch.setattr(hopper_direct.torch.cuda, "synchronize", lambda: None)
    for one in (case, packed):
        assert not hopper_direct.check_forward(one, "float16", 2, "cpu", elsewhere)
        for flag in (False, True):
            assert not hopper_direct.check_backward(one, "float16", flag, 2, "cpu", elsewhere)
    monkeypatch.setattr(hopper, "backward", partial(at_places, off=1))
    found = hopper_direct.check_backward(packed, "float16", True, 0, "cpu", elsewhere)
    texts = ("", " alone")
    assert found == [f"d{name} differs at its places{text}" for name in "kv" for text in texts]
    monkeypatch.setattr(hopper, "takes_places", lambda _: False)
    monkeypatch.setattr(hopper, "forward", reads_padding)
    assert "past the end" in hopper_direct.check_forward(case, "float16", 0, "cpu", elsewhere)[0]
    monkeypatch.setattr(hopper, "backward", wrong_keys)
    found = hopper_direct.check_backward(packed, "float16", True, 0, "cpu", elsewhere)
    assert [text[:3] for text in found] == ["dk:"] * (2 if elsewhere is None else 1)


def test_a_fault_is_wrong_and_is_run_again(tmp_path: Path) -> None:
    options = SimpleNamespace(out=tmp_path / "out.csv", device="cpu")
    report = check.Report(options, [], 3)
    for result in ("right", "refused: no", "fault: its process died (-9)"):
        report.add(kinds.Check("cases", result[:3], "", "", fails, ()), result, 1.0)
    report.tell()
    assert (report.bad, report.left) == (1, 0)
    assert [row.result for row in results.read(options.out)] == sorted(
        r.result for r in report.rows
    )
