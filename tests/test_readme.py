"""The README is right: its example runs, links and numbers hold. ``tests/docs`` checks docs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rowmax
from tests import forks

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.parent.name not in ("project", "reference", "derivation", "performance")
    and page.name not in ("index.md", "start.md")
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.M | re.S)


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)#:]+)\)", text)))


@pytest.mark.parametrize("code", blocks("python"))
def test_the_example_runs(code: str):
    done = forks.run(code + "\nassert bias.grad.shape == bias.shape", strict=True)
    assert done.returncode == 0, done.stderr
    assert "float32" in done.stdout


def test_there_is_an_example():
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("target", links(TEXT))
def test_links_lead_somewhere(target: str):
    assert (ROOT / target).exists()


def test_the_readme_links_every_guide():
    """``docs/index.md`` leads to the other pages: Sphinx warns of a page that it leaves out."""
    assert GUIDES
    assert {str(page.relative_to(ROOT)) for page in GUIDES} <= set(links(TEXT))


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
        if name not in ("Mask", "Explanation", "Warmup"):  # results and base classes
            assert name in TEXT, name
