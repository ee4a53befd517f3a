"""The whole demo, small: what it prints, what it returns, and the report."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from rowmax.cli import demo, long, report
from rowmax.cli.app import app
from rowmax.cli.findings import Findings

VOID = {"meta", "br", "line", "rect", "path"}


class Page(HTMLParser):
    """Every tag closed in order; what the page asks for from outside."""

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
def findings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, str, Path]:
    """The demo run once: what it found, what it printed, and its report."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    kept: list[Findings] = []
    original = report.page

    def page(found: Findings) -> str:
        kept.append(found)
        return original(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "page", page)
        result = CliRunner().invoke(
            app,
            # with time enough on a machine that other tests keep busy
            [
                "demo",
                "--quick",
                *["--device", "cpu", "--backend", "torch", "--seconds", "250", "--report"],
                str(path),
            ],
        )
    assert result.exit_code == 0, result.output
    return kept[0], result.output, path


def test_it_says_what_it_found(findings):
    found, output, path = findings
    assert found.ok
    assert "All of it holds" in output
    assert "They agree" in output
    assert f"Report: {path}" in output.replace("\n", "")


def test_the_report_is_well_formed_and_needs_nothing_else(findings):
    _, _, path = findings
    text = path.read_text(encoding="utf-8")
    page = read(text)
    assert page.outside == []
    assert "url(" not in text
    assert "@import" not in text
    assert page.counts["svg"] == 3
    assert "Nothing was left out" in text
    assert "load average" in text
    assert page.counts.get("script", 0) == 0
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\bnan\b|\binf\b|None", re.sub(r"<pre>.*?</pre>", "", text, flags=re.S))


def test_what_a_model_writes_is_escaped(findings):
    found, _, _ = findings
    training = replace(found.training, sample="<script>alert(1)</script>\x1b[31m</pre>")
    text = report.page(replace(found, training=training))
    assert read(text).counts.get("script", 0) == 0
    assert "\x1b" not in text


def test_the_report_of_a_failure_says_so(findings):
    found, _, _ = findings
    wrong = replace(found, long=found.long._replace(errors={"dq": 0.5}))
    assert not wrong.ok
    text = report.page(wrong)
    read(text)
    assert "see the long sequence" in text
    assert "differ from" in text


def test_a_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, findings, tmp_path: Path):
    found, _, _ = findings
    monkeypatch.setattr(demo, "check_within", lambda *_: (found.checks, "torch", True))
    monkeypatch.setattr(demo, "train", lambda *_: found.training)
    bad = found.long._replace(errors={"dq": 0.5})
    monkeypatch.setattr(demo, "run_long", lambda *_: bad)
    path = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--report", str(path)])
    assert result.exit_code == 1
    assert "Not everything holds: see the long sequence" in result.output
    assert path.exists()


def test_the_long_sequence_is_checked():
    shape = long.Shape(700, 2, 16, "float32")
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, shape.n, shape.heads, shape.d) for _ in range(4))
    out, lse, gradients, *_ = long._both(q, k, v, dout, torch.device("cpu"), "torch")
    assert max(long.errors(q, k, v, dout, out, lse, gradients).values()) < 1e-5
    for n, name in enumerate(("dq", "dk", "dv")):
        spoilt = tuple(g * 1.001 if m == n else g for m, g in enumerate(gradients))
        found = long.errors(q, k, v, dout, out, lse, spoilt)
        assert found[name] == pytest.approx(1e-3, rel=0.1)
        assert max(error for other, error in found.items() if other != name) < 1e-5
    assert long.errors(q, k, v, dout, out * 1.001, lse, gradients)["out"] > 5e-4
    assert long.errors(q, k, v, dout, out, lse + 0.1, gradients)["lse"] > 1e-3


def test_memory_of_the_long_sequence_is_far_below_the_matrix(findings):
    found, _, _ = findings
    if found.long.memory is None:
        pytest.skip("this system does not tell its peak of memory")
    assert found.long.memory < found.long.shape.matrix_bytes / 2


def test_a_child_that_fails_is_told():
    shape = long.Shape(64, 1, 16, "float32")
    with pytest.raises(RuntimeError, match="the long sequence failed"):
        long.run(shape, torch.device("cpu"), "hopper")


def test_memory_sees_what_is_held():
    from rowmax.cli.memory import Memory

    memory = Memory(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    peak = memory.peak()
    if peak is None:
        pytest.skip("this system does not tell its peak of memory")
    del held
    assert 60 << 20 < peak < 120 << 20


def test_the_console_of_check(findings):
    found, _, _ = findings
    console = Console(width=120, record=True, file=io.StringIO())
    assert demo.check_installation(torch.device("cpu"), "torch", 0, console).ok
    assert f"{found.checks.count[0]} of {found.checks.count[1]} right" in console.export_text()
