"""``rowmax trace``: its file and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from rowmax.trace import Setting, page

from .test_app import invoke

SMALL = ("trace", "-n", "6", "-d", "2", "--block-q", "3", "--block-k", "2")


def test_it_writes_the_page_of_its_options(tmp_path: Path):
    file = tmp_path / "page.html"
    code, text = invoke(
        *SMALL, "--keys", "8", "--mask", "documents", "--documents", "3", "--prefix", "2",
        "--window", "3,none", "--softcap", "5", "--seed", "7", "-o", str(file),
    )  # fmt: skip
    assert code == 0, text
    assert "kB" in text
    wanted = Setting(6, 8, 2, 3, 2, (3, None), 3, 2, 5.0, 7)
    assert file.read_text("utf-8") == page(wanted, "documents")


def test_it_opens_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or bool(opened[1:]))
    file = tmp_path / "a page.html"
    code, text = invoke(*SMALL, "-o", str(file), "--open")
    assert code == 0
    assert opened == [file.as_uri()]
    assert "No browser was found" in text
    assert "No browser" not in invoke(*SMALL, "-o", str(file), "--open")[1]
    invoke(*SMALL, "-o", str(file))
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("-n", "65"), "queries: got 65; want 1 to 64"),
        (("--mask", "sparse"), "mask: got 'sparse'; want one of none, causal, window"),
        (("--window", "5"), "--window: got '5'; want left,right"),
        (("--prefix", "7"), "prefix: got 7; want 0 to 6"),
        (("--softcap", "-1"), "--softcap"),
        (("--block-q", "x"), "--block-q"),
        (("-o", "no/such/folder/page.html"), "--output"),
    ],
)
def test_bad_options_are_named(
    options: tuple[str, ...], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, text = invoke(*SMALL, *options)
    assert code == 2
    assert wanted in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []
