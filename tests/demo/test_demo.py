"""The whole demo, small: its output, its exit code, and the report."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from demo import long_sequence, page, run
from demo.app import app
from demo.memory import Memory
from demo.report import DemoReport

VOID = {"meta", "br", "line", "rect", "path"}


class Page(HTMLParser):
    """Asserts that every tag is closed in order, and lists what the page loads from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
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
    assert tags.counts["svg"] == 3
    assert "Nothing was left out" in text
    assert "load average" in text
    assert tags.counts.get("script", 0) == 0
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\bnan\b|\binf\b|None", re.sub(r"<pre>.*?</pre>", "", text, flags=re.S))


def test_what_a_model_writes_is_escaped(demo):
    found, _, _ = demo
    training = replace(found.training, sample="<script>alert(1)</script>\x1b[31m</pre>")
    text = page.render(replace(found, training=training))
    assert read(text).counts.get("script", 0) == 0
    assert "\x1b" not in text


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
