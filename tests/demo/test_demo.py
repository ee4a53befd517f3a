"""The whole demo, small: its output, its exit code, and the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from demo import long_sequence, page, run, speed, timed_checks
from demo.app import app
from demo.memory import Memory
from demo.report import DemoReport
from rowmax.reference import tolerance
from tests import kept_definitions

VOID = {"meta", "br", "line", "rect", "path"}


class Page(HTMLParser):
    """Asserts that every tag is closed in order, and lists what the page loads from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.links: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "srcset")]
        self.links += [v for k, v in attrs if k == "href"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoReport, str, Path]:
    """Run the demo once; return its report, its output, and the path of the page."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    reports: list[DemoReport] = []
    original = page.render

    def render(report: DemoReport) -> str:
        reports.append(report)
        return original(report)

    options = ["--quick", "--device", "cpu", "--backend", "torch"]
    options += ["--seconds", "250"]  # time enough on a machine that other tests keep busy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render", render)
        patch.setattr(speed, "SECONDS", 0.001)  # no test reads how long a call takes
        patch.setattr(timed_checks, "check_feature", kept_definitions.check_feature)
        result = CliRunner().invoke(app, [*options, "--report", str(path)])
    assert result.exit_code == 0, result.output
    return reports[0], result.output, path


def test_it_prints_the_verdict(demo):
    found, output, path = demo
    assert found.ok
    assert "All of it holds" in output
    assert "They agree" in output
    assert f"Report: {path}" in output.replace("\n", "")


def test_the_report_is_well_formed_and_needs_nothing_else(demo):
    _, _, path = demo
    text = path.read_text(encoding="utf-8")
    tags = read(text)
    assert tags.outside == []
    assert "url(" not in text
    assert "@import" not in text
    assert [(path.parent / link).resolve() for link in tags.links] == [
        Path(tolerance.__file__ or "").resolve()
    ]
    assert tags.counts["svg"] == 2 * 4  # speed forward and both, losses, their difference
    assert text.count('class="phone-only"') == 4
    assert "Nothing was left out" in text
    assert "load average" in text
    assert tags.counts.get("script", 0) == 0
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\bnan\b|\binf\b|None", text)


def test_texts_are_escaped(demo):
    found, _, _ = demo
    machine = replace(found.machine, device="<script>alert(1)</script>")
    text = page.render(replace(found, machine=machine, command="python '</pre><script>'"))
    assert read(text).counts.get("script", 0) == 0


def test_the_text_of_charts_is_at_least_12_pixels_on_a_phone(demo):
    _, _, path = demo
    text = path.read_text(encoding="utf-8")
    widths = [int(w) for w in re.findall(r'class="phone-only" width="(\d+)"', text)]
    inner = 390 - 2 * 16 - 2 * 0.7 * 16 - 2  # the width inside a figure
    assert widths
    assert max(widths) <= inner
    assert re.search(r"svg \{[^}]*font: 14px", text)
    assert not re.search(r"font(-size)?: \.[0-7]\d*rem", text)


def test_the_same_numbers_are_in_a_file(demo):
    found, _, path = demo
    numbers = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert numbers["verdict"] == found.verdict
    assert numbers["machine"]["torch"] == torch.__version__
    speed = numbers["speed"]["measurements"]
    assert [m["rowmax"] for m in speed] == [m.rowmax for m in found.speed.measurements]
    assert len(numbers["checks"]["rows"]) == len(found.checks.rows)
    assert len(numbers["training"]["curves"]["SDPA"]["losses"]) == found.training.steps
    assert path.with_suffix(".json").name in path.read_text(encoding="utf-8")


def test_speed_is_shown_next_to_that_of_sdpa(demo):
    found, output, path = demo
    assert found.speed.complete
    assert {m.what for m in found.speed.measurements} == {"forward", "both", "memory"}
    assert all(m.sdpa is not None for m in found.speed.measurements)
    text = path.read_text(encoding="utf-8")
    for part in ("Is it fast?", "bias with its gradient", "SDPA / rowmax", "Peak memory"):
        assert part in text
    assert "Next to SDPA" in output


def test_errors_are_bars_of_the_share_that_is_allowed(demo):
    found, _, path = demo
    share = found.checks.largest_share
    assert 0 < share <= 1
    text = path.read_text(encoding="utf-8")
    assert f"{100 * share:.0f} %" in text
    assert text.count('class="group"') == len(found.checks.rows)
    wrong = replace(found.checks.rows["causal"]["torch"], wrong=("dq: wrong",), shares=(7.0, 1.0))
    rows = found.checks.rows | {"causal": {"torch": wrong}}
    text = page.render(replace(found, checks=replace(found.checks, rows=rows)))
    assert 'class="bad" style="width: 100.0%"' in text
    assert 'class="tile bad"' in text


@pytest.mark.parametrize(
    ("start", "end", "busy"), [(0.2, 2.4, False), (4.0, 2.0, True), (0.1, 5.0, True)]
)
def test_a_busy_machine_is_named(demo, start: float, end: float, busy: bool):
    found, _, _ = demo
    machine = replace(found.machine, load=start, cores=2)
    text = page.render(replace(found, machine=machine, load=end))
    assert ("The machine was busy" in text) == busy


def test_the_report_names_the_machine_and_the_command(demo):
    found, _, path = demo
    text = path.read_text(encoding="utf-8")
    for part in ("instructions", "Numba", "load average", torch.__version__, found.command):
        assert escape(part) in text
    assert found.command.startswith("python -m demo --quick --device cpu --backend torch")


def test_the_report_of_a_failure_says_so(demo):
    found, _, _ = demo
    wrong = replace(found, long_sequence=found.long_sequence._replace(errors={"dq": 0.5}))
    assert not wrong.ok
    text = page.render(wrong)
    read(text)
    assert "see the long sequence" in text
    assert "differ from" in text


def test_a_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, demo, tmp_path: Path):
    found, _, _ = demo
    monkeypatch.setattr(run, "run_checks", lambda *_: (found.checks, "torch", True))
    monkeypatch.setattr(run, "run_speed", lambda *_: found.speed)
    monkeypatch.setattr(run, "run_training", lambda *_: found.training)
    bad = found.long_sequence._replace(errors={"dq": 0.5})
    monkeypatch.setattr(run, "run_long_sequence", lambda *_: bad)
    path = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["--device", "cpu", "--report", str(path)])
    assert result.exit_code == 1
    assert "Not everything holds: see the long sequence" in result.output
    assert path.exists()


def test_the_long_sequence_is_checked():
    shape = long_sequence.Shape(700, 2, 16, "float32")
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, shape.n, shape.heads, shape.d) for _ in range(4))
    out, lse, gradients, *_ = long_sequence.run_both(q, k, v, dout, "torch")
    assert max(long_sequence.errors(q, k, v, dout, out, lse, gradients).values()) < 1e-5
    for n, name in enumerate(("dq", "dk", "dv")):
        spoilt = tuple(g * 1.001 if m == n else g for m, g in enumerate(gradients))
        found = long_sequence.errors(q, k, v, dout, out, lse, spoilt)
        assert found[name] == pytest.approx(1e-3, rel=0.1)
        assert max(error for other, error in found.items() if other != name) < 1e-5
    assert long_sequence.errors(q, k, v, dout, out * 1.001, lse, gradients)["out"] > 5e-4
    assert long_sequence.errors(q, k, v, dout, out, lse + 0.1, gradients)["lse"] > 1e-3


def test_memory_of_the_long_sequence_is_far_below_the_matrix(demo):
    found, _, _ = demo
    if found.long_sequence.memory is None:
        pytest.skip("this system does not report its peak of memory")
    assert found.long_sequence.memory < found.long_sequence.shape.matrix_bytes / 2


def test_a_child_that_fails_raises():
    shape = long_sequence.Shape(64, 1, 16, "float32")
    with pytest.raises(RuntimeError, match="the long sequence failed"):
        long_sequence.run(shape, torch.device("cpu"), "hopper")


def test_memory_sees_what_is_held():
    memory = Memory(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    peak = memory.peak()
    if peak is None:
        pytest.skip("this system does not report its peak of memory")
    del held
    assert 60 << 20 < peak < 120 << 20


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--steps", "3"), "--steps"),
        (("--device", "nowhere"), "--device"),
        (("--backend", "cudnn"), "want one of"),
        (("--seconds", "1"), "--seconds"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], wanted: str, tmp_path: Path):
    result = CliRunner().invoke(app, [*options, "--report", str(tmp_path / "x.html")])
    assert result.exit_code == 2
    assert wanted in result.output
    assert "Traceback" not in result.output
