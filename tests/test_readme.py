"""The README and the pages of docs are right: examples run, links and numbers hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rowmax

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)#:]+)\)", text)))


WITH_CODE = [page for page in PAGES if blocks("python", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("code", blocks("python"))
def test_the_example_runs(code: str):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + "\nassert bias.grad.shape == bias.shape"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "float32" in done.stdout


def test_there_is_an_example():
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path):
    """One after the other, as they are read."""
    code = blocks("python", page.read_text(encoding="utf-8"))
    # torch's own: forward mode imports scripted functions
    own = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
    command = [sys.executable, "-W", "error", "-W", own, "-c", "\n".join(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", links(TEXT))
def test_links_lead_somewhere(target: str):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path):
    for target in links(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readme_links_every_page():
    assert WITH_CODE
    assert {str(page.relative_to(ROOT)) for page in PAGES} <= set(links(TEXT))


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", TEXT):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_alone_lists_the_targets_and_starts_nothing():
    done = [
        subprocess.run(
            ["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout
        for arguments in (["help"], [])
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)", makefile, flags=re.M)
    assert targets is not None
    for text in done:
        listed = re.findall(r"^  (\w+) +\w", text, flags=re.M)
        assert sorted(listed) == sorted(targets[1].split())


def test_the_command_line_takes_what_is_shown():
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from rowmax.cli.app import app

    shown = re.findall(r"^\$ rowmax (.*?)\s*(?:#.*)?$", "\n".join(blocks("console")), flags=re.M)
    assert shown
    for line in shown:
        words = line.split()
        extra = ["--device", "cpu"] if words[0] == "explain" else ["--help"]
        result = CliRunner().invoke(app, [*words, *extra])
        assert result.exit_code == 0, result.output


def test_every_public_name_is_mentioned():
    for name in rowmax.__all__:
        if name not in ("Mask", "Explanation"):
            assert name in TEXT, name
