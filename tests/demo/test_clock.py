"""The demo ends in time: on simulated machines, with a simulated clock."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from demo import child, compiling, gpt, long_sequence, page, run, speed, timed_checks, training
from demo.app import app
from demo.clock import MARGIN, Clock, load_average, process_age
from demo.compiling import Kernels
from demo.long_sequence import LongSequence
from demo.report import DemoReport
from rowmax.cli.checks import Result
from rowmax.cli.features import FEATURES
from rowmax.cli.progress import Progress

CPU = torch.device("cpu")
Work = Callable[[float], None]


class Time:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_clock_counts_down():
    now = Time()
    clock = Clock(100.0, now, spent=5.0)
    part = clock.until(0.5)
    assert (clock.elapsed, clock.left, part.left) == (5.0, 95.0, 45.0)
    assert part.fits(45 / MARGIN)
    assert not part.fits(46 / MARGIN)
    now.seconds = 60.0
    assert (clock.left, part.left) == (35.0, 0.0)
    assert not part.fits(0.0)
    assert Clock(float("inf")).until(0.5).fits(1e9)


def test_age_and_load_are_those_of_the_system():
    assert process_age() >= 0.0
    if Path("/proc/self/stat").exists():
        assert 0.01 < process_age() < 36000
    load = load_average()
    assert load is None or load >= 0.0


# --- the demo on machines of any speed -----------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs the demo on a machine slower than an idle one by a factor.

    The work is simulated; the parts, their order and the decisions are the demo's own.
    """

    def run_machine(slowness: float, later: float = 1.0, cpu: bool = True, **options: Any) -> Any:
        now = Time()

        def work(seconds: float) -> None:
            now.seconds += slowness * (later if now.seconds > 60 else 1.0) * seconds

        names = ("cpu", "torch") if cpu else ("torch",)
        monkeypatch.setattr(run, "find_backends", lambda device: (names, {}))
        monkeypatch.setattr(run, "Kernels", _simulated_kernels(now, slowness))
        _simulate_checks(monkeypatch, work)
        _simulate_speed(monkeypatch, work, now)
        _simulate_training(monkeypatch, work, slowness)
        _simulate_long_sequence(monkeypatch, work, slowness, now)
        output = io.StringIO()
        report = run.run_demo(
            run.Options(CPU, report=tmp_path / "x.html", **options),
            Console(file=output, width=120),
            now,
        )
        return report, now.seconds, output.getvalue()

    return run_machine


def _simulated_kernels(now: Time, slowness: float) -> type[Kernels]:
    class Simulated(Kernels):
        """Kernels that take 23 and 17 seconds."""

        def __init__(self, names: tuple[str, ...], clock: Clock) -> None:
            self.clock, self.child = clock, None
            self.needed = "cpu" in names
            self.start = clock.elapsed

        def ready(self, name: str, dtype: torch.dtype) -> bool:
            seconds = 40 if dtype == torch.float64 else 23
            return name != "cpu" or self.clock.elapsed - self.start >= slowness * seconds

        @property
        def running(self) -> bool:
            return self.needed and self.clock.elapsed - self.start < slowness * 40

        def wait(self) -> None:
            now.seconds += 0.2

    return Simulated


def _simulate_checks(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    def check_feature(feature: Any, device: Any, names: tuple[str, ...], seed: int) -> Any:
        work(0.05 * len(names))
        return dict.fromkeys(names, Result(1e-7, 2e-7))

    monkeypatch.setattr(timed_checks, "check_feature", check_feature)


def _simulate_speed(monkeypatch: pytest.MonkeyPatch, work: Work, now: Time) -> None:
    def run_child(
        device: Any, backend: Any, quick: bool, seconds: float, on_measurement: Any
    ) -> speed.Speed:
        plan, end, found = speed.plan_for("cpu", quick), now.seconds + seconds, []
        work(3.0)
        for part in plan:
            work(3.0 if part.what == "memory" else 0.5)
            if now.seconds > end:
                now.seconds = end  # the demo stops the process then
                break
            cell = part.cell
            found.append(
                speed.Measurement(part.group, part.name, part.what, cell.n, cell.dtype, 1.0, 2.0)
            )
        now.seconds = min(now.seconds, end)
        return speed.Speed(4, 64, "float32", tuple(found), len(plan))

    monkeypatch.setattr(speed, "run", run_child)


def _simulate_training(monkeypatch: pytest.MonkeyPatch, work: Work, slowness: float) -> None:
    corpus = gpt.standard_library()
    full = training.plan_for(CPU, None, quick=False).work

    def step(self: training.Learner, share: float, x: Any, y: Any) -> tuple[float, float]:
        seconds = 0.01 + 0.12 * self.plan.work / full
        work(seconds)
        return 2.0, slowness * seconds

    def loss(self: training.Learner, x: Any, y: Any) -> torch.Tensor:
        work(0.1 * self.plan.work / full)
        return sum(p.sum() for p in self.model.parameters()) * 1.0  # pyright: ignore

    monkeypatch.setattr(run, "standard_library", lambda: corpus)
    monkeypatch.setattr(training.Learner, "step", step)
    monkeypatch.setattr(training.Learner, "loss", loss)


def _simulate_long_sequence(
    monkeypatch: pytest.MonkeyPatch, work: Work, slowness: float, now: Time
) -> None:
    def measure(shape: long_sequence.Shape) -> LongSequence:
        n = shape.n / 32768
        work(0.1 + 20 * n * n)
        seconds = slowness * 10 * n * n
        return LongSequence(shape, "cpu", seconds, seconds, 1, 1, {"out": 0.0}, 1e-5, shape.n)

    def run_child(
        shape: Any, device: Any, backend: Any, seed: int, seconds: float, on_length: Any
    ) -> LongSequence | None:
        clock, end = Clock(seconds, now), now.seconds + seconds
        work(3.0)
        longer = long_sequence.measure_lengths(shape, measure, clock, 1, on_length)
        found = [one for one in longer if now.seconds <= end]
        now.seconds = min(now.seconds, end)  # the demo stops the process then
        return found[-1] if found else None

    monkeypatch.setattr(long_sequence, "run", run_child)


def test_a_fast_machine_does_all(machine):
    found, seconds, output = machine(0.5)
    assert seconds < 160
    assert found.exit_code == 0
    assert found.left_out == []
    assert found.checks.count == (2 * len(FEATURES), 2 * len(FEATURES))
    assert found.training.steps == 150
    assert found.speed.complete
    assert found.long_sequence.shape.n == 32768
    assert "All of it holds" in output


@pytest.mark.parametrize("slowness", [0.1, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0])
def test_every_machine_ends_in_time(machine, slowness: float):
    found, seconds, _ = machine(slowness)
    assert seconds < 165
    for curve in found.training.curves.values() if found.training else ():
        assert len(curve.losses) == found.training.steps
    assert found.exit_code in (0, 3)
    assert (found.exit_code == 3) == (slowness > 4.5)


def test_a_slow_machine_says_what_was_left_out(machine, tmp_path: Path):
    found, seconds, output = machine(100.0)
    assert seconds < 165
    assert found.exit_code == 3
    assert found.ok
    assert found.checks.left_out > 25
    assert not timed_checks.enough(found.checks)
    done = [n for n, row in found.checks.rows.items() if not row["torch"].left_out]
    assert set(timed_checks.NEEDED) <= set(done)
    assert "Too little was run" in output
    assert "not run (time)" in output
    text = (tmp_path / "x.html").read_text()
    assert "not run (time)" in text
    assert "Too little was run" in text
    assert "All of it holds" not in output + text


def test_a_machine_that_becomes_slower_stops_both_models_at_one_step(machine):
    found, seconds, _ = machine(1.0, later=15.0, cpu=False, steps=5000)
    assert seconds < 165
    steps = {len(curve.losses) for curve in found.training.curves.values()}
    assert steps == {found.training.steps}
    assert found.training.steps < found.training.plan.steps <= 5000
    assert any("steps" in text for text in found.left_out)


def test_quick_takes_less_than_a_minute(machine):
    for slowness in (0.5, 1.0, 50.0):
        _, seconds, _ = machine(slowness, quick=True)
        assert seconds < 60


def test_kernels_that_do_not_compile_in_time_leave_the_work_to_torch(machine, monkeypatch):
    used = []
    original = training.rowmax_attention
    monkeypatch.setattr(
        training, "rowmax_attention", lambda name: used.append(name) or original("torch")
    )
    assert machine(8.0)[0].exit_code == 3
    assert machine(1.0)[0].exit_code == 0
    assert used == ["torch", None]
    found, _, _ = machine(8.0, backend="cpu")
    assert (found.training, found.long_sequence, found.exit_code) == (None, None, 3)


def test_time_before_the_demo_counts(machine):
    fast, slow = machine(0.5)[1], machine(2.0, spent=100.0)[1]
    assert fast < 160
    assert slow < 65


def test_a_failure_is_worse_than_too_little(machine):
    found, _, _ = machine(100.0)
    found.checks.rows["causal"]["torch"] = Result(1.0, 1.0, ("dq: wrong",))
    assert found.exit_code == 1
    assert "Not everything holds: see the checks" in found.verdict
    assert isinstance(found, DemoReport)
    assert "Not everything holds" in page.render(found)


class Compiler:
    """A child whose lines a test adds."""

    def __init__(self, module: str, *names: str) -> None:
        self.lines: list[Any] = []
        self.running, self.wrong = True, None

    def error(self) -> str | None:
        return self.wrong


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiling, "Child", Compiler)
    clock = Clock(100.0, Time())
    assert Kernels(("torch",), clock).child is None
    return Kernels(("cpu", "torch"), clock)


def test_kernels_are_ready_once_they_are_compiled(compiler):
    assert compiler.ready("torch", torch.float32)
    assert not compiler.ready("cpu", torch.float32)
    assert compiler.describe() == "compiling the CPU kernels for float32"
    compiler.child.lines.append(["float32", 1000.0, True])
    assert compiler.ready("cpu", torch.float32)
    assert compiler.ready("cpu", torch.float16)
    assert not compiler.ready("cpu", torch.float64)
    compiler.child.running = False
    assert not compiler.ready("cpu", torch.float64)


def test_kernels_that_are_not_kept_have_to_fit_again(compiler):
    compiler.child.lines += [["float32", 20.0, False], ["float64", 90.0, False]]
    assert compiler.ready("cpu", torch.float32)
    assert not compiler.ready("cpu", torch.float64)
    compiler.clock.now.seconds = 95.0
    assert compiler.ready("cpu", torch.float32), "this process has compiled it by now"


def test_a_compiler_that_fails_does_so_in_the_checks(compiler):
    compiler.child.running, compiler.child.wrong = False, "LLVM ERROR"
    assert compiler.ready("cpu", torch.float32)


def test_kernels_without_a_cache_on_disk_are_reported():
    pytest.importorskip("numba")
    code = """
from importlib import import_module
from numba.core.caching import CacheImpl
from demo import compiling

CacheImpl._locator_classes = []
for line in compiling.compile_each(["float32"], lambda dtype: import_module("rowmax.cpu")):
    print(line[0], line[2])
"""
    path = os.pathsep.join(filter(None, (str(child.ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["float32", "False"]


# --- its pieces ----------------------------------------------------------------------------------


def test_a_log_file_gets_a_line_every_few_seconds():
    output = io.StringIO()
    with Progress(Console(file=output), "Checks: starting", interval=0.05) as progress:
        progress.show("Checks: 3 of 50 done; next: [dropout]")
        time.sleep(0.4)
    lines = output.getvalue().splitlines()
    assert lines[0].endswith("0 s  Checks: starting")
    assert len(lines) > 3
    assert lines[-1].endswith("Checks: 3 of 50 done; next: [dropout]")


def test_a_child_is_stopped():
    given = (1 << 20, 4, 64, "float32", "cpu", "torch", 0, None)  # would take hours
    with child.Child("demo.long_sequence", *given) as hours:
        assert not hours.wait(0.1)
    assert not hours.running
    shape = long_sequence.Shape(1 << 20, 4, 64, "float32")
    assert long_sequence.run(shape, CPU, "torch", seconds=0.2) is None


def test_the_long_sequence_grows_as_far_as_it_fits():
    now = Time()

    def measure(shape: long_sequence.Shape) -> LongSequence:
        seconds = 32 * (shape.n / 32768) ** 2
        now.seconds += seconds
        return LongSequence(shape, "cpu", seconds / 4, 3 * seconds / 4, 1, 1, {}, 1e-5, shape.n)

    shape = long_sequence.Shape(32768, 4, 64, "float32")
    for budget, longest in ((1000.0, 32768), (40.0, 16384), (4.0, 8192), (0.01, 2048)):
        now.seconds = 0.0
        found = list(long_sequence.measure_lengths(shape, measure, Clock(budget, now), 1))
        assert found[0].shape.n == 2048
        assert found[-1].shape.n == longest
        assert all(one.asked == 32768 for one in found)
        assert found[-1].complete == (longest == 32768)


@pytest.mark.parametrize("where", ["missing/x.html", "folder"])
def test_a_report_that_cannot_be_written_is_refused_first(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("demo.app.run_demo", lambda *_: pytest.fail("the demo began"))
    result = CliRunner().invoke(app, ["--report", str(tmp_path / where)])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "--report" in result.output
    assert where.split("/")[0] in result.output


def test_a_report_that_can_be_written_is_left_alone(tmp_path: Path):
    old = tmp_path / "old.html"
    old.write_text("old")
    assert run.report_error(old) is None
    assert run.report_error(tmp_path / "new.html") is None
    assert old.read_text() == "old"
    assert not (tmp_path / "new.html").exists()
